"""What a run tells about itself, and its form for programs (``--json``): only JSON lines on stdout (L7).

Text comes here redacted. The form for people is ``text_display``. The lines are described by
``schema/asp-agent-events.schema.json``.
"""

import contextlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TextIO, cast

from asp.errors import AspError
from asp_agent.errors import OutputClosed
from asp_agent.messages import ToolResult, Usage

MAX_SUMMARY_CHARACTERS = 1000
"""A model can write a command of 10 MB; what is shown of it in one line is this much."""

SCRIPTED = "scripted model: no LLM is called"


@dataclass(frozen=True, slots=True)
class Header:
    """What a run is started with."""

    model: str
    scripted: bool
    contract: str
    workspace: str
    max_turns: int
    timeout_s: float | None
    run: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. ``reason`` is a word for programs, ``message`` a line for people, ``text`` the last answer."""

    exit_code: int
    reason: str
    message: str = ""
    text: str = ""
    turns: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float | None = None


def reason_of(error: AspError) -> str:
    """Return one word for programs: the class of the error, ConnectionLost as ``connection_lost``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()


class Display(Protocol):
    """What the loop tells about itself. Text is redacted before it comes here. Raises OutputClosed."""

    def start(self, header: Header) -> None:
        """Show what the run is started with."""
        ...

    def text(self, piece: str) -> None:
        """Show a piece of what the model writes, as it comes. It counts when ``message`` brings the whole."""
        ...

    def message(self, text: str, *, final: bool) -> None:
        """Show what the model says; ``final`` if it calls no tool with it."""
        ...

    def tool_call(self, call_id: str, name: str, raw_arguments: str, summary: str) -> None:
        """Show a call before it runs."""
        ...

    def tool_result(self, result: ToolResult, seconds: float) -> None:
        """Show what came of it."""
        ...

    def retrying(self, reason: str, wait_s: float, attempt: int) -> None:
        """Show that the model is asked again."""
        ...

    def usage(self, usage: Usage, total: Usage | None = None, cost_usd: float | None = None) -> None:
        """Show the tokens of one turn, and of the run so far; ``cost_usd`` is the run's, None if it is not known."""
        ...

    def note(self, text: str) -> None:
        """Show a line about the run itself."""
        ...

    def asking(self) -> contextlib.AbstractContextManager[None]:
        """Leave the terminal alone while somebody is asked something on it."""
        ...

    def result(self, outcome: Outcome, run: str | None, duration_s: float) -> None:
        """Show the end. Always the last call."""
        ...


class JsonDisplay:
    """For programs: one JSON object a line, the last one always ``{"type": "result", ...}``."""

    def __init__(self, out: TextIO) -> None:
        """Write to ``out`` only."""
        self._out = out

    def start(self, header: Header) -> None:
        """Emit ``start``."""
        note = {"note": SCRIPTED} if header.scripted else {}
        self._emit("start", **asdict(header), **note)

    def text(self, piece: str) -> None:
        """Nothing: a program is given whole messages."""

    def message(self, text: str, *, final: bool) -> None:  # noqa: ARG002
        """Emit ``message``."""
        self._emit("message", text=text)

    def tool_call(self, call_id: str, name: str, raw_arguments: str, summary: str) -> None:  # noqa: ARG002
        """Emit ``tool_call`` with the arguments as the model wrote them."""
        self._emit("tool_call", tool_call_id=call_id, name=name, raw_arguments=raw_arguments)

    def tool_result(self, result: ToolResult, seconds: float) -> None:
        """Emit ``tool_result`` with the exact text that the model is given."""
        fields = {name: getattr(result, name) for name in ("tool_call_id", "name", "content", "is_error")}
        self._emit("tool_result", **fields, images=len(getattr(result, "images", ())), duration_s=round(seconds, 3))

    def retrying(self, reason: str, wait_s: float, attempt: int) -> None:
        """Emit ``retrying``."""
        self._emit("retrying", reason=reason, wait_s=wait_s, attempt=attempt)

    def usage(self, usage: Usage, total: Usage | None = None, cost_usd: float | None = None) -> None:  # noqa: ARG002
        """Emit ``usage``: the tokens of one turn, and what the run has cost so far."""
        self._emit("usage", **asdict(usage), cost_usd=cost_usd)

    def note(self, text: str) -> None:
        """Emit ``note``."""
        self._emit("note", text=text)

    def asking(self) -> contextlib.AbstractContextManager[None]:
        """Nothing stands in the way."""
        return contextlib.nullcontext()

    def result(self, outcome: Outcome, run: str | None, duration_s: float) -> None:
        """Emit ``result``."""
        self._emit("result", **asdict(outcome), run=run, duration_s=round(duration_s, 3))

    def _emit(self, kind: str, **fields: object) -> None:
        # ASCII only: no control or bidi character reaches a terminal as itself, and no locale matters.
        put(self._out, json.dumps({"type": kind, **fields}) + "\n")


def put(out: TextIO, text: str) -> None:
    """Write to ``out``, now. Raises OutputClosed."""
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError as error:
        msg = "nobody reads the output any more"
        raise OutputClosed(msg) from error
    except OSError as error:
        msg = f"cannot write the answer ({error.strerror})"
        raise OutputClosed(msg) from error


def summarise(raw_arguments: str, argument: str) -> str:
    """Return the one argument that says most about a call, as one line; nothing if the arguments cannot be read."""
    try:
        arguments: Any = json.loads(raw_arguments)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(arguments, dict):
        return ""
    text = " ".join(str(cast("dict[str, Any]", arguments).get(argument, ""))[: 2 * MAX_SUMMARY_CHARACTERS].split())
    return text if len(text) <= MAX_SUMMARY_CHARACTERS else text[: MAX_SUMMARY_CHARACTERS - 1] + "…"
