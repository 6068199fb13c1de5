"""Run the tool calls of one turn and have exactly one result for each, whatever happens (L1).

Calls that only read run side by side, all others one after the other in the order in which the model wrote them; the
results are in that order too. Each result is recorded as soon as it is there, so that a run that is killed knows it.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asp.errors import AspError, ConnectionLost, TransportError, WorkspaceMissing
from asp.transport import Transport
from asp_agent import wording
from asp_agent.decide import Action, Approve, Decide, permission
from asp_agent.display import Display, reason_of, summarise
from asp_agent.limits import Stopped, Watch
from asp_agent.messages import AssistantTurn, Stop, ToolCall, ToolResult
from asp_agent.redact import Redactor
from asp_agent.repeats import Repeat, Repeats
from asp_agent.run import RunFolder, identify
from asp_agent.tools.arguments import ArgumentsInvalid, parse
from asp_agent.tools.tool import NOT_RUN, Interrupted, Produced, Tool, perform

PROBE_TIMEOUT_S = 30
TURN_BYTES = 200 << 10
"""What all results of one turn may hold together. 200 KiB; a turn with many calls shares it."""

LEAST_BYTES = 1 << 10

MOST_AT_ONCE = 4
"""So many calls that only read run side by side: each may hold some tens of MB of a large file."""


@dataclass(frozen=True, slots=True)
class End:
    """Why the run ends with these calls."""

    exit_code: int
    reason: str
    message: str


@dataclass
class _Running:
    call: ToolCall
    summary: str
    task: "asyncio.Task[tuple[Produced, bool]]"
    began: float = field(default_factory=time.monotonic)


@dataclass
class Calls:
    """The tools of a run at work. ``end`` is set by a call that ends the run; calls after it are not run."""

    tools: Mapping[str, Tool]
    transport: Transport
    run_folder: RunFolder
    display: Display
    redact: Redactor
    watch: Watch
    decide: Decide
    approve: Approve
    repeats: Repeats = field(default_factory=Repeats)
    end: End | None = None

    def __post_init__(self) -> None:
        """Nothing has been called yet."""
        self._results: dict[str, ToolResult] = {}
        self._started: list[_Running] = []
        self.interrupted: list[str] = []  # what was stopped from outside: it may live on in the sandbox
        self._share = TURN_BYTES
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)

    @property
    def running(self) -> list[str]:
        """The calls that run now, for people."""
        return [f"{one.call.name} {one.summary}" for one in self._started if not one.task.done()]

    async def run(self, turn: AssistantTurn, repeated: frozenset[str]) -> None:
        """Run the calls of ``turn``; ``results`` then has one for each, unless a bug ends it in the middle."""
        self._results, self._share = {}, max(LEAST_BYTES, TURN_BYTES // max(1, len(turn.tool_calls)))
        for _, batch in itertools.groupby(turn.tool_calls, self._batch_of):
            await self._run_batch(turn, list(batch), repeated)

    def results(self, calls: Sequence[ToolCall], running: str, waiting: str) -> tuple[ToolResult, ...]:
        """Return the results in call order; a call without one gets a text: ``running`` if it was started, else ``waiting``."""
        started = {one.call.id for one in self._started}
        return tuple(
            self._results.get(call.id)
            or ToolResult(call.id, call.name, running if call.id in started else waiting, is_error=True)
            for call in calls
        )

    def _batch_of(self, call: ToolCall) -> object:
        tool = self.tools.get(call.name)
        return "reading" if tool is not None and tool.reads_only else object()

    async def _run_batch(self, turn: AssistantTurn, calls: list[ToolCall], repeated: frozenset[str]) -> None:
        self._started = []
        try:
            for call in calls:
                await self._start(turn, call, repeated)
            tasks = {one.task for one in self._started}
            while tasks:
                with self.watch.stoppable():
                    done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                self._take([one for one in self._started if one.task in done])
            failures = [one.task.result()[0].failure for one in self._started]
        except Stopped as stopped:
            self.end = stopped_end(stopped)
            self.interrupted = self.running
            await self._stop()
            cut = [one for one in self._started if one.call.id not in self._results]
            self._take(cut, stopped)
            return
        finally:
            await self._stop()  # after a bug, too, nothing of ours runs on
        for failure in filter(None, failures):
            self.end = self.end or await self._after_failure(failure)

    async def _start(self, turn: AssistantTurn, call: ToolCall, repeated: frozenset[str]) -> None:
        """Start a call, if it may run at all, its arguments are sound and it is allowed; else have its result at once."""
        tool = self.tools.get(call.name)
        summary = self.redact(summarise(call.raw_arguments, tool.summary if tool else ""))
        self.display.tool_call(call.id, call.name, self.redact(call.raw_arguments), summary)
        began = time.monotonic()
        ready = await self._ready(turn, call, tool, repeated)
        if isinstance(ready, Produced):
            self._result(call, ready, began)
            return
        self.run_folder.event("tool_started", **identify(call))
        self._started.append(_Running(call, summary, asyncio.create_task(self._perform(ready[0], ready[1]))))

    async def _ready(
        self, turn: AssistantTurn, call: ToolCall, tool: Tool | None, repeated: frozenset[str]
    ) -> Produced | tuple[Tool, Mapping[str, Any]]:
        if self.end is None and self.watch.cause:
            self.end = stopped_end(Stopped(self.watch.cause))
        if self.end is not None:
            return Produced(wording.NOT_REACHED[self.watch.cause] if self.watch.cause else NOT_RUN, is_error=True)
        if turn.stop is not Stop.TOOL_CALLS:
            return Produced(wording.not_run(turn.stop), is_error=True)
        if call.id in repeated:
            return Produced(wording.REPEATED_ID, is_error=True)
        if tool is None:
            return Produced(wording.unknown_tool(call.name, list(self.tools)), is_error=True)
        try:
            arguments = parse(call.raw_arguments, tool.schema.parameters)
        except ArgumentsInvalid as fault:
            return Produced(f"{fault} Nothing was run.", is_error=True)
        try:
            with self.watch.stoppable():
                action = Action(call.name, call.id, arguments)
                refused = await permission(action, self.decide, self.approve, self.run_folder.event, self._warn)
        except Stopped as stopped:
            self.end = stopped_end(stopped)
            return Produced(wording.NOT_REACHED[stopped.cause], is_error=True)
        except AspError as error:
            self.end = await self._after_failure(error)
            return Produced(NOT_RUN, is_error=True)
        return Produced(refused, is_error=True) if refused else (tool, arguments)

    async def _perform(self, tool: Tool, arguments: Mapping[str, Any]) -> tuple[Produced, bool]:
        """Return what came of a call, and whether it was stopped before its end."""
        try:
            async with self._slots:
                return await perform(tool, arguments, self.transport, self.redact), False
        except Interrupted as interrupted:
            return Produced(interrupted.content, is_error=True), True
        except asyncio.CancelledError:
            return Produced("", is_error=True), True

    def _take(self, ended: list[_Running], stopped: Stopped | None = None) -> None:
        for one in ended:
            produced, was_stopped = one.task.result()
            if was_stopped and stopped is not None:
                produced = replace(produced, content=wording.interrupted(stopped.cause, produced.content))
            self._result(one.call, produced, one.began)

    def _result(self, call: ToolCall, produced: Produced, began: float) -> None:
        """Keep the result of a call: redacted, bounded, recorded, shown."""
        content = bounded(self.redact(produced.content), self._share)
        repeat = self.repeats.note(call, content)
        if repeat is not Repeat.NEW:
            content += self.repeats.hint()
        if repeat is Repeat.STOP and self.end is None:
            self.end = End(3, "repeats", f"the same call gave the same result {self.repeats.count} times")
        result = ToolResult(call.id, call.name, content, produced.is_error, produced.images)
        seconds = time.monotonic() - began
        self.run_folder.event(
            "tool_call", **identify(call), latency_ms=round(seconds * 1000), is_error=result.is_error
        )  # fmt: skip
        self.run_folder.result(result)
        self._results[call.id] = result
        self.display.tool_result(result, seconds)

    async def _stop(self) -> None:
        """Cancel what still runs and wait until it has been killed in the sandbox."""
        running = {one.task for one in self._started if not one.task.done()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _warn(self, text: str) -> None:
        self.display.note(self.redact(text))

    async def _after_failure(self, failure: AspError) -> End | None:
        """Say whether the run ends. After a lost connection a fresh, harmless command finds out."""
        if isinstance(failure, WorkspaceMissing):
            return None  # the model can make it again, and is told so
        if isinstance(failure, ConnectionLost):
            try:
                with self.watch.stoppable():
                    await self.transport.exec("exit 0", timeout_s=PROBE_TIMEOUT_S)
            except Stopped as stopped:
                return stopped_end(stopped)
            except WorkspaceMissing:
                return None
            except AspError as error:
                failure = error
            else:
                return None
        code = failure.exit_code if not isinstance(failure, TransportError) else 4
        return End(code, reason_of(failure), f"the sandbox cannot be used any more: {failure}")


def stopped_end(stopped: Stopped) -> End:
    """Return the end of a run that was stopped from outside (L7)."""
    code, reason = wording.STOPPED[stopped.cause]
    return End(code, reason, stopped.cause.value)


def bounded(content: str, max_bytes: int) -> str:
    """Return ``content`` cut to ``max_bytes`` of UTF-8, and a note that says so."""
    data = content.encode("utf-8", "surrogatepass")
    if len(data) <= max_bytes:
        return content
    head = data[:max_bytes].decode("utf-8", "ignore")
    return f"{head}\n\n[Cut: {len(data):,} bytes, and all results of one answer share {TURN_BYTES:,}. Ask for less at once.]"
