"""The calls of one turn: what runs side by side, what shares a bound, what ends a run that goes in circles or costs too much."""

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from agent_parts import TurnsModel, call, calls, play, play_script

from asp.testing import LocalTwin
from asp_agent.calls import TURN_BYTES, bounded
from asp_agent.messages import AssistantTurn, Request, Stop, Usage, UserTurn
from asp_agent.meter import Meter
from asp_agent.pricing import parse_price


class Meeting(LocalTwin):
    """Reads that wait until ``together`` of them are there: one after the other they would wait for ever."""

    together = 3
    most = now = 0

    async def read(self, *words: Any, **options: Any) -> bytes:
        self.now += 1
        self.most = max(self.most, self.now)
        async with asyncio.timeout(40):
            while self.most < self.together:
                await asyncio.sleep(0.01)
        try:
            return await super().read(*words, **options)
        finally:
            self.now -= 1


async def test_reading_calls_run_side_by_side_and_results_keep_their_order(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for name in "abc":
        (work / name).write_text(name)
    twin = Meeting(work)
    played = await play_script(tmp_path, calls(*(call("read", path=name) for name in "cab")), {"text": "ok"}, transport=twin)
    assert [result.content for result in played.results] == ["c", "a", "b"]
    assert twin.most == 3


async def test_writing_calls_keep_their_place(tmp_path: Path) -> None:
    played = await play_script(
        tmp_path,
        calls(
            call("write", path="f", content="1"), call("read", path="f"),
            call("bash", command="echo 2 > f"), call("read", path="f"),
        ),
        {"text": "ok"},
    )  # fmt: skip
    assert [result.content for result in played.results][1::2] == ["1", "2\n"]


async def test_a_turn_with_many_calls_shares_the_bound(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "big").write_text("x" * 79 + "\n" * 1)
    (work / "big").write_text(("x" * 79 + "\n") * 600)
    played = await play_script(tmp_path, calls(*(call("read", path="big", offset=n) for n in range(1, 21))), {"text": "ok"})
    assert sum(len(result.content) for result in played.results) < TURN_BYTES * 1.1
    assert all("all results of one answer share" in result.content for result in played.results)


def test_bounded_counts_bytes_and_never_cuts_a_character() -> None:
    assert bounded("ü" * 5, 10) == "ü" * 5
    assert bounded("ü" * 6, 11).startswith("ü" * 5 + "\n\n[Cut: 12 bytes")
    assert bounded("\udc80" * 9, 5).endswith("Ask for less at once.]")


async def test_a_circle_is_told_and_then_ends_the_run(tmp_path: Path) -> None:
    played = await play_script(tmp_path, *[calls(call("bash", command="cat none"))] * 9)
    assert (played.outcome.exit_code, played.outcome.reason, played.outcome.turns) == (3, "repeats", 6)
    hinted = ["has given this same result" in result.content for result in played.results]
    assert hinted == [False, False, True, True, True, True]


async def test_polling_is_no_circle(tmp_path: Path) -> None:
    turns = [calls(call("bash", command="echo x >> n; wc -l < n"))] * 8
    played = await play_script(tmp_path, *turns, {"text": "ok"})
    assert played.outcome.reason == "done"


async def test_a_budget_ends_a_run_before_the_next_request(tmp_path: Path) -> None:
    turn = calls(call("bash", command="echo $RANDOM$RANDOM"), usage={"input_tokens": 400_000, "output_tokens": 0})
    played = await play_script(tmp_path, *[turn] * 9, meter=Meter(parse_price("1,1"), Decimal("1.0")))
    assert (played.outcome.exit_code, played.outcome.reason, played.outcome.turns) == (3, "max_budget_usd", 3)
    assert played.outcome.cost_usd == pytest.approx(1.2)
    assert [event["cost_usd"] for event in played.events if event["type"] == "usage"] == [0.4, 0.8, 1.2]
    played = await play_script(tmp_path, *[turn] * 9, meter=Meter(None, None, 700_000))
    assert (played.outcome.reason, played.outcome.turns, played.outcome.cost_usd) == ("max_tokens_total", 2, None)


SOURCE = ("t", "t", "t")


def answer(text: str, tokens: int, stop: Stop = Stop.DONE) -> AssistantTurn:
    return AssistantTurn(text, (), stop, Usage(tokens, None, None, 10), SOURCE)


def reading(number: int, tokens: int) -> AssistantTurn:
    from asp_agent.messages import ToolCall

    return AssistantTurn("", (ToolCall(f"c{number}", "bash", f'{{"command": "echo {number}"}}'),), Stop.TOOL_CALLS,
                         Usage(tokens, None, None, 10), SOURCE)  # fmt: skip


def valid(request: Request) -> None:
    """No call without its result, no result without its call, never two turns of one side in a row."""
    before = None
    for turn in request.history:
        assert type(turn) is not type(before)
        if isinstance(turn, UserTurn):
            wanted = [call.id for call in before.tool_calls] if isinstance(before, AssistantTurn) else []
            assert [result.tool_call_id for result in turn.results] == wanted
        before = turn
    assert isinstance(before, UserTurn)


async def test_a_full_conversation_is_shortened_before_the_next_request(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    model = TurnsModel(reading(1, 500), reading(2, 900), answer("what was so far", 950), reading(3, 300), answer("done", 310))
    async with LocalTwin(tmp_path / "work") as twin:
        played = await play(twin, model, window=1000)
    assert played.outcome.reason == "done"
    for request in model.requests:
        valid(request)
    asked = model.requests[2]
    assert asked.tools == ()
    assert isinstance(asked.history[-1], UserTurn)
    assert "Write a summary" in asked.history[-1].text
    first = model.requests[3].history[0]
    assert isinstance(first, UserTurn)
    assert "what was so far" in first.text
    assert "shortened" in {event["type"] for event in played.events}


async def test_one_attempt_for_an_overflow(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    full = answer("", 1, Stop.CONTEXT_FULL)
    model = TurnsModel(reading(1, 500), full, answer("summary", 10), full)
    async with LocalTwin(tmp_path / "work") as twin:
        played = await play(twin, model)
    assert (played.outcome.exit_code, played.outcome.reason) == (1, "context_full")
    assert model.turns == []
    model = TurnsModel(reading(1, 500), full, answer("summary", 10), reading(2, 5), full, answer("second", 10), answer("done", 5))
    async with LocalTwin(tmp_path / "work") as twin:
        played = await play(twin, model)
    assert played.outcome.reason == "done", "after a turn that fitted there is a new attempt"
    for request in model.requests:
        valid(request)


async def test_a_task_that_alone_is_too_long_is_not_summarised(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    model = TurnsModel(answer("", 1, Stop.CONTEXT_FULL))
    async with LocalTwin(tmp_path / "work") as twin:
        played = await play(twin, model)
    assert played.outcome.reason == "context_full"
