"""One retry policy for every driver: few tries, growing waits, each wait visible and cancellable (L2).

The SDKs' own retries are switched off: they wait unseen, give up within seconds of an overload and obey any Retry-After
(49 days were accepted). A driver makes one try at a time; a try that may succeed later raises :class:`AttemptFailed`.
"""

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TypeAlias

from asp_agent.errors import ModelError, ModelUnavailable
from asp_agent.messages import ModelEvent, Retrying, TextDelta, TurnDone

Attempt: TypeAlias = Callable[[], AsyncGenerator[TextDelta | TurnDone, None]]

_RETRIED = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS})


class AttemptFailed(ModelError):
    """One try failed, and the same request may succeed later. Never leaves a driver: the policy catches it."""

    exit_code = 4

    def __init__(self, reason: str, *, retry_after_s: float | None = None) -> None:
        """Keep the reason (one line, no secret) and the seconds that the server asked us to wait, if it did."""
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


def may_pass_later(status: int) -> bool:
    """Tell whether an HTTP status is worth another try: 408, 409, 429 and everything from 500 (529 is "overloaded")."""
    return status in _RETRIED or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def retry_after_s(headers: Mapping[str, str], *, now: Callable[[], float] = time.time) -> float | None:
    """Read how many seconds a server asks us to wait; None if it does not say, or says nonsense (P74).

    Understood are ``retry-after-ms``, and ``retry-after`` as a number or an HTTP date. ``headers`` must be lower-case
    or case-insensitive. Not a number, not finite, negative or past: None. The result is not capped here.
    """
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "").strip()
        if not text:
            continue
        try:
            wait_s = float(text) * unit_s
        except ValueError:
            wait_s = _seconds_until(text, now())
        if math.isfinite(wait_s) and wait_s >= 0:
            return wait_s
    return None


def _seconds_until(date: str, now_s: float) -> float:
    try:
        moment = parsedate_to_datetime(date)
    except (ValueError, OverflowError):
        return math.nan
    # RFC 9110 5.6.7: an HTTP date is always UTC, also where it says so with "-0000", which Python reads as naive.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now_s


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long. The default makes 6 tries and waits about 1, 3, 9, 27 and 60 s between them.

    ``sleep`` (seconds) and ``jitter`` (0.0 to 1.0) are there for tests: with ``sleep=`` retries take no time.
    """

    tries: int = 6
    first_wait_s: float = 1.0
    factor: float = 3.0
    longest_wait_s: float = 60.0
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    jitter: Callable[[], float] = random.random

    def wait_s(self, failures: int, asked_s: float | None = None) -> float:
        """Return the seconds to wait after ``failures`` failed tries (1 or more).

        At least what the server asked for, up to a quarter more so that many runs do not come back at once, and never
        more than ``longest_wait_s``, whatever the server says.
        """
        # The exponent is bounded before the power is taken: a policy of thousands of tries must not overflow.
        backoff_s = self.first_wait_s * self.factor ** min(failures - 1, 64)
        wait_s = max(backoff_s, asked_s or 0.0) * (1 + self.jitter() / 4)
        return min(wait_s, self.longest_wait_s)

    async def stream(self, name: str, attempt: Attempt) -> AsyncGenerator[ModelEvent, None]:
        """Yield the events of ``attempt()``, called anew for each try, until one yields its TurnDone.

        Between two tries comes a Retrying whose ``attempt`` is the number of the coming try (2 or more). A try that
        ends without TurnDone has failed too. Raises ModelUnavailable after the last try, with the last reason and
        nothing of the failed exceptions behind it; every other error of ``attempt`` passes and is not retried.
        """
        failure = AttemptFailed("nothing was tried")
        for number in range(1, self.tries + 1):
            failure = AttemptFailed("the answer ended early")
            try:
                async with aclosing(attempt()) as events:
                    async for event in events:
                        yield event
                        if isinstance(event, TurnDone):
                            return
            except AttemptFailed as error:
                failure = error
            if number < self.tries:
                wait_s = self.wait_s(number, failure.retry_after_s)
                yield Retrying(failure.reason, wait_s, number + 1)
                await self.sleep(wait_s)
        tries = "1 try" if self.tries == 1 else f"{self.tries} tries"
        message = f"{name}: no whole answer after {tries}; the last one: {failure.reason}"
        raise ModelUnavailable(message)
