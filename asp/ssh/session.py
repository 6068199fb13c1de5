"""One SSH session channel: from login noise to READY, then the output of one command, then how it ended.

No stream objects of asyncssh: a small session class costs about half their CPU, and it sees every state that E5 and E7
need (data, EOF, exit status, exit signal, closed).
"""

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Callable

import asyncssh

from asp.errors import ConnectionLost, ExecNotAllowed, LoginShellFailed, NotStarted, WorkspaceMissing, quoted
from asp.ssh.script import LOGIN, NONCE_BYTES
from asp.transport import OnOutput, Stream

READY_TIMEOUT_S = 20.0
"""How long a login shell may take to become ready (slow rc files)."""

OPEN_TRIES = 6
OPEN_BACKOFF_S = 0.02
"""A refused channel open was never sent, so it may be tried again: dropbear refuses 3 to 21 % of concurrent ones."""

READY_LIMIT = 200
"""Bytes of a READY line; it has under 60."""

NOISE_LIMIT = 1 << 16
"""Login noise that is kept for an error message; the search for READY looks at the last bytes only."""

PAUSE_ABOVE = 1 << 20
"""Bytes that wait for a slow receiver before the server is made to wait."""


_MARK_LENGTH = 64
_PID = re.compile(rb"[1-9][0-9]{0,9}")
_late: set["asyncio.Task[None]"] = set()  # openings whose caller has gone; they close what they still get


class ReceiverFailed(Exception):
    """The caller's own receiver raised; ``error`` is what it raised. Not an error of ours: it decides nothing here."""

    def __init__(self, error: Exception) -> None:
        """Keep it."""
        super().__init__(str(error))
        self.error = error


class Tail:
    """The last ``keep`` bytes of a stream, and how many there were in all."""

    __slots__ = ("_kept", "keep", "total")

    def __init__(self, keep: int) -> None:
        """Keep at most ``keep`` bytes, and always enough for :meth:`is_only`."""
        self.keep = keep
        self.total = 0
        self._kept = bytearray()

    def add(self, data: bytes) -> None:
        """Append; trimmed at twice the size, so that the cost is amortised."""
        self.total += len(data)
        self._kept += data
        keep = max(self.keep, _MARK_LENGTH)
        if len(self._kept) > 2 * keep:
            del self._kept[: len(self._kept) - keep]

    def tail(self) -> bytes:
        """Return what is kept."""
        return bytes(self._kept[-self.keep :]) if self.keep else b""

    def is_only(self, mark: bytes) -> bool:
        """Whether the stream held ``mark`` (at most 64 bytes) and nothing else."""
        return self.total == len(mark) and bytes(self._kept) == mark


