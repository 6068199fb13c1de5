"""What ends a run from outside: the number of turns, the time, the user. One mechanism for signals and the time limit.

What is being waited for (a tool, the model's stream) is cancelled where it waits, as ``asyncio.timeout`` does it, so
that the transport can kill in the sandbox; the run then ends with a valid history (L1, L7).
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

DEFAULT_MAX_TURNS = 100
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_turns`` counts the model's turns; ``timeout_s`` is for the whole run in seconds, None is without."""

    max_turns: int = DEFAULT_MAX_TURNS
    timeout_s: float | None = None


class Cause(Enum):
    """Why a run was stopped from outside."""

    INTERRUPTED = "interrupted by the user"
    TIME = "the time limit of the run was reached"


class Stopped(Exception):
    """What was waited for has been cancelled, because of ``cause``; ``__cause__`` is how it ended then."""

    def __init__(self, cause: Cause) -> None:
        """Keep the cause; it is the text."""
        super().__init__(cause.value)
        self.cause = cause


def one_ctrl_c() -> None:
    """Make SIGTERM and SIGHUP a Ctrl-C (KeyboardInterrupt) until a Watch listens (L7)."""
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler)


def ignore_signals() -> None:
    """Let nothing change how the run has ended, from now on until the process is gone. What is left takes no time."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Watch:
    """Waits for signals and the time limit beside the run. For the one task that runs the agent."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        """``give_up`` is called, in the event loop, when the user asks a second time while we still clean up."""
        self.cause: Cause | None = None
        self._give_up = give_up
        self._task: asyncio.Task[object] | None = None
        self._cancelled = False

    @contextlib.contextmanager
    def listening(self, timeout_s: float | None) -> Iterator[None]:
        """Take SIGINT, SIGTERM and SIGHUP, and stop after ``timeout_s`` seconds. Main thread only."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.interrupt)
        timer = loop.call_later(timeout_s, self._stop, Cause.TIME) if timeout_s is not None else None
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            # Blocked meanwhile: a signal between the two would end the process, and the run has an exit code already.
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            ignore_signals()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def interrupt(self) -> None:
        """Stop what runs now and let it clean up; the second time, stop waiting for that."""
        if self.cause is Cause.INTERRUPTED:
            self._give_up()
        else:
            self._stop(Cause.INTERRUPTED)

    def _stop(self, cause: Cause) -> None:
        if self.cause is None or cause is Cause.INTERRUPTED:
            self.cause = cause
        if self._task is not None and not self._cancelled:
            self._cancelled = True
            self._task.cancel()

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let what is awaited inside be cancelled. Raises Stopped then, and at once if the run is already stopped."""
        self._refuse_if_stopped()
        task = self._task = asyncio.current_task()
        if task is None:
            msg = "only a task can be stopped"
            raise RuntimeError(msg)
        self._cancelled, others = False, task.cancelling()
        try:
            yield
        except asyncio.CancelledError as cancelled:
            if self.cause is None or not self._cancelled or task.cancelling() > others + 1:
                raise  # somebody else cancels the whole run
            raise Stopped(self.cause) from cancelled
        finally:
            if self._cancelled:  # also when it ended all the same: then its result counts, and the next wait is refused
                task.uncancel()
            self._task = None

    def _refuse_if_stopped(self) -> None:
        if self.cause is not None:
            raise Stopped(self.cause)
