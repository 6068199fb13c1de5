"""The conversation, kept valid (L1): each tool call has exactly one result, in the next user turn, in order.

A provider refuses every later request once that is broken, so it is checked on append and again before each request.
"""

from collections.abc import Iterable
from dataclasses import replace

from asp_agent.messages import AssistantTurn, Stop, ToolCall, Turn, UserTurn


class HistoryBroken(RuntimeError):
    """A bug of ours: the turn does not fit what came before it."""


class History:
    """The turns of one run, oldest first."""

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        """Start with ``turns``, each checked as if it were appended."""
        self._turns: list[Turn] = []
        for turn in turns:
            self.append(turn)

    def append(self, turn: Turn) -> None:
        """Add a turn. Raises HistoryBroken, and adds nothing, if the history would no longer be valid."""
        fault = _fault(self._turns[-1] if self._turns else None, turn)
        if fault:
            raise HistoryBroken(fault)
        self._turns.append(turn)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns."""
        return tuple(self._turns)

    @property
    def pending(self) -> tuple[ToolCall, ...]:
        """The calls of the last turn, which have no result yet."""
        last = self._turns[-1] if self._turns else None
        return last.tool_calls if isinstance(last, AssistantTurn) else ()

    def for_request(self) -> tuple[Turn, ...]:
        """Return all turns, checked again from the first. Raises HistoryBroken if a model must not be asked now."""
        before: Turn | None = None
        for turn in self._turns:
            fault = _fault(before, turn)
            if fault:
                raise HistoryBroken(fault)
            before = turn
        if isinstance(before, UserTurn) or (
            isinstance(before, AssistantTurn) and before.stop is Stop.PAUSED and not self.pending
        ):
            return self.turns
        msg = "there is nothing to answer: the history is empty, or its last turn is the model's own"
        raise HistoryBroken(msg)


def _fault(before: Turn | None, turn: Turn) -> str:
    """Say why ``turn`` may not follow ``before``, or nothing."""
    calls = before.tool_calls if isinstance(before, AssistantTurn) else ()
    if isinstance(turn, UserTurn):
        wanted, given = [call.id for call in calls], [result.tool_call_id for result in turn.results]
        if wanted != given:
            return f"the calls {wanted} need one result each, in this order, and got {given}"
        return "" if turn.results or turn.text else "a user turn says nothing"
    if calls:
        return f"the calls {[call.id for call in calls]} have no results"
    if before is None:
        return "a history starts with the user"
    if isinstance(before, AssistantTurn) and before.stop is not Stop.PAUSED:
        return "two turns of the model in a row, and the first was not paused"
    ids = [call.id for call in turn.tool_calls]
    if len(set(ids)) < len(ids) or not all(ids):
        return f"the ids of the calls {ids} are not unique"
    return "" if turn.text or turn.tool_calls or turn.native else "a turn of the model says nothing"


def with_unique_ids(turn: AssistantTurn) -> tuple[AssistantTurn, frozenset[str]]:
    """Give every call of ``turn`` an id of its own, and name those that only repeat the id of an earlier call.

    An id that is used twice is one call delivered twice, or two that nobody can tell apart; the later may not run.
    Providers refuse such a turn on replay, so it loses its native form. Ids may repeat between turns.
    """
    seen: set[str] = set()
    repeated: set[str] = set()
    calls: list[ToolCall] = []
    taken = {call.id for call in turn.tool_calls}
    for call in turn.tool_calls:
        new_id = call.id
        number = len(calls)
        while not new_id or new_id in seen or (new_id != call.id and new_id in taken):
            number += 1
            new_id = f"{call.id or 'call'}-{number}"
        if call.id and new_id != call.id:
            repeated.add(new_id)
        seen.add(new_id)
        calls.append(replace(call, id=new_id))
    if tuple(calls) == turn.tool_calls:
        return turn, frozenset()
    return replace(turn, tool_calls=tuple(calls), native=()), frozenset(repeated)
