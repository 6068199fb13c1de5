"""L1: every call has exactly one result, in the next user turn; for all sequences of turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asp_agent.history import History, HistoryBroken, with_unique_ids
from asp_agent.messages import AssistantTurn, Stop, ToolCall, ToolResult, Turn, Usage, UserTurn

IDS = st.sampled_from(["", "a", "b", "c", "a-2", "call-1"])


def assistant(*ids: str, text: str = "", stop: Stop | None = None) -> AssistantTurn:
    stop = stop or (Stop.TOOL_CALLS if ids else Stop.DONE)
    return AssistantTurn(text, tuple(ToolCall(i, "bash", "{}") for i in ids), stop, Usage(), ("p", "a", "m"))


def answers(*ids: str, text: str = "") -> UserTurn:
    return UserTurn(text, tuple(ToolResult(i, "bash", "x") for i in ids))


TURNS = st.one_of(
    st.builds(
        lambda ids, text, stop: assistant(*ids, text=text, stop=stop),
        st.lists(IDS, max_size=3), st.sampled_from(["", "t"]), st.sampled_from(Stop),
    ),
    st.builds(lambda ids, text: answers(*ids, text=text), st.lists(IDS, max_size=3), st.sampled_from(["", "t"])),
)  # fmt: skip


@given(st.lists(TURNS, max_size=12))
def test_whatever_is_appended_the_history_is_valid(turns: list[Turn]) -> None:
    history = History()
    for turn in turns:
        before = history.turns
        try:
            history.append(turn)
        except HistoryBroken:
            assert history.turns == before, "a refused turn changes nothing"
    for one, two in zip(history.turns, history.turns[1:], strict=False):
        if isinstance(one, AssistantTurn):
            owed = [call.id for call in one.tool_calls]
            assert len(set(owed)) == len(owed)
            assert ([result.tool_call_id for result in two.results] if isinstance(two, UserTurn) else []) == owed
    try:
        history.for_request()
    except HistoryBroken:
        last = history.turns[-1] if history.turns else None
        assert last is None or isinstance(last, AssistantTurn)
    assert History(history.turns).turns == history.turns


@pytest.mark.parametrize(
    "turn",
    [answers("a"), answers("b", "a"), answers("a", "b", "c"), answers(text="stop"), assistant("c"), answers("a", "a")],
    ids=str,
)
def test_results_are_owed_exactly(turn: Turn) -> None:
    history = History([UserTurn("task"), assistant("a", "b")])
    with pytest.raises(HistoryBroken):
        history.append(turn)
    with pytest.raises(HistoryBroken):
        history.for_request()
    history.append(answers("a", "b"))
    assert len(history.for_request()) == 3


def test_a_paused_turn_is_sent_back_unchanged() -> None:
    paused = assistant(text="searching", stop=Stop.PAUSED)
    history = History([UserTurn("task"), paused])
    assert history.for_request()[-1] is paused
    history.append(assistant(text="found"))
    with pytest.raises(HistoryBroken):
        history.for_request()


@given(st.lists(IDS, max_size=6))
def test_ids_become_unique_and_repeated_ones_are_named(ids: list[str]) -> None:
    turn = assistant(*ids, text="t")
    unique, repeated = with_unique_ids(turn)
    new = [call.id for call in unique.tool_calls]
    assert len(set(new)) == len(new)
    assert all(new)
    assert repeated <= set(new)
    named = [i for i in ids if i]
    assert len(repeated) == len(named) - len(set(named))
    first = {i: new[ids.index(i)] for i in named}
    assert all(old == kept for old, kept in first.items()), "the first call keeps its id"
    if len(set(ids)) == len(ids) and all(ids):
        assert unique is turn
