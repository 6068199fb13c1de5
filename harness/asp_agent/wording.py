"""What the model is told of calls that did not run or whose end nobody saw; nothing names the transport (promise 2)."""

from asp_agent.limits import Cause
from asp_agent.messages import Stop

CONTINUE = "Your answer was cut off at the output limit. Go on in smaller steps: shorter answers, smaller files in one call."
REPEATED_ID = "This was not run: its id repeats that of an earlier call in the same answer."

INTERRUPTED = {
    Cause.INTERRUPTED: "Interrupted by the user while this ran; its outcome is unknown and it may have taken effect.",
    Cause.TIME: "The time for the task ended while this ran; its outcome is unknown and it may have taken effect.",
}
NOT_REACHED = {
    Cause.INTERRUPTED: "Interrupted by the user before this ran.",
    Cause.TIME: "This was not run: the time for the task is over.",
}
KILLED = "The run ended while this ran; its outcome is unknown and it may have taken effect."
NOT_REACHED_KILLED = "This was not run: the run ended before."
GO_ON = "Go on with the task where you were."
BROKEN = "This ended by an internal error; its outcome is unknown and it may have taken effect."
NOT_REACHED_BROKEN = "This was not run, because of an internal error."

STOPPED = {Cause.INTERRUPTED: (130, "interrupted"), Cause.TIME: (3, "timeout")}
"""The exit code of a run that was stopped from outside (L7), and the word for programs."""

_STOPS = {
    Stop.LENGTH: "the answer was cut off at the output limit, so the arguments may be incomplete",
    Stop.CONTEXT_FULL: "the conversation no longer fits the context window",
    Stop.REFUSAL: "the answer was refused",
    Stop.PAUSED: "the answer was paused",
    Stop.DONE: "the answer ended without asking for tools",
}


def interrupted(cause: Cause, before: str) -> str:
    """Say that a call was stopped while it ran, below what it gave ``before``."""
    kept = before.rstrip("\n")
    return f"{kept}\n\n{INTERRUPTED[cause]}" if kept else INTERRUPTED[cause]


def not_run(stop: Stop) -> str:
    """Say why the calls of a turn that ended by ``stop`` were not run (L2)."""
    return f"This was not run: {_STOPS[stop]}."


def unknown_tool(name: str, known: list[str]) -> str:
    """Name the tools that there are."""
    return f"There is no tool named {name!r}. The tools are: {', '.join(known)}."
