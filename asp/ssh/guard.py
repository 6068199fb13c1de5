"""The guard: one more session per connection that can kill any command and proves the end of output (E5, E6)."""

import asyncio
from collections.abc import Callable
from functools import partial

import asyncssh

from asp.errors import ConnectionLost, NotStarted
from asp.ssh.script import guard_line, quote
from asp.ssh.session import Session, open_session

ANSWER_TIMEOUT_S = 10.0
"""A guard answers in one round trip. One that stays silent this long was stopped or is starved: it counts as dead."""

GRACE_TENTHS = 20
"""Between TERM and KILL: 2 s."""


class Guard:
    """A guard session. ``dead`` is done when it has ended for whatever reason, or does not answer any more."""

    def __init__(self, session: Session) -> None:
        """Listen to a READY guard session; use :meth:`start`."""
        self._session = session
        self._answers: dict[str, asyncio.Future[None]] = {}
        self._tokens = 0
        self.same_host = session.ready_words[3:4] == [b"here"]
        self.pid = session.pid or 0
        self.born = asyncio.get_running_loop().time()
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._session.on_line = self._answered
        session.closed.add_done_callback(lambda _closed: self._die())

    @classmethod
    async def start(cls, connection: asyncssh.SSHClientConnection, same_host_path: bytes) -> "Guard":
        """Start a guard on a connection. Raises NotStarted and its subclasses."""
        boot: Callable[[str], bytes] = partial(guard_line, same_host_path=same_host_path)
        return cls(await open_session(connection, boot, marks_both_streams=False))

    def _answered(self, line: bytes) -> None:
        words = line.split()
        key = b" ".join(words[:2]).decode("ascii", "replace")
        answer = self._answers.pop(key, None)
        if answer is not None and not answer.done():
            answer.set_result(None)

    def _die(self) -> None:
        if not self.dead.done():
            self.dead.set_result(None)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(NotStarted("the guard of this connection ended"))
                answer.exception()
        self._answers.clear()

    async def _ask(self, key: str, rest: bytes = b"") -> None:
        """Send a request and wait for its answer. Raises NotStarted if there is none: the guard is dead."""
        if self.dead.done():
            msg = "the guard of this connection ended"
            raise NotStarted(msg)
        answer = asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        self._session.write(key.encode() + rest + b"\n")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await answer
        except TimeoutError as error:
            self._die()
            msg = f"the guard of this connection did not answer in {ANSWER_TIMEOUT_S:.0f} s"
            raise NotStarted(msg) from error
        finally:
            self._answers.pop(key, None)

    def _tell(self, line: str) -> None:
        self._session.write(line.encode() + b"\n")

    async def register(self, pid: int) -> None:
        """Make the guard know a process group; when this returns, the group can be killed. Raises NotStarted."""
        await self._ask(f"+ {pid}")

    async def ping(self) -> None:
        """Return when everything that was written before this call has arrived: sshd polls every pipe before it answers."""
        self._tokens += 1
        await self._ask(f"p {self._tokens}")

    def forget(self, pid: int, *, drain: bool) -> None:
        """The command ended; with ``drain`` a background child still holds its output, which is read to nowhere."""
        self._tell(f"{'d' if drain else '-'} {pid}")

    def kill(self, pid: int) -> None:
        """TERM, CONT, 2 s of grace, KILL, to the whole group."""
        self._tell(f"k {pid} {GRACE_TENTHS}")

    async def remove_if_cut(self, path: bytes) -> None:
        """Have a temporary file removed if the connection ends before :meth:`keep_all`. Raises NotStarted."""
        self._tokens += 1
        await self._ask(f"t {self._tokens}", b" " + quote(path))

    def keep_all(self) -> None:
        """Forget all temporary files."""
        self._tell("u")

    def close(self) -> None:
        """End the guard's stdin: it kills what is registered and ends."""
        self._session.write_eof()

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait until it has ended, at most ``timeout_s`` seconds."""
        await asyncio.wait({self.dead}, timeout=timeout_s)


def guard_lost(session: Session) -> ConnectionLost:
    """Return the error for a command whose guard was killed: its output can no longer be trusted to be whole."""
    return session.lost("the process that watches over the command was killed, and the command with it")
