"""A local sandbox that comes back: the agent has its server's uid, so ``kill -9 -1`` inside ends all of it.

What starts again is the same sandbox: same keys, same workspace, an empty ``/tmp`` and home. It is started by the next
connection and not at once: an agent that kills it over and over costs one start for each connection that a client makes.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Self

from asp.errors import AspError, TransportError
from asp_sandboxes import bubblewrap, local


class ReturningSandbox:
    """A local sandbox and its successors. ``ended`` is set by :meth:`stop` only."""

    def __init__(self, order: local.Order, sandbox: local.LocalSandbox) -> None:
        """Take over a started sandbox, and what it was started with."""
        self.ended = asyncio.Event()
        self._order = order
        self._sandbox = sandbox
        self._changing = asyncio.Lock()
        self._stopped = False

    @classmethod
    async def start(cls, order: local.Order) -> Self:
        """Start the first. Raises UsageError."""
        return cls(order, await local.start(order))

    async def open_stream(self, joined: Callable[[], asyncio.Protocol], user: str = bubblewrap.USER) -> asyncio.Protocol:
        """Open a stream to the server inside (S1), which is started again first if it has ended.

        Raises TransportError if it cannot be started, or does not answer and still runs.
        """
        sandbox = await self._running()
        try:
            return await sandbox.open_stream(joined, user)
        except TransportError:
            # Killed a moment ago: its socket is closed first, then its processes are seen to end.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(sandbox.ended.wait(), local.STOP_TIMEOUT_S)
            if not sandbox.ended.is_set():
                raise
        return await (await self._running()).open_stream(joined, user)

    async def stop(self) -> None:
        """Kill all its processes, and start none again."""
        self._stopped = True
        async with self._changing:
            await self._sandbox.stop()
        self.ended.set()

    async def _running(self) -> local.LocalSandbox:
        async with self._changing:
            if self._stopped:
                raise TransportError("the sandbox is being stopped")
            if self._sandbox.ended.is_set():
                await self._sandbox.stop()
                try:
                    self._sandbox = await local.start(self._order)
                except (AspError, OSError) as error:
                    msg = f"the sandbox has ended and does not start again ({error})"
                    raise TransportError(msg) from error
            return self._sandbox
