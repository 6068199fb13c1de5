"""The retry policy alone: what is retried, how long it waits, what comes out at the end (P73, P74)."""

import asyncio
import time
import traceback
from collections.abc import AsyncGenerator
from email.utils import formatdate

import pytest

from asp_agent.errors import ModelRefused, ModelUnavailable
from asp_agent.messages import AssistantTurn, ModelEvent, Retrying, Stop, TextDelta, TurnDone, Usage
from asp_agent.models.retry import AttemptFailed, RetryPolicy, may_pass_later, retry_after_s

TURN = AssistantTurn("done", (), Stop.DONE, Usage(), ("test", "test", "test"))


class Naps:
    """A sleep that takes no time and remembers."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    async def __call__(self, wait_s: float) -> None:
        self.waits_s.append(wait_s)


class Attempts:
    """Fails as told, then answers."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.made = 0
        self.closed = 0

    async def __call__(self) -> AsyncGenerator[TextDelta | TurnDone, None]:
        self.made += 1
        try:
            yield TextDelta(f"try {self.made} ")
            if self.failures:
                raise self.failures.pop(0)
            yield TurnDone(TURN)
        finally:
            self.closed += 1


async def play(policy: RetryPolicy, attempts: Attempts) -> list[ModelEvent]:
    return [event async for event in policy.stream("test/model", attempts)]


async def test_failures_are_waited_out_visibly_and_each_try_starts_anew() -> None:
    naps = Naps()
    attempts = Attempts(AttemptFailed("overloaded"), AttemptFailed("cut"))
    events = await play(RetryPolicy(sleep=naps, jitter=lambda: 0.0), attempts)
    assert events == [
        TextDelta("try 1 "),
        Retrying("overloaded", 1.0, 2),
        TextDelta("try 2 "),
        Retrying("cut", 3.0, 3),
        TextDelta("try 3 "),
        TurnDone(TURN),
    ]
    assert naps.waits_s == [1.0, 3.0]
    assert attempts.closed == 3


async def test_after_six_tries_the_last_reason_is_named_and_no_exception_lies_behind() -> None:
    naps = Naps()
    attempts = Attempts(*(AttemptFailed(f"reason {n}") for n in range(1, 10)))
    with pytest.raises(
        ModelUnavailable, match=r"^test/model: no whole answer after 6 tries; the last one: reason 6$"
    ) as caught:
        await play(RetryPolicy(sleep=naps, jitter=lambda: 0.0), attempts)
    assert caught.value.exit_code == 4
    assert naps.waits_s == [1.0, 3.0, 9.0, 27.0, 60.0]
    assert attempts.made == attempts.closed == 6
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert "AttemptFailed" not in "".join(traceback.format_exception(caught.value))


async def test_a_refusal_is_not_retried() -> None:
    attempts = Attempts(ModelRefused("no"))
    with pytest.raises(ModelRefused, match=r"^no$"):
        await play(RetryPolicy(sleep=Naps()), attempts)
    assert attempts.made == attempts.closed == 1


async def test_a_bug_is_not_retried() -> None:
    attempts = Attempts(ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError):
        await play(RetryPolicy(sleep=Naps()), attempts)
    assert attempts.made == 1


async def test_a_try_without_a_turn_has_failed() -> None:
    async def silent() -> AsyncGenerator[TextDelta | TurnDone, None]:
        yield TextDelta("half a sen")

    with pytest.raises(ModelUnavailable, match="2 tries; the last one: the answer ended early"):
        _ = [event async for event in RetryPolicy(tries=2, sleep=Naps()).stream("test/model", silent)]


async def test_one_try_is_one_try() -> None:
    naps = Naps()
    with pytest.raises(ModelUnavailable, match="after 1 try; the last one: cut"):
        await play(RetryPolicy(tries=1, sleep=naps), Attempts(AttemptFailed("cut")))
    assert naps.waits_s == []


async def test_what_the_server_asks_is_obeyed_up_to_a_minute() -> None:
    naps = Naps()
    asked = [2.0, 0.0, 30.0, 3600.0]
    attempts = Attempts(*(AttemptFailed("busy", retry_after_s=s) for s in asked))
    events = await play(RetryPolicy(sleep=naps, jitter=lambda: 0.0), attempts)
    assert naps.waits_s == [2.0, 3.0, 30.0, 60.0]
    assert [e.wait_s for e in events if isinstance(e, Retrying)] == naps.waits_s


@pytest.mark.parametrize("failures", [1, 2, 3, 4, 5, 6, 1000, 10**9])
@pytest.mark.parametrize("asked_s", [None, 0.0, 7.0, 59.0, 1e300])
@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_every_wait_is_between_a_second_and_a_minute(failures: int, asked_s: float | None, jitter: float) -> None:
    wait_s = RetryPolicy(jitter=lambda: jitter).wait_s(failures, asked_s)
    assert 1.0 <= wait_s <= 60.0
    assert wait_s >= min(asked_s or 0.0, 60.0)


def test_the_jitter_spreads_the_waits() -> None:
    waits = {RetryPolicy().wait_s(2) for _ in range(50)}
    assert len(waits) > 10
    assert all(3.0 <= wait_s <= 3.75 for wait_s in waits)


async def test_a_wait_can_be_cancelled() -> None:
    sleeping = asyncio.Event()

    async def sleep_for_ever(_: float) -> None:
        sleeping.set()
        await asyncio.Event().wait()

    attempts = Attempts(AttemptFailed("overloaded"))
    task = asyncio.create_task(play(RetryPolicy(sleep=sleep_for_ever), attempts))
    await sleeping.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert attempts.made == attempts.closed == 1


async def test_closing_the_stream_closes_the_try() -> None:
    attempts = Attempts()
    stream = RetryPolicy(sleep=Naps()).stream("test/model", attempts)
    assert await anext(stream) == TextDelta("try 1 ")
    await stream.aclose()
    assert attempts.closed == 1


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 520, 529])
def test_statuses_that_pass(status: int) -> None:
    assert may_pass_later(status)


@pytest.mark.parametrize("status", [300, 307, 400, 401, 402, 403, 404, 405, 413, 422, 431])
def test_statuses_that_do_not_pass(status: int) -> None:
    assert not may_pass_later(status)


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "3600"}, 3600.0),
        ({"retry-after": "abc"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "9e999"}, None),
        ({"retry-after": "Mon, 01 Jan 99999 00:00:00 GMT"}, None),
        ({"retry-after": "Tue, 30 Nov 2026 21:00:10 GMT"}, 10.0),
        ({"retry-after": "Tue, 30 Nov 2026 21:00:10 -0000"}, 10.0),
        ({"retry-after": "Tue, 30 Nov 2026 20:59:50 GMT"}, None),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "x", "retry-after": "9"}, 9.0),
    ],
)
def test_retry_after_is_read_or_ignored(headers: dict[str, str], wait_s: float | None) -> None:
    now_s = 1796072400.0  # 2026-11-30 21:00:00 UTC
    assert retry_after_s(headers, now=lambda: now_s) == (None if wait_s is None else pytest.approx(wait_s))


def test_a_date_is_compared_with_this_clock() -> None:
    wait_s = retry_after_s({"retry-after": formatdate(time.time() + 20, usegmt=True)})
    assert wait_s is not None
    assert 15 < wait_s <= 20
