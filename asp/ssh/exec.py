"""Run one command in one cold session: READY, register with the guard, the command line, its end (E1-E7)."""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from asp.errors import LoginShellFailed, NotStarted
from asp.ssh.connection import Connection
from asp.ssh.guard import Guard, guard_lost
from asp.ssh.script import NOT_RUN, SENTINEL_LENGTH, CommandText, boot_line, command_text
from asp.ssh.session import Session, open_session
from asp.transport import ExecResult, OnOutput, Stream

EOF_USUALLY_FOLLOWS_S = 0.003
"""Between exit status and CLOSE when nobody holds the pipes. After it the barrier is asked, so this is no idle timer."""

AFTER_EXIT_LIMIT = 8 << 20
"""A background child that never stops writing must not hold the call. What the foreground wrote is at most two full pipes
(1 MiB each, Linux pipe-max-size), sshd's buffers and the window (2 MiB) behind the exit status."""

KILL_TIMEOUT_S = 10.0
"""After TERM, 2 s and KILL, the end must arrive; if it does not, the outcome is unknown."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run; see :meth:`asp.transport.Transport.exec`."""

    script: bytes
    cwd: bytes
    env: Mapping[str, str] | None
    stdin: bytes | None
    merge_streams: bool
    timeout_s: float | None
    keep_bytes: int
    on_output: OnOutput | None

    def text(self) -> CommandText:
        """Return what is written to the session. Raises CommandRefused."""
        return command_text(
            self.script, secrets.token_hex(SENTINEL_LENGTH // 2), env=self.env, stdin=self.stdin is not None,
            merge_streams=self.merge_streams,
        )  # fmt: skip


async def run(connection: Connection, command: Command, *, slots: asyncio.Semaphore | None = None) -> ExecResult:
    """Run a command on a connection and return how it ended. ``slots``: who pays for the session (P1).

    Raises CommandRefused and NotStarted (nothing ran), ConnectionLost (outcome unknown, partial output inside), and
    ReceiverFailed for what the caller's receiver raised.
    """
    text = command.text()
    slots = connection.slots if slots is None else slots
    await slots.acquire()
    attempts: list[Session] = []
    try:
        guard = await connection.live_guard()
        session = await open_session(connection.ssh, lambda nonce: boot_line(nonce, command.cwd), attempts=attempts)
        abandoned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        connection.running[session] = abandoned
        await guard.register(session.pid or 0)
        return await _follow(connection, guard, session, abandoned, command, text)
    except BaseException:  # cancelled, lost, or the receiver failed: in every case it must not live on
        if attempts:
            _abandon(connection, attempts[-1], slots)
        raise
    finally:
        if not attempts or attempts[-1] not in connection.abandoned:
            slots.release()
            if attempts:
                connection.running.pop(attempts[-1], None)


def _abandon(connection: Connection, session: Session, slots: asyncio.Semaphore) -> None:
    """Kill a command that nobody waits for, and forget it when it has ended; its session is paid for until then."""
    session.drop_receiver()
    pid = session.pid or 0
    if session.command_sent:
        connection.guard.kill(pid)
    if session.closed.done():
        connection.guard.forget(pid, drain=False)
        return
    connection.abandoned.add(session)
    give_up = asyncio.get_running_loop().call_later(KILL_TIMEOUT_S, session.close)
    if not session.command_sent:
        session.close()  # EOF ends a shell that waits for its command line

    def ended(_ended: "asyncio.Future[None]") -> None:
        give_up.cancel()
        connection.guard.forget(pid, drain=False)
        connection.abandoned.discard(session)
        connection.running.pop(session, None)
        session.close()
        slots.release()

    (session.exited if session.command_sent else session.closed).add_done_callback(ended)


async def _follow(
    connection: Connection, guard: Guard, session: Session, abandoned: "asyncio.Future[None]", command: Command,
    text: CommandText,
) -> ExecResult:  # fmt: skip
    """From the command line on: nothing here may be retried (E2)."""
    if session.exited.done() or session.closed.done():
        msg = "the session ended before the command was sent"
        raise NotStarted(msg)
    session.collect(command.keep_bytes, command.on_output)
    session.command_sent = True
    session.write(text.line + text.script + (command.stdin or b""))
    if command.stdin is not None:
        session.write_eof()
    timed_out = False
    if not await _ended(session, abandoned, command.timeout_s):
        timed_out = True
        guard.kill(session.pid or 0)
        if not await _ended(session, abandoned, KILL_TIMEOUT_S):
            session.close()
            raise session.lost("the command was killed after its time limit, but its end was never reported")
    await _all_output(connection, guard, session, abandoned)
    background = not session.eof
    guard.forget(session.pid or 0, drain=background or connection.hides_children)
    session.close()
    await session.passed_on()
    not_run = text.not_run is not None and session.outputs[Stream.STDOUT].is_only(text.not_run)
    if not_run and session.exit_status == NOT_RUN:
        msg = "the shell in the sandbox could not read the script (is there no head?); it was not run"
        raise LoginShellFailed(msg)
    return ExecResult(
        exit_status=session.exit_status if session.exit_signal is None else None,
        signal=session.exit_signal,
        stdout=session.outputs[Stream.STDOUT].tail(), stderr=session.outputs[Stream.STDERR].tail(),
        stdout_bytes=session.outputs[Stream.STDOUT].total, stderr_bytes=session.outputs[Stream.STDERR].total,
        timed_out=timed_out, background=background,
    )  # fmt: skip


async def _ended(session: Session, abandoned: "asyncio.Future[None]", timeout_s: float | None) -> bool:
    """Wait for the exit status; return False if the time is over. Raises ConnectionLost, ReceiverFailed."""
    waiting = {session.exited, abandoned}
    receiver = session.receiver
    done, _ = await asyncio.wait(
        waiting | ({receiver} if receiver is not None else set()), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED,
    )
    if not done:
        return False
    _raise_if_lost(session, abandoned)
    if receiver is not None and receiver in done and not session.exited.done():
        await receiver
    return True


def _raise_if_lost(session: Session, abandoned: "asyncio.Future[None]") -> None:
    if abandoned.done():
        session.close()
        raise guard_lost(session)
    if session.closed.done() and session.exit_status is None and session.exit_signal is None:
        raise session.lost("the connection was lost, or the server reported no exit status")


async def _all_output(
    connection: Connection, guard: Guard, session: Session, abandoned: "asyncio.Future[None]",
) -> None:
    """Return when all that the foreground wrote has arrived (E5).

    EOF proves it; so does a channel that the server closed, since data precedes CLOSE. Otherwise a background child holds
    the pipes, and the barrier decides: two pings through the guard in a row without new data between them.
    """
    if not session.closed.done():
        await asyncio.wait({session.closed}, timeout=EOF_USUALLY_FOLLOWS_S)
    limit = session.received + AFTER_EXIT_LIMIT
    quiet = 0
    while not (session.closed.done() or session.eof) and quiet < 2 and session.received < limit:  # noqa: PLR2004 - two pings
        await session.flowing()  # the barrier holds for a client that keeps reading
        before = session.received
        ping = asyncio.ensure_future(guard.ping())
        try:
            await asyncio.wait({ping, session.closed, abandoned}, return_when=asyncio.FIRST_COMPLETED)
            if ping.done():
                ping.result()
        except NotStarted as error:
            raise session.lost("the end of the output could not be proved") from error
        finally:
            ping.cancel()
        quiet = quiet + 1 if session.received == before and not session.paused else 0
    _raise_if_lost(session, abandoned)
    if not session.eof and (session.broken or connection.ssh.is_closed()):
        raise session.lost("the connection was lost before all output had arrived")

