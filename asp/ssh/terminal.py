"""A terminal in the sandbox for a person: one session with a pseudo-terminal, joined to ours (RFC 4254 6.2).

What the sandbox writes here reaches the terminal as it is, since a person wants to use it: this is the one place where
nothing is shown instead of obeyed. No tool of the agent comes here.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import termios
import tty
from collections.abc import Iterator
from pathlib import PurePosixPath

import asyncssh

from asp.errors import ConnectionLost, NotStarted
from asp.ssh.connection import Connection
from asp.transport import SIGNAL_NUMBERS

SHELL = (
    'cd -- "$1" && unset SSH_CLIENT SSH_CONNECTION SSH_TTY MOTD_SHOWN MAIL; '
    'exec "${SHELL:-$(command -v bash || echo /bin/sh)}"'
)
"""What runs: the login's own shell in the workspace. Without a workspace, in the home directory."""

_PIECE_BYTES = 1 << 16
_PAUSE_ABOVE = 1 << 18
_QUOTABLE = re.compile(r"[^'!\\\x00-\x1f\x7f]*")
_GOOD_BYE = re.compile(rb"[\r\n]~\.")


class _Terminal(asyncssh.SSHClientSession[bytes]):
    """Our side of the session: output goes to a descriptor in its own pace, and the server waits for it."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._waiting_bytes = 0
        self.channel: asyncssh.SSHClientChannel[bytes] | None = None
        self._paused = False
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.status: int | None = None
        self.broken = False

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        """Keep the channel."""
        self.channel = chan

    def data_received(self, data: bytes, datatype: int | None) -> None:
        """Queue it; above 256 KiB the server has to wait."""
        self._pieces.put_nowait(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes > _PAUSE_ABOVE and not self._paused and self.channel is not None:
            self._paused = True
            self.channel.pause_reading()

    def pause_writing(self) -> None:
        """The server does not take more for now."""
        self.may_write.clear()

    def resume_writing(self) -> None:
        """It does again."""
        self.may_write.set()

    def exit_status_received(self, status: int) -> None:
        """Keep the status."""
        self.status = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:  # noqa: FBT001
        """Keep it as a shell shows it."""
        self.status = 128 + SIGNAL_NUMBERS.get(signal.partition("@")[0].removeprefix("SIG"), 0)

    def connection_lost(self, exc: Exception | None) -> None:
        """End what waits."""
        self.broken = exc is not None
        self.may_write.set()
        self._pieces.put_nowait(None)

    async def show(self) -> None:
        """Write what comes, until the session is over."""
        while (piece := await self._pieces.get()) is not None:
            rest = memoryview(piece)
            while rest:
                # In a thread: a terminal that was stopped (Ctrl-S) must not stop our keepalives.
                rest = rest[await asyncio.to_thread(os.write, self._output, rest) :]
            self._waiting_bytes -= len(piece)
            if self._paused and self._waiting_bytes < _PAUSE_ABOVE // 2 and self.channel is not None:
                self._paused = False
                self.channel.resume_reading()


async def run_terminal(connection: Connection, workspace: PurePosixPath, keyboard: int, screen: int) -> int:
    """Give the person at ``keyboard`` and ``screen`` (descriptors of a terminal) a shell; return its status, 0-255.

    The terminal's settings are restored, whatever happens. The line ``~.`` ends the session from our side, as in ssh.

    Raises NotStarted if there is no shell to be had, ConnectionLost if it ended without a status.
    """
    folder = str(workspace) if _QUOTABLE.fullmatch(str(workspace)) else "."
    session = _Terminal(screen)
    try:
        await connection.ssh.create_session(
            lambda: session, f"exec /bin/sh -c '{SHELL}' sh '{folder}'", encoding=None,
            term_type=os.environ.get("TERM") or "dumb", term_size=_size(),
        )  # fmt: skip
    except (asyncssh.Error, OSError) as error:
        msg = "the sandbox gives no terminal"
        raise NotStarted(msg) from error
    channel = session.channel
    if channel is None:
        msg = "the sandbox gives no terminal"
        raise NotStarted(msg)
    with _raw(keyboard), _resized(channel):
        showing = asyncio.create_task(session.show())
        typing = asyncio.create_task(_type(keyboard, channel, session))
        try:
            await asyncio.wait({showing, typing}, return_when=asyncio.FIRST_COMPLETED)
            if typing.done() and not showing.done():
                channel.write_eof() if typing.result() else channel.abort()
                await showing
        finally:
            typing.cancel()
            showing.cancel()
            await asyncio.gather(typing, showing, return_exceptions=True)
            channel.close()
    if session.status is None:
        msg = "the connection to the sandbox was lost" if session.broken else "the terminal was closed without a status"
        raise ConnectionLost(msg)
    return session.status


async def _type(keyboard: int, channel: asyncssh.SSHClientChannel[bytes], session: _Terminal) -> bool:
    """Send what is typed until the end of input (true) or ``~.`` at the beginning of a line (false)."""
    loop = asyncio.get_running_loop()
    before = b"\n"
    while True:
        await session.may_write.wait()
        typed = loop.create_future()
        loop.add_reader(keyboard, _read, keyboard, typed)
        try:
            keys: bytes = await typed
        finally:
            loop.remove_reader(keyboard)
        if not keys:
            return True
        before += keys
        if _GOOD_BYE.search(before):
            return False
        before = before[-2:]
        channel.write(keys)


def _read(keyboard: int, typed: "asyncio.Future[bytes]") -> None:
    """Read what was typed, or nothing at the end; only when there is something, since a terminal's read waits."""
    if typed.done():
        return
    try:
        typed.set_result(os.read(keyboard, _PIECE_BYTES))
    except BlockingIOError:
        return
    except OSError:  # the terminal is gone
        typed.set_result(b"")


@contextlib.contextmanager
def _raw(keyboard: int) -> Iterator[None]:
    """Let every key reach the sandbox, and restore the terminal."""
    before = termios.tcgetattr(keyboard)
    tty.setraw(keyboard, termios.TCSADRAIN)  # what was typed already counts
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resized(channel: asyncssh.SSHClientChannel[bytes]) -> Iterator[None]:
    """Tell the sandbox when the window changes its size."""
    loop = asyncio.get_running_loop()

    def changed() -> None:
        with contextlib.suppress(OSError):
            channel.change_terminal_size(*_size())

    loop.add_signal_handler(signal.SIGWINCH, changed)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


def _size() -> tuple[int, int]:
    columns, lines = shutil.get_terminal_size()
    return columns, lines
