"""Go on with a run: after its end, a Ctrl-C, a signal, ``kill -9``, a half-written last line.

A run that goes on is a new run with a record of its own, which begins with the conversation of the old one. No call is
made again: one whose result is not recorded has an outcome that nobody knows, and the model is told so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asp.contract import Contract
from asp.errors import UsageError, quoted
from asp_agent import runs, wording
from asp_agent.history import History, HistoryBroken
from asp_agent.messages import AssistantTurn, Stop, ToolCall, ToolResult, Turn, UserTurn
from asp_agent.meter import Meter
from asp_agent.run import load


@dataclass(frozen=True, slots=True)
class Resumed:
    """A conversation to go on with: its turns, the run that it comes from, and the model of that run."""

    run: str
    model: str
    turns: tuple[Turn, ...]

    def history(self) -> History:
        """Return the conversation as a history."""
        return History(self.turns)

    def count(self, meter: Meter) -> None:
        """Count what the conversation has cost so far: a budget is for the whole of it."""
        for turn in self.turns:
            if isinstance(turn, AssistantTurn):
                meter.add(turn.usage)


def latest(contract: Contract) -> Path:
    """Return the newest run in the sandbox of ``contract``. Raises UsageError if there is none."""
    for found in runs.listed():
        folder = runs.find(found.run)
        if _contract_digest(runs.read_run(folder)) == contract.digest:
            return folder
    msg = f"no run in the sandbox of {contract.path} to go on with; see: asp-agent runs"
    raise UsageError(msg)


def resume(folder: Path, contract: Contract, task: str) -> Resumed:
    """Return the conversation of the run in ``folder`` with ``task`` said to it; without one the model goes on by itself.

    Raises UsageError: the run is still running, worked in another sandbox, or its record cannot be used.
    """
    if runs.is_running(folder):
        msg = f"the run {folder.name} is still running; watch it with: asp-agent watch {folder.name}"
        raise UsageError(msg)
    run = runs.read_run(folder)
    if _contract_digest(run) != contract.digest:
        msg = f"the run {folder.name} worked in another sandbox than that of {contract.path}, or that contract has changed"
        raise UsageError(msg)
    try:
        loaded = load(folder, cut_tail=True)
    except HistoryBroken as error:
        msg = f"the record of the run {folder.name} cannot be gone on with: {quoted(str(error))}"
        raise UsageError(msg) from error
    turns = list(loaded.history.turns)
    if pending := loaded.history.pending:
        turns.append(UserTurn(results=tuple(loaded.results.get(call.id) or _unknown(call, loaded.started) for call in pending)))
    return Resumed(folder.name, str(run["model"]["name"]), tuple(_said(turns, task)))


def _unknown(call: ToolCall, started: set[str]) -> ToolResult:
    text = wording.KILLED if call.id in started else wording.NOT_REACHED_KILLED
    return ToolResult(call.id, call.name, text, is_error=True)


def _said(turns: list[Turn], task: str) -> list[Turn]:
    """Add what the user says now. Two turns of the user in a row become one: not every API takes them."""
    last = turns[-1] if turns else None
    if isinstance(last, UserTurn):
        if task:
            turns[-1] = UserTurn("\n\n".join(filter(None, (last.text, task))), last.results)
        return turns
    if last is not None and last.stop is Stop.PAUSED and not task:
        return turns
    if isinstance(last, AssistantTurn) and last.stop is Stop.PAUSED:  # the paused turn must go back as it is, and alone
        turns.pop()
        return _said(turns, task)
    return [*turns, UserTurn(text=task or wording.GO_ON)]


def _contract_digest(run: Mapping[str, Any]) -> str | None:
    try:
        return str(run["contract"]["digest"])
    except (KeyError, TypeError):
        return None
