"""The loop: ask the model, run the tools that it calls in the sandbox, give it the results, until it calls none.

Whatever goes wrong becomes a tool result that says so, or an Outcome. The history can always be made valid (L1): when a
turn with calls is appended its results are owed, and ``_run_calls`` pays them whatever happens.
"""

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field

from asp.errors import AspError, ConnectionLost, TransportError, WorkspaceMissing
from asp.transport import Transport
from asp_agent import wording
from asp_agent.decide import Action, Approve, Decide, allow_all, nobody_approves, permission
from asp_agent.display import Display, Outcome, reason_of, summarise
from asp_agent.errors import ModelUnavailable
from asp_agent.history import History, with_unique_ids
from asp_agent.limits import Cause, Limits, Stopped, Watch
from asp_agent.messages import (
    AssistantTurn,
    Model,
    Request,
    Retrying,
    Stop,
    TextDelta,
    ToolCall,
    ToolResult,
    TurnDone,
    Usage,
    UserTurn,
)  # fmt: skip
from asp_agent.meter import add_usage
from asp_agent.redact import Redactor, StreamRedactor
from asp_agent.run import RunFolder, identify
from asp_agent.tools.arguments import ArgumentsInvalid, parse
from asp_agent.tools.tool import NOT_RUN, Interrupted, Produced, Tool, perform

MAX_CUT_TURNS = 3
"""So many answers in a row may be cut off at the output limit; a model that does not get shorter ends the run."""

PROBE_TIMEOUT_S = 30


