"""The loop: ask the model, run the tools that it calls in the sandbox, give it the results, until it calls none.

Whatever goes wrong becomes a tool result that says so, or an Outcome. The history can always be made valid (L1): when a
turn with calls is appended its results are owed, and they are paid whatever happens.
"""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field

from asp.errors import AspError
from asp.transport import Transport
from asp_agent import compact, wording
from asp_agent.calls import Calls, End, stopped_end
from asp_agent.decide import Approve, Decide, allow_all, nobody_approves
from asp_agent.display import Display, Outcome, reason_of
from asp_agent.errors import ContextFull, ModelUnavailable
from asp_agent.history import History, with_unique_ids
from asp_agent.limits import Cause, Limits, Stopped, Watch
from asp_agent.messages import (
    AssistantTurn,
    Model,
    Request,
    Retrying,
    Stop,
    TextDelta,
    ToolSchema,
    Turn,
    TurnDone,
    Usage,
    UserTurn,
)
from asp_agent.meter import Meter
from asp_agent.redact import Redactor, StreamRedactor
from asp_agent.run import RunFolder
from asp_agent.tools.tool import Tool

MAX_CUT_TURNS = 3
"""So many answers in a row may be cut off at the output limit; a model that does not get shorter ends the run."""


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
    meter: Meter = field(default_factory=Meter)
    window: int | None = None  # the model's context window in tokens, if it is known

    def __post_init__(self) -> None:
        """Start with nothing said."""
        tools = {tool.schema.name: tool for tool in self.tools}
        self.calls = Calls(
            tools, self.transport, self.run_folder, self.display, self.redact, self.watch, self.decide, self.approve
        )
        self._schemas = [tool.schema for tool in self.tools]
        self._turns, self._text = 0, ""
        self._full = False  # the last request left no room for another
        self._shortened = False  # the conversation was made shorter, and no turn has fitted since

    async def run(self, task: str) -> Outcome:
        """Work on ``task`` until it is done or cannot go on. Raises for bugs, and if our own disk fails."""
        try:
            if task:
                self._append(UserTurn(text=task))
            return await self._loop()
        except Stopped as stopped:
            return self._ended(stopped_end(stopped))
        except AspError as error:
            return self._outcome(error.exit_code, reason_of(error), str(error))

    def take_up(self, turns: Sequence[Turn]) -> None:
        """Begin with a conversation of another run; it is recorded as this one's own."""
        for turn in turns:
            self.run_folder.turn(turn)
        self.history = History(turns)

    def abandon(self) -> Outcome:
        """Give up waiting, now: pay the results that are owed and return the end of the run. Synchronous."""
        self._pay(wording.INTERRUPTED[Cause.INTERRUPTED], wording.NOT_REACHED[Cause.INTERRUPTED])
        return self._ended(stopped_end(Stopped(Cause.INTERRUPTED)))

    async def _loop(self) -> Outcome:  # noqa: C901, PLR0912 - one story, told in order
        cut = empty = 0
        while self._turns < self.limits.max_turns:
            if over := self.meter.over():
                return self._outcome(3, *over)
            if self._full and not self._shortened:
                await self._shorten()
            turn, repeated = with_unique_ids(await self._ask(self._request(self.history.for_request())))
            if turn.stop is Stop.CONTEXT_FULL and not self._shortened and await self._shorten():
                continue  # what did not fit is asked again, once
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
            if self.calls.end is not None:
                return self._ended(self.calls.end)
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

    def _request(self, turns: Sequence[Turn], *, tools: bool = True) -> Request:
        schemas: Sequence[ToolSchema] = self._schemas if tools else ()
        return Request(self.system, turns, schemas)

    async def _ask(self, request: Request) -> AssistantTurn:
        """Ask the model once and return its whole turn. What streamed of a turn that never ended is only logged."""
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
        except ContextFull as full:
            if self._shortened:
                raise
            return AssistantTurn("", (), Stop.CONTEXT_FULL, Usage(), ("", "", ""), stop_detail=str(full))
        finally:
            self.display.text(shown.rest())
            text = turn.text if turn is not None else "".join(pieces)
            if text:
                self.run_folder.event("message_delta", text=text)
        if turn is None:
            msg = "the model's answer ended before it was complete"
            raise ModelUnavailable(msg)
        self._turns += 1
        self.meter.add(turn.usage)
        self._full = compact.is_full(turn.usage.input_tokens, turn.usage.output_tokens, self.window)
        if not self._full and turn.stop is not Stop.CONTEXT_FULL:
            self._shortened = False
        self.run_folder.event("usage", **asdict(turn.usage), cost_usd=self.meter.cost_usd)
        self.display.usage(turn.usage, self.meter.total, self.meter.cost_usd)
        return turn

    async def _shorten(self) -> bool:
        """Put a summary in the place of most of the conversation (L6); false if nothing can be left out."""
        turns = self.history.turns
        plan = compact.plan(turns, self.window)
        self._shortened = True
        if plan is None:
            return False
        self.display.note("the conversation is too long; the model writes a summary of it")
        answer = await self._ask(self._request(plan.question, tools=False))
        self._shortened = True
        if not answer.text.strip() or answer.stop not in {Stop.DONE, Stop.LENGTH}:
            return False
        self.history = History(compact.shortened(turns, plan, answer.text))
        self.run_folder.shortened(self.history.turns[0], plan.keep)
        return True

    async def _run_calls(self, turn: AssistantTurn, repeated: frozenset[str]) -> None:
        """Run the calls of a turn and append one result for each, also when something breaks in the middle."""
        try:
            await self.calls.run(turn, repeated)
        finally:
            self._pay(wording.BROKEN, wording.NOT_REACHED_BROKEN)

    def _pay(self, running: str, waiting: str) -> None:
        """Append the results of the last turn, if they are still owed."""
        if pending := self.history.pending:
            self._append(UserTurn(results=self.calls.results(pending, running, waiting)))

    def _append(self, turn: UserTurn | AssistantTurn) -> None:
        self.run_folder.turn(turn)  # first: a turn that cannot be recorded must not leave calls that nobody answers
        self.history.append(turn)

    def _ended(self, end: End) -> Outcome:
        return self._outcome(end.exit_code, end.reason, end.message)

    def _outcome(self, exit_code: int, reason: str, message: str = "") -> Outcome:
        meter = self.meter
        return Outcome(exit_code, reason, self.redact(message), self._text, self._turns, meter.total, meter.cost_usd)
