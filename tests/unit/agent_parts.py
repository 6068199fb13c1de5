"""What the tests of the agent share: scripts as real files, a run of the real loop over the local twin, its record."""

import io
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asp.testing import LocalTwin
from asp.transport import Transport
from asp_agent.agent import Agent
from asp_agent.decide import Decide, allow_all
from asp_agent.display import Display, JsonDisplay, Outcome
from asp_agent.history import History
from asp_agent.limits import Limits, Watch
from asp_agent.messages import AssistantTurn, Model, ModelEvent, Request, TextDelta, ToolResult, TurnDone, UserTurn
from asp_agent.meter import Meter
from asp_agent.models import open_model
from asp_agent.redact import Redactor
from asp_agent.run import RunFolder, load_history, verify
from asp_agent.tools import DEFAULT_TOOLS
from asp_agent.tools.arguments import parse
from asp_agent.tools.tool import Produced, perform

TOOLS = {tool.schema.name: tool for tool in DEFAULT_TOOLS}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """One tool call of a script."""
    return {"name": name, "arguments": arguments}


def raw(name: str, raw_arguments: str) -> dict[str, Any]:
    """One tool call of a script, its arguments as exact text."""
    return {"name": name, "raw_arguments": raw_arguments}


def calls(*tool_calls: dict[str, Any], text: str = "", **more: Any) -> dict[str, Any]:
    """One turn of a script."""
    return {**({"text": text} if text else {}), "tool_calls": list(tool_calls), **more}


def write_script(folder: Path, *turns: dict[str, Any]) -> Path:
    """Write a script file."""
    path = folder / "script.json"
    path.write_text(json.dumps({"turns": turns}))
    return path


class TurnsModel:
    """Plays turns that a script file cannot say: duplicate ids, native items."""

    name, scripted = "turns/test", True

    def __init__(self, *turns: AssistantTurn) -> None:
        """Keep the turns, and every request."""
        self.turns, self.requests = list(turns), list[Request]()

    def secrets(self) -> Sequence[str]:
        """Nothing."""
        return ()

    async def stream(self, request: Request) -> AsyncIterator[ModelEvent]:
        """The next turn."""
        self.requests.append(request)
        turn = self.turns.pop(0)
        if turn.text:
            yield TextDelta(turn.text)
        yield TurnDone(turn)

    async def aclose(self) -> None:
        """Nothing."""


@dataclass
class Played:
    """One finished run."""

    outcome: Outcome
    history: History
    folder: Path
    shown: list[dict[str, Any]]

    @property
    def results(self) -> list[ToolResult]:
        """All results, in order."""
        return [result for turn in self.history.turns if isinstance(turn, UserTurn) for result in turn.results]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The record."""
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_bytes().splitlines()]


async def play(
    transport: Transport,
    model: Model,
    *,
    task: str = "do it",
    limits: Limits | None = None,
    decide: Decide = allow_all,
    redact: Redactor | None = None,
    display: Display | None = None,
    arrange: Callable[[Agent], None] | None = None,
    meter: Meter | None = None,
    window: int | None = None,
) -> Played:
    """Run the real loop to its end; the record must then verify, and give the same history."""
    recorded_whole = redact is None
    redact = redact or Redactor()
    folder = RunFolder.create({"task": task}, redact)
    output = io.StringIO()
    agent = Agent(
        model, transport, DEFAULT_TOOLS, "system", folder, display or JsonDisplay(output), redact,
        Watch(lambda: None), limits or Limits(), decide, meter=meter or Meter(), window=window,
    )  # fmt: skip
    if arrange is not None:
        arrange(agent)
    outcome = await agent.run(task)
    folder.final(exit_code=outcome.exit_code)
    assert verify(folder.path).complete
    assert not agent.history.pending
    played_back = load_history(folder.path).turns
    assert played_back == agent.history.turns if recorded_whole else len(played_back) == len(agent.history.turns)
    return Played(outcome, agent.history, folder.path, [json.loads(line) for line in output.getvalue().splitlines()])


async def play_script(root: Path, *turns: dict[str, Any], transport: Transport | None = None, **more: Any) -> Played:
    """Play a script file over the local twin of ``root/work`` (made if missing)."""
    work = root / "work"
    work.mkdir(exist_ok=True)
    model = open_model(f"scripted/{write_script(root, *turns)}")
    async with transport or LocalTwin(work) as used:
        return await play(used, model, **more)


async def use(transport: Transport, name: str, *, redact: Redactor | None = None, **arguments: Any) -> Produced:
    """One tool call without a loop: arguments checked as the loop checks them."""
    tool = TOOLS[name]
    return await perform(tool, parse(json.dumps(arguments), tool.schema.parameters), transport, redact or Redactor())
