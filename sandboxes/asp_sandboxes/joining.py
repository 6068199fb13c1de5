"""Join a TCP connection to a stream of a sandbox: bytes, end of stream and pressure go both ways, nothing else does."""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

HALF_OPEN_S = 60.0
"""How long one direction stays open after the other has ended. SSH has no use for that; a peer that hangs does."""


class End(asyncio.Protocol):
    """One end of a joined pair. What it reads, the other writes; while the other is full, this one does not read.

    ``made`` is called once there is a connection, ``lost`` when it is gone.
    """

    def __init__(self, lost: Callable[[], None], made: Callable[[], None] | None = None) -> None:
        """Start apart: what is read before :meth:`joined_to` is kept, and then reading waits."""
        self._lost = lost
        self._made = made
        self._other: End | None = None
        self._transport: asyncio.Transport | None = None
        self._early = b""
        self._early_eof = False
        self._ended_reading = self._ended_writing = False
        self._half_open: asyncio.TimerHandle | None = None
        self._received = 0
        self._marks: list[tuple[int, Callable[[], None]]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Know the transport."""
        # Reading is not paused here: Python 3.11 undoes that, it starts to read right after.
        self._transport = cast("asyncio.Transport", transport)
        connection = self.connection
        if connection is not None and connection.family != socket.AF_UNIX:
            # asyncio does so for sockets that it made itself. Without it each command waits 40 ms or a multiple of that for
            # an acknowledgement that the client delays (Nagle; measured: exec 0.09 to 0.22 s, with it 0.01 s).
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._made is not None:
            self._made()

    def joined_to(self, other: "End") -> None:
        """Hand all on to ``other`` from now on, first what came early."""
        self._other = other
        if self._early:
            other.write(self._early)
            self._early = b""
        if self._early_eof:
            other.write_eof()
        else:
            self.resume_reading()

    def call_after(self, count: int, called: Callable[[], None]) -> None:
        """Call once when ``count`` bytes have been read here, or the connection is gone; at once if that is so already."""
        self._marks.append((count, called))
        self._look_at_marks()

    def _look_at_marks(self) -> None:
        passed = [mark for mark in self._marks if mark[0] <= self._received or not self.is_open]
        for mark in passed:
            self._marks.remove(mark)
            mark[1]()

    def data_received(self, data: bytes) -> None:
        """Hand over what came."""
        self._received += len(data)
        if self._marks:
            self._look_at_marks()
        if self._other is not None:
            self._other.write(data)
        else:
            self._early += data
            self.pause_reading()

    def eof_received(self) -> bool:
        """Hand over a half-close, and keep the other direction open for a while."""
        self._ended_reading = True
        if self._other is not None:
            self._other.write_eof()
        else:
            self._early_eof = True
        self._half_open = asyncio.get_running_loop().call_later(HALF_OPEN_S, self.close)
        self._close_if_over()
        return True

    def _close_if_over(self) -> None:
        # asyncio does not, once it has been told to keep a half-open connection.
        if self._ended_reading and self._ended_writing:
            self.close()

    def pause_writing(self) -> None:
        """Be full: the other end stops reading."""
        if self._other is not None:
            self._other.pause_reading()

    def resume_writing(self) -> None:
        """Have room again."""
        if self._other is not None:
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other end once it has written what it holds; a reset is handed on as one."""
        self._transport = None
        if self._half_open is not None:
            self._half_open.cancel()
        other, self._other = self._other, None
        if other is not None:
            if exc is None:
                other.close()
            else:
                other.abort()
        self._look_at_marks()
        self._lost()

    def write(self, data: bytes) -> None:
        """Write, if there is still somebody to read."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def write_eof(self) -> None:
        """Half-close."""
        self._ended_writing = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
        self._close_if_over()

    def pause_reading(self) -> None:
        """Stop reading, if it is not closing anyway."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Close after what is still to be written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def connection(self) -> socket.socket | None:
        """The connection itself, to ask who is there; None if it is gone."""
        if self._transport is None:
            return None
        found: socket.socket | None = self._transport.get_extra_info("socket")
        return found

    @property
    def is_silent(self) -> bool:
        """Whether nothing has been read here."""
        return self._received == 0

    @property
    def is_open(self) -> bool:
        """Whether the transport is there."""
        return self._transport is not None


def join(one: End, other: End) -> None:
    """Let two ends talk. If one has gone meanwhile, the other is closed."""
    if not (one.is_open and other.is_open):
        one.close()
        other.close()
        return
    one.joined_to(other)
    other.joined_to(one)