@dataclass
class Agent:
    """One run of the loop. Every part is given; the loop itself does no I/O."""

    model: Model
    transport: Transport
    tools: Sequence[Tool]
    system: str
    run_folder: RunFolder
    display: Display
    redact: Redactor
    watch: Watch
    limits: Limits = field(default_factory=Limits)
    decide: Decide = allow_all
    approve: Approve = nobody_approves
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        """Start with nothing said."""
        self._by_name = {tool.schema.name: tool for tool in self.tools}
        self._turns, self._usage, self._text = 0, Usage(), ""
        self._end: Outcome | None = None  # set by a call that ends the run; the calls after it are not run
        self._results: list[ToolResult] = []
        self.running = ""  # the call that runs now, for people
        self.interrupted = ""  # the call that was stopped from outside: it may live on in the sandbox

    async def run(self, task: str) -> Outcome:
        """Work on ``task`` until it is done or cannot go on. Raises for bugs, and if our own disk fails."""
        self._append(UserTurn(text=task))
        try:
            return await self._loop()
        except Stopped as stopped:
            return self._stopped(stopped.cause)
        except AspError as error:
            return self._outcome(error.exit_code, reason_of(error), str(error))

    def abandon(self) -> Outcome:
        """Give up waiting, now: pay the results that are owed and return the end of the run. Synchronous."""
        self._pay(wording.INTERRUPTED[Cause.INTERRUPTED], wording.NOT_REACHED[Cause.INTERRUPTED])
        return self._stopped(Cause.INTERRUPTED)

    async def _loop(self) -> Outcome:  # noqa: C901 - one story, told in order
        cut = empty = 0
        while self._turns < self.limits.max_turns:
            turn, repeated = with_unique_ids(await self._ask())
            said = bool(turn.text.strip() or turn.tool_calls or (turn.native and turn.stop is Stop.PAUSED))
            answered = said and not turn.tool_calls and turn.stop in {Stop.DONE, Stop.TOOL_CALLS}
            if said:
                self._text = self.redact(turn.text)
                if self._text.strip():
                    self.display.message(self._text, final=answered)
                self._append(turn)
                await self._run_calls(turn, repeated)
            else:  # nothing that could be replayed (P72): ask again, and it does not enter the history
                self.run_folder.event("turn_dropped", stop=turn.stop.value, detail=turn.stop_detail)
            if self._end is not None:
                return self._end
            cut = cut + 1 if turn.stop is Stop.LENGTH else 0
            empty = 0 if said else empty + 1
            match turn.stop:
                case Stop.REFUSAL:
                    return self._outcome(1, "refused", f"the model refused to go on {turn.stop_detail}".strip())
                case Stop.CONTEXT_FULL:
                    return self._outcome(1, "context_full", "the conversation no longer fits the model's context window")
                case Stop.LENGTH if cut >= MAX_CUT_TURNS:
                    return self._outcome(1, "cut", f"{cut} answers in a row were cut off at the output limit")
                case Stop.LENGTH if said and not turn.tool_calls:
                    self._append(UserTurn(text=wording.CONTINUE))
                case _ if answered:
                    return self._outcome(0, "done")
                case _ if empty > 1:
                    return self._outcome(1, "empty", "the model answered nothing, twice")
                case _:
                    pass
        return self._outcome(3, "max_turns", f"the limit of {self.limits.max_turns} turns was reached")

    async def _ask(self) -> AssistantTurn:
        """Ask the model once and return its whole turn. What streamed of a turn that never ended is only logged."""
        request = Request(self.system, self.history.for_request(), [tool.schema for tool in self.tools])
        pieces: list[str] = []
        shown = StreamRedactor(self.redact)
        turn: AssistantTurn | None = None
        try:
            # aclosing: a stream that is left early would hold its connection until it is collected.
            async with aclosing(self.model.stream(request)) as events:
                with self.watch.stoppable():
                    async for event in events:
                        match event:
                            case TextDelta(text):
                                pieces.append(text)
                                self.display.text(shown(text))
                            case Retrying(reason, wait_s, attempt):
                                pieces, shown = [], StreamRedactor(self.redact)
                                self.run_folder.event("retrying", reason=reason, wait_s=wait_s, attempt=attempt)
                                self.display.retrying(self.redact(reason), wait_s, attempt)
                            case TurnDone(whole):
                                turn = whole
        finally:
            self.display.text(shown.rest())
            text = turn.text if turn is not None else "".join(pieces)
            if text:
                self.run_folder.event("message_delta", text=text)
        if turn is None:
            msg = "the model's answer ended before it was complete"
            raise ModelUnavailable(msg)
        self._turns += 1
        self._usage = add_usage(self._usage, turn.usage)
        self.run_folder.event("usage", **asdict(turn.usage))
        self.display.usage(turn.usage)
        return turn

    async def _run_calls(self, turn: AssistantTurn, repeated: frozenset[str]) -> None:
        """Run the calls of a turn in order and append one result for each, also when something breaks in the middle."""
        self._results = []
        try:
            for call in turn.tool_calls:
                started = time.monotonic()
                tool = self._by_name.get(call.name)
                summary = self.redact(summarise(call.raw_arguments, tool.summary if tool else ""))
                self.display.tool_call(call.id, call.name, self.redact(call.raw_arguments), summary)
                self.running = f"{call.name} {summary}"
                produced = await self._run_call(turn, call, tool, repeated)
                self.running = ""
                result = ToolResult(call.id, call.name, self.redact(produced.content), produced.is_error)
                self._results.append(result)
                seconds = time.monotonic() - started
                latency_ms = round(seconds * 1000)
                self.run_folder.event("tool_call", **identify(call), latency_ms=latency_ms, is_error=result.is_error)
                self.display.tool_result(result, seconds)
        finally:
            self._pay(wording.BROKEN, wording.NOT_REACHED_BROKEN)

    async def _run_call(self, turn: AssistantTurn, call: ToolCall, tool: Tool | None, repeated: frozenset[str]) -> Produced:  # noqa: C901 - one story, told in order
        """Say what came of a call: may it run at all, are its arguments sound, is it allowed, what did it give."""
        if self._end is None and self.watch.cause:
            self._end = self._stopped(self.watch.cause)
        if self._end is not None:
            return Produced(wording.NOT_REACHED[self.watch.cause] if self.watch.cause else NOT_RUN, is_error=True)
        if turn.stop is not Stop.TOOL_CALLS:
            return Produced(wording.not_run(turn.stop), is_error=True)
        if call.id in repeated:
            return Produced(wording.REPEATED_ID, is_error=True)
        if tool is None:
            return Produced(wording.unknown_tool(call.name, list(self._by_name)), is_error=True)
        try:
            arguments = parse(call.raw_arguments, tool.schema.parameters)
        except ArgumentsInvalid as fault:
            return Produced(f"{fault} Nothing was run.", is_error=True)
        action = Action(call.name, call.id, arguments)
        try:
            with self.watch.stoppable():
                refused = await permission(action, self.decide, self.approve, self.run_folder.event, self._warn)
        except Stopped as stopped:
            self._end = self._stopped(stopped.cause)
            return Produced(wording.NOT_REACHED[stopped.cause], is_error=True)
        except AspError as error:
            self._end = await self._after_failure(error)
            return Produced(NOT_RUN, is_error=True)
        if refused:
            return Produced(refused, is_error=True)
        self.run_folder.event("tool_started", **identify(call))
        try:
            with self.watch.stoppable():
                produced = await perform(tool, arguments, self.transport, self.redact)
        except Stopped as stopped:
            self._end, self.interrupted = self._stopped(stopped.cause), self.running
            before = stopped.__cause__.content if isinstance(stopped.__cause__, Interrupted) else ""
            return Produced(wording.interrupted(stopped.cause, before), is_error=True)
        if produced.failure is not None:
            self._end = await self._after_failure(produced.failure)
        return produced

    def _warn(self, text: str) -> None:
        self.display.note(self.redact(text))

    async def _after_failure(self, failure: AspError) -> Outcome | None:
        """Say whether the run ends. After a lost connection a fresh, harmless command finds out."""
        if isinstance(failure, WorkspaceMissing):
            return None  # the model can make it again, and is told so
        if isinstance(failure, ConnectionLost):
            try:
                with self.watch.stoppable():
                    await self.transport.exec("exit 0", timeout_s=PROBE_TIMEOUT_S)
            except Stopped as stopped:
                return self._stopped(stopped.cause)
            except WorkspaceMissing:
                return None
            except AspError as error:
                failure = error
            else:
                return None
        code = failure.exit_code if not isinstance(failure, TransportError) else 4
        return self._outcome(code, reason_of(failure), f"the sandbox cannot be used any more: {failure}")

    def _pay(self, running: str, waiting: str) -> None:
        """Append the results of the last turn. Calls without one get a text: the one that runs, those after it."""
        for call in self.history.pending[len(self._results) :]:
            self._results.append(ToolResult(call.id, call.name, running if self.running else waiting, is_error=True))
            self.running = ""
        if self.history.pending:
            self._append(UserTurn(results=tuple(self._results)))

    def _append(self, turn: UserTurn | AssistantTurn) -> None:
        self.run_folder.turn(turn)  # first: a turn that cannot be recorded must not leave calls that nobody answers
        self.history.append(turn)

    def _stopped(self, cause: Cause) -> Outcome:
        if cause is Cause.INTERRUPTED:
            return self._outcome(130, "interrupted", cause.value)
        return self._outcome(3, "timeout", cause.value)

    def _outcome(self, exit_code: int, reason: str, message: str = "") -> Outcome:
        return Outcome(exit_code, reason, self.redact(message), self._text, self._turns, self._usage)