class Session(asyncssh.SSHClientSession[bytes]):
    """The client's end of one session channel."""

    def __init__(self, *, marks_both_streams: bool = True) -> None:
        """Make a new nonce; nothing is sent yet. A guard says READY on stdout only."""
        self.nonce = secrets.token_hex(NONCE_BYTES)
        self.pid: int | None = None
        self.ready_words: list[bytes] = []
        self.exit_status: int | None = None
        self.exit_signal: str | None = None
        self.eof = False
        self.broken = False
        self.received = 0
        self.on_line: Callable[[bytes], None] | None = None
        self._line = bytearray()
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.command_sent = False
        self._ready: asyncio.Future[None] = loop.create_future()
        self._noise = {Stream.STDOUT: bytearray(), Stream.STDERR: bytearray()}
        self._marked: set[Stream] = set()
        self._both_marks = marks_both_streams
        self.outputs = {Stream.STDOUT: Tail(0), Stream.STDERR: Tail(0)}
        self._on_output: OnOutput | None = None
        self._pieces: deque[tuple[Stream, bytes]] = deque()
        self._waiting_bytes = 0
        self._passer: asyncio.Task[None] | None = None
        self._more = asyncio.Event()
        self._finishing = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.channel: asyncssh.SSHClientChannel[bytes] | None = None

    async def wait_ready(self) -> None:
        """Return when READY has come. Raises LoginShellFailed, WorkspaceMissing or NotStarted."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await asyncio.shield(self._ready)
        except TimeoutError as error:
            self.close()
            msg = f"the login shell did not become ready in {READY_TIMEOUT_S:.0f} s{self._said()}"
            raise LoginShellFailed(msg) from error
        except BaseException:
            self.close()
            raise

    def _said(self) -> str:
        noise = bytes(self._noise[Stream.STDERR].strip() or self._noise[Stream.STDOUT].strip())
        return f"; it said {quoted(noise)}" if noise else ""

    def never_opened(self) -> None:
        """The server opened no channel: there is nothing to close."""
        if not self.closed.done():
            self.closed.set_result(None)

    def write(self, data: bytes) -> None:
        """Send bytes to the session's stdin. On a closed channel they go nowhere; the caller sees that by ``closed``."""
        if self.channel is not None and not self.closed.done():
            try:
                self.channel.write(data)
            except OSError:
                return

    def write_eof(self) -> None:
        """End the session's stdin."""
        if self.channel is not None and not self.closed.done():
            try:
                self.channel.write_eof()
            except OSError:
                return

    def close(self) -> None:
        """Give the channel back."""
        if self.channel is not None and not self.closed.done():
            self.channel.close()

    # -- the command's output --------------------------------------------------------------------------------------

    def collect(self, keep_bytes: int, on_output: OnOutput | None) -> None:
        """Say what to do with output; called once, before the command line is written."""
        self.outputs = {Stream.STDOUT: Tail(keep_bytes), Stream.STDERR: Tail(keep_bytes)}
        self._on_output = on_output
        if on_output is not None:
            self._passer = asyncio.create_task(self._pass_on(on_output))

    async def _pass_on(self, on_output: OnOutput) -> None:
        while True:
            while self._pieces:
                stream, data = self._pieces.popleft()
                try:
                    await on_output(stream, data)
                except Exception as error:
                    raise ReceiverFailed(error) from error
                self._waiting_bytes -= len(data)
                if self._waiting_bytes < PAUSE_ABOVE // 2:
                    self._resume()
            self._more.clear()
            if self.closed.done() or self._finishing:
                return
            await self._more.wait()

    async def passed_on(self) -> None:
        """Return when the receiver has taken all that arrived. Raises ReceiverFailed."""
        if self._passer is not None:
            self._finishing = True
            self._more.set()
            passer, self._passer = self._passer, None
            await passer

    def drop_receiver(self) -> None:
        """Pass nothing on any more (the call was cancelled)."""
        if self._passer is not None:
            self._passer.cancel()
            self._passer = None
        self._on_output = None
        self._pieces.clear()
        self._resume()

    @property
    def receiver(self) -> asyncio.Task[None] | None:
        """The task that passes output on, so that its failure can end the call."""
        return self._passer

    def _take(self, stream: Stream, data: bytes) -> None:
        self.received += len(data)
        if self.on_line is not None:
            self._line += data
            *lines, rest = self._line.split(b"\n")
            self._line = bytearray(rest[-NOISE_LIMIT:])
            for line in lines:
                self.on_line(bytes(line))
            return
        self.outputs[stream].add(data)
        if self._on_output is None:
            return
        self._pieces.append((stream, data))
        self._waiting_bytes += len(data)
        self._more.set()
        if self._waiting_bytes > PAUSE_ABOVE and self._flowing.is_set() and self.channel is not None:
            self._flowing.clear()
            self.channel.pause_reading()

    def _resume(self) -> None:
        if not self._flowing.is_set():
            self._flowing.set()
            if self.channel is not None and not self.closed.done():
                self.channel.resume_reading()

    @property
    def paused(self) -> bool:
        """Whether the server is made to wait: then output may be on its way that ``received`` does not count."""
        return not self._flowing.is_set()

    async def flowing(self) -> None:
        """Return when nothing waits for the receiver. Raises ReceiverFailed."""
        while self.paused and self._passer is not None:
            resumed = asyncio.ensure_future(self._flowing.wait())
            try:
                await asyncio.wait({resumed, self._passer}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                resumed.cancel()
            if self._passer.done():
                await self._passer

    def _look_for_ready(self, stream: Stream, data: bytes) -> bytes:
        """Drop login noise; return what comes after the mark."""
        noise = self._noise[stream]
        noise += data
        mark = noise.find(self.nonce.encode())
        end = noise.find(b"\n", mark) if mark >= 0 else -1
        if end < 0:
            if mark >= 0 and len(noise) - mark > READY_LIMIT:
                self._fail(LoginShellFailed("the session's READY line does not end"))
            if len(noise) > NOISE_LIMIT:
                del noise[: len(noise) - NOISE_LIMIT // 2]
            return b""
        words = bytes(noise[mark:end]).split()
        rest = bytes(noise[end + 1 :])
        del noise[mark:]
        self._marked.add(stream)
        if stream is Stream.STDOUT:
            self.ready_words = words
            if words[1:2] == [b"R"] and len(words) > 2 and _PID.fullmatch(words[2]):  # noqa: PLR2004 - NONCE R PID
                self.pid = int(words[2])
            else:
                self._marked.add(Stream.STDERR)  # NONCE D comes on stdout only
        if len(self._marked) == (2 if self._both_marks else 1) and not self._ready.done():
            if self.pid is None:
                msg = "the working directory does not exist in the sandbox, or may not be entered"
                self._ready.set_exception(WorkspaceMissing(msg))
            else:
                self._ready.set_result(None)
        return rest

    # -- called by asyncssh ----------------------------------------------------------------------------------------

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        """Keep the channel."""
        self.channel = chan

    def data_received(self, data: bytes, datatype: int | None) -> None:
        """Sort a piece of output."""
        stream = Stream.STDERR if datatype == asyncssh.EXTENDED_DATA_STDERR else Stream.STDOUT
        if stream not in self._marked and (self._both_marks or stream is Stream.STDOUT):
            data = self._look_for_ready(stream, data)
        if data:
            self._take(stream, data)

    def eof_received(self) -> bool:
        """Remember that all output has come; let asyncssh close our side when the server closes."""
        self.eof = True
        return True

    def exit_status_received(self, status: int) -> None:
        """Remember the status."""
        self.exit_status = status
        self._has_exited()

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:  # noqa: FBT001
        """Remember the signal; names outside RFC 4254 come as NAME@domain."""
        self.exit_signal = signal.partition("@")[0].removeprefix("SIG")
        self._has_exited()

    def _fail(self, error: NotStarted) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # it may be that nobody waits any more

    def _has_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The channel is closed, or the connection under it is gone."""
        if not self.closed.done():
            self.closed.set_result(None)
        self.broken = exc is not None
        self._has_exited()
        if not self._ready.done():
            if exc is not None:
                error: NotStarted = NotStarted("the connection ended before the command was sent")
            else:
                status = "without a status" if self.exit_status is None else f"with status {self.exit_status}"
                error = LoginShellFailed(f"the login shell ended {status} before it was ready{self._said()}")
            self._fail(error)
        if self._passer is not None:
            self._more.set()

    # -- the end ---------------------------------------------------------------------------------------------------

    def lost(self, why: str) -> ConnectionLost:
        """Return the error for an outcome that is unknown, with the output that had come."""
        return ConnectionLost(
            f"{why}; the command's outcome is unknown and it may have run",
            stdout=self.outputs[Stream.STDOUT].tail(), stderr=self.outputs[Stream.STDERR].tail(),
        )  # fmt: skip


async def _open_channel(connection: asyncssh.SSHClientConnection, session: Session) -> None:
    """Open a channel, within 20 s; if we are cancelled or it is late, it is closed as soon as it is open.

    asyncssh leaves a channel open when its opening is cancelled, and each one takes a session of the server's few.
    Raises TimeoutError, ChannelOpenError, and what else asyncssh raises.
    """

    async def create() -> None:
        await connection.create_session(lambda: session, LOGIN, encoding=None)

    opening = asyncio.ensure_future(create())

    def opened_for_nobody(late: "asyncio.Task[None]") -> None:
        _late.discard(late)
        if late.cancelled() or late.exception() is not None:
            session.never_opened()
        else:
            session.close()

    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await asyncio.shield(opening)
    except BaseException:
        _late.add(opening)
        opening.add_done_callback(opened_for_nobody)
        raise


async def open_session(
    connection: asyncssh.SSHClientConnection, boot: Callable[[str], bytes], *, marks_both_streams: bool = True,
    attempts: list[Session] | None = None,
) -> Session:  # fmt: skip
    """Open a session channel, send the boot line that ``boot`` makes of the nonce, return the READY session.

    Each attempt is put into ``attempts``: the last one may hold a session of the server until it is ``closed``, also when
    this call was cancelled.

    Raises ExecNotAllowed, LoginShellFailed, WorkspaceMissing, or NotStarted if the connection ended. In every case no
    command line was written, so the caller may try again (E2).
    """
    attempt = 0
    while True:
        session = Session(marks_both_streams=marks_both_streams)
        if attempts is not None:
            attempts.append(session)
        try:
            await _open_channel(connection, session)
        except TimeoutError as error:
            msg = f"the server did not answer in {READY_TIMEOUT_S:.0f} s when a session was asked for"
            raise NotStarted(msg) from error
        except asyncssh.ChannelOpenError as error:
            if not connection.is_closed():
                attempt += 1
                if attempt < OPEN_TRIES:
                    await asyncio.sleep(OPEN_BACKOFF_S * 2**attempt)
                    continue
                msg = f"the server refuses to run commands or to open one more session: {quoted(error.reason)}"
                raise ExecNotAllowed(msg) from error
            msg = "the connection ended before a session could be opened"
            raise NotStarted(msg) from error
        except (OSError, asyncssh.Error) as error:
            msg = "the connection ended before a session could be opened"
            raise NotStarted(msg) from error
        break
    session.write(boot(session.nonce))
    await session.wait_ready()
    return session
