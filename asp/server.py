"""An SSH server for one sandbox: exec (on a terminal if one is asked for) and SFTP, nothing else.

For ``asp.testing`` and for the local sandbox.

It imports asyncssh and the standard library only, so that this one file can be copied into a sandbox and run there:
``python3 -I -S -B server.py`` reads one JSON line (:class:`ServerSettings`) on stdin and serves an inherited AF_UNIX
listening socket. A TCP socket of the host must never be handed in: a process can take it and connect out with it
(facts/sandboxes.md 2.3, proved).

Why not asyncssh's own process support: ``process.redirect`` with asyncio subprocesses closes the whole connection on the
first command of our exec scheme, and it reports the exit status only when a background child closes the pipes. So each
session has pumps of its own (facts/exec-wrapper.md 9):

* the exit is seen by a pidfd; then the pipes are emptied until they would block, then the status is sent. asyncssh sends
  exit-status and CLOSE together, so for a client the order *data, then CLOSE* proves that the output is complete;
* after that, and after the connection is gone, the pipes are read to nowhere until they end: a background child must not
  die of SIGPIPE because its caller has left;
* stdin of the command is closed when the client's EOF has come *and* all before it was written, and when the connection is
  lost: that ends guards and unused sessions.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import termios
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_settings_line: dict[str, Any] = {}
if __name__ == "__main__":  # inside a sandbox: our libraries lie where the first line of stdin says
    _settings_line = json.loads(sys.stdin.buffer.readline())
    if _settings_line.get("lib"):
        sys.path.insert(0, _settings_line["lib"])

import asyncio

import asyncssh
from asyncssh.stream import SSHServerStreamSession

READ_SIZE = 65536
FOREGROUND_REMAINDER = 1 << 20
"""How much is read from a pipe after its command has ended: a Linux pipe holds at most 1 MiB (pipe-max-size), so all that
the foreground wrote is within it; more comes from a background child."""

PR_SET_DUMPABLE = 4
SFTP_VERSION = 3
_SIGNAL_NAMES = {number.value: number.name.removeprefix("SIG") for number in signal.Signals}


@dataclass(frozen=True)
class ServerSettings:
    """What one server serves.

    ``host_key``: OpenSSH private key text. ``authorized_keys``: public key lines. ``user``: the only login name (None: any).
    ``home``: where login shells start. ``shell``: login shell. ``env``: the *whole* environment of commands, built from
    nothing. ``login``: "key", or "none" to let everybody in (token gateways do so).
    """

    host_key: str = field(repr=False)
    authorized_keys: str
    env: Mapping[str, str]
    home: str = "/"
    shell: str = "/bin/sh"
    user: str | None = None
    login: str = "key"


@dataclass(frozen=True)
class Terminal:
    """The terminal that a client asks for: the value of TERM, columns and lines (RFC 4254 6.2)."""

    kind: str
    columns: int
    lines: int


class Command:
    """One running command: a process in a session of its own, its three pipes, and the channel they are joined to.

    With a terminal all three are one pseudo-terminal, and the client's going away hangs up on it.
    """

    def __init__(
        self, channel: "asyncssh.SSHServerChannel[bytes]", line: str, settings: ServerSettings, terminal: Terminal | None = None
    ) -> None:
        """Start the login shell with ``-c line``. Raises OSError if it cannot be started."""
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._on_terminal = terminal is not None
        start = self._start_with_pipes if terminal is None else self._start_on_terminal
        self._stdin: Any
        self._outputs: dict[int, tuple[Any, int | None]]
        start([settings.shell, "-c", line], settings, terminal)
        self.pid = self._process.pid
        self._to_stdin: deque[memoryview] = deque()
        self._stdin_ended = False
        self._listening = True  # somebody still wants the output
        self._writing_paused = False
        self._return_code: int | None = None
        self._reported = False
        for descriptor in (self._stdin.fileno(), *self._outputs):
            os.set_blocking(descriptor, False)
        for descriptor in self._outputs:
            self._loop.add_reader(descriptor, self._read, descriptor)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._exited)
        self.finished = self._loop.create_future()

    def _start_with_pipes(self, argv: list[str], settings: ServerSettings, _terminal: Terminal | None) -> None:
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            env=dict(settings.env), cwd=settings.home, start_new_session=True,
        )  # fmt: skip
        if self._process.stdin is None or self._process.stdout is None or self._process.stderr is None:
            raise OSError(0, "no pipes")
        self._stdin = self._process.stdin
        self._outputs = {
            self._process.stdout.fileno(): (self._process.stdout, None),
            self._process.stderr.fileno(): (self._process.stderr, asyncssh.EXTENDED_DATA_STDERR),
        }

    def _start_on_terminal(self, argv: list[str], settings: ServerSettings, terminal: Terminal | None) -> None:
        if terminal is None:
            raise OSError(0, "no terminal")
        ours, theirs = os.openpty()
        try:
            termios.tcsetwinsize(theirs, (terminal.lines, terminal.columns))
            self._process = subprocess.Popen(
                argv, stdin=theirs, stdout=theirs, stderr=theirs,
                env={**settings.env, "TERM": terminal.kind}, cwd=settings.home, start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - this process has no other thread
            )  # fmt: skip
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._stdin = os.fdopen(os.dup(ours), "wb", 0)
        self._outputs = {ours: (os.fdopen(ours, "rb", 0), None)}

    def resize(self, columns: int, lines: int) -> None:
        """Tell a command on a terminal that its window has another size."""
        if self._on_terminal and not self._stdin.closed:
            with contextlib.suppress(OSError):
                termios.tcsetwinsize(self._stdin.fileno(), (lines, columns))

    # -- output ----------------------------------------------------------------------------------------------------

    def _read(self, descriptor: int) -> bool:
        """Move one piece of output; return whether there may be more."""
        pipe, datatype = self._outputs[descriptor]
        try:
            data = os.read(descriptor, READ_SIZE)
        except BlockingIOError:
            return False
        except OSError:  # EIO: nobody has the other side of the terminal open any more
            data = b""
        if not data:
            self._loop.remove_reader(descriptor)
            del self._outputs[descriptor]
            pipe.close()
            self._report_when_complete()
            self._finish_when_drained()
            return False
        if self._listening:
            try:
                self._channel.write(data, datatype)
            except OSError:  # the channel is closed: the client left
                self._listening = False
        return True

    def pause_writing(self) -> None:
        """Stop reading the pipes: the client is slow, so the command waits."""
        self._writing_paused = True
        for descriptor in self._outputs:
            self._loop.remove_reader(descriptor)

    def resume_writing(self) -> None:
        """Read the pipes again."""
        self._writing_paused = False
        for descriptor in self._outputs:
            self._loop.add_reader(descriptor, self._read, descriptor)
        if self._return_code is not None:
            self._empty_pipes()

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._return_code = self._process.wait()
        self._empty_pipes()
        self._finish_when_drained()

    def _empty_pipes(self) -> None:
        """Send what the foreground wrote before it ended, then the status."""
        if self._reported:
            return
        for descriptor in list(self._outputs):
            moved = 0
            while moved < FOREGROUND_REMAINDER and descriptor in self._outputs and not self._writing_paused:
                if not self._read(descriptor):
                    break
                moved += READ_SIZE
        if self._writing_paused and self._listening:
            return  # resume_writing comes back here
        self._report_when_complete(background_child_may_write=True)

    def _report_when_complete(self, *, background_child_may_write: bool = False) -> None:
        if self._reported or self._return_code is None or (self._outputs and not background_child_may_write):
            return
        self._reported = True
        if self._listening:
            if not self._outputs:
                self._channel.write_eof()
            if self._return_code < 0:
                self._channel.exit_with_signal(_SIGNAL_NAMES.get(-self._return_code, "KILL"))
            else:
                self._channel.exit(self._return_code)
        self._listening = False

    def _finish_when_drained(self) -> None:
        if self._return_code is not None and not self._outputs and not self.finished.done():
            self.end_stdin()
            self.finished.set_result(None)

    # -- input -----------------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Write to the command's stdin; the client is made to wait while the command does not read."""
        if not self._stdin.closed:
            self._to_stdin.append(memoryview(data))
            self._pump_stdin()

    def end_stdin(self) -> None:
        """Close the command's stdin when all that came before is written."""
        self._stdin_ended = True
        self._pump_stdin()

    def _pump_stdin(self) -> None:
        if self._stdin.closed:
            return
        descriptor = self._stdin.fileno()
        self._loop.remove_writer(descriptor)
        try:
            while self._to_stdin:
                written = os.write(descriptor, self._to_stdin[0])
                if written < len(self._to_stdin[0]):
                    self._to_stdin[0] = self._to_stdin[0][written:]
                else:
                    self._to_stdin.popleft()
        except BlockingIOError:
            self._loop.add_writer(descriptor, self._pump_stdin)
            self._pause_client(pause=True)
            return
        except OSError:  # EPIPE: the command closed its stdin; drop the rest, or the channel could never close
            self._to_stdin.clear()
            self._stdin.close()
            self._pause_client(pause=False)
            return
        self._pause_client(pause=False)  # may deliver more data, and EOF, before it returns
        if self._stdin_ended and not self._to_stdin:
            self._stdin.close()

    def _pause_client(self, *, pause: bool) -> None:
        if self._listening:
            if pause:
                self._channel.pause_reading()
            else:
                self._channel.resume_reading()

    # -- the end ---------------------------------------------------------------------------------------------------

    def signal(self, name: str) -> None:
        """Send a signal, named as in RFC 4254 6.10, to the command's process group. An unknown name does nothing."""
        number = getattr(signal, f"SIG{name}", None)
        if isinstance(number, signal.Signals):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def detach(self) -> None:
        """The client is gone: close stdin, drain the output to nowhere."""
        self._listening = False
        self._to_stdin.clear()
        if self._writing_paused:
            self.resume_writing()
        if self._on_terminal:
            self.signal("HUP")
        self.end_stdin()

    def kill(self) -> None:
        """Kill the process group and let go of every pipe. Only for a server that goes away."""
        self.detach()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for descriptor, (pipe, _datatype) in list(self._outputs.items()):
            self._loop.remove_reader(descriptor)
            pipe.close()
        self._outputs.clear()
        self._finish_when_drained()


class Session(SSHServerStreamSession[bytes]):
    """One session channel: our own pumps for exec; asyncssh's stream for the SFTP subsystem."""

    def __init__(self, server: "SandboxServer") -> None:
        """Belong to ``server``, which knows the settings and keeps the list of commands."""
        super().__init__(None, server.sftp_factory, SFTP_VERSION)
        self._server = server
        self._command: Command | None = None
        self._line: str | None = None
        self._terminal: Terminal | None = None

    def pty_requested(self, term_type: str, term_size: tuple[int, int, int, int], term_modes: Mapping[int, int]) -> bool:
        """Remember the terminal; the modes are those of a new one."""
        del term_modes
        self._terminal = Terminal(term_type, term_size[0], term_size[1])
        return self._server.allow_exec

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        """Pass it on."""
        del pixwidth, pixheight
        if self._command is not None:
            self._command.resize(width, height)

    def shell_requested(self) -> bool:
        """No interactive shells here."""
        return False

    def exec_requested(self, command: str) -> bool:
        """Remember the command line; it is started when the channel is."""
        self._line = command
        return self._server.allow_exec

    def session_started(self) -> None:
        """Start the command, or the SFTP server."""
        if self._line is None:
            super().session_started()
            return
        channel = self._chan
        try:
            self._command = self._server.start_command(channel, self._line, self._terminal)  # type: ignore[arg-type]
        except OSError as error:
            channel.write_stderr(f"cannot start the login shell: {error.strerror}\n".encode())  # type: ignore[union-attr]
            channel.exit(127)  # type: ignore[union-attr]

    def data_received(self, data: bytes, datatype: int | None) -> None:
        """Pass stdin on."""
        if self._line is None:
            super().data_received(data, datatype)
        elif self._command is not None:
            self._command.feed(data)

    def eof_received(self) -> bool:
        """Pass the end of stdin on; keep the channel open for the output."""
        if self._line is None:
            return super().eof_received()
        if self._command is not None:
            self._command.end_stdin()
        return True

    def pause_writing(self) -> None:
        """Make the command wait."""
        if self._command is not None:
            self._command.pause_writing()
        else:
            super().pause_writing()

    def resume_writing(self) -> None:
        """Let the command go on."""
        if self._command is not None:
            self._command.resume_writing()
        else:
            super().resume_writing()

    def signal_received(self, signal: str) -> None:
        """Signal the command's process group."""
        if self._command is not None:
            self._command.signal(signal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the command; it may go on in the background."""
        if self._command is not None:
            self._command.detach()
        super().connection_lost(exc)


class SFTP(asyncssh.SFTPServer):
    """asyncssh's SFTP server, but it never opens what could block it: one thread serves the whole sandbox."""

    def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> object:
        """Open a regular file or directory; refuse FIFOs, devices and sockets."""
        with contextlib.suppress(OSError):
            kind = os.stat(self.map_path(path)).st_mode  # noqa: PTH116 - bytes path
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                raise asyncssh.SFTPFailure("not a regular file")
        return super().open(path, pflags, attrs)


class SandboxServer:
    """A listening SSH server. ``await SandboxServer.start(settings, sock)``, then :meth:`aclose`."""

    def __init__(self, settings: ServerSettings, *, sftp: bool = True, allow_exec: bool = True) -> None:
        """Serve by ``settings``; without ``sftp`` the subsystem is refused, without ``allow_exec`` every command."""
        self.settings = settings
        self.allow_exec = allow_exec
        self.sftp_factory: Callable[[Any], asyncssh.SFTPServer] | None = SFTP if sftp else None
        self.connections: set[asyncssh.SSHServerConnection] = set()
        self.logins: list[str] = []
        self.commands: set[Command] = set()
        self._acceptor: asyncssh.SSHAcceptor | None = None

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections on a bound socket."""
        server = self

        class Login(asyncssh.SSHServer):
            def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
                self._connection = conn
                server.connections.add(conn)

            def connection_lost(self, exc: Exception | None) -> None:
                server.connections.discard(self._connection)

            def begin_auth(self, username: str) -> bool:
                server.logins.append(username)
                if server.settings.user is not None and username != server.settings.user:
                    return True
                if server.settings.login == "none":
                    return False
                self._connection.set_authorized_keys(
                    asyncssh.import_authorized_keys(server.settings.authorized_keys),
                )
                return True

            def public_key_auth_supported(self) -> bool:
                return server.settings.login != "none"

            def session_requested(self) -> Session:
                return Session(server)

        self._acceptor = await asyncssh.listen(
            sock=sock, server_factory=Login,
            server_host_keys=[asyncssh.import_private_key(self.settings.host_key)],
            encoding=None, allow_pty=True, agent_forwarding=False, line_editor=False, compression_algs=None,
            password_auth=False, kbdint_auth=False, host_based_auth=False, gss_host=None,
            login_timeout=20, keepalive_interval=15, keepalive_count_max=3, config=[],
        )  # fmt: skip

    def start_command(
        self, channel: "asyncssh.SSHServerChannel[bytes]", line: str, terminal: Terminal | None = None
    ) -> Command:
        """Start a command and keep it in the list until it has ended and nobody holds its output."""
        command = Command(channel, line, self.settings, terminal)
        self.commands.add(command)
        command.finished.add_done_callback(lambda _future: self.commands.discard(command))
        return command

    async def aclose(self) -> None:
        """Stop listening, close every connection, kill what still runs."""
        if self._acceptor is not None:
            self._acceptor.close()
        for connection in list(self.connections):
            connection.abort()
            await connection.wait_closed()
        if self._acceptor is not None:  # last: since Python 3.12 it waits for the connections
            await self._acceptor.wait_closed()
        running = list(self.commands)
        for command in running:
            command.kill()
        for command in running:
            await command.finished


def _limit(kind: int, soft: int, hard: int) -> None:
    """Limit ourselves and all commands; what is lower already stays."""
    _, most = resource.getrlimit(kind)
    hard = hard if most == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(kind, (min(soft, hard), hard))


def _serve_inherited_socket(line: Mapping[str, Any]) -> None:
    """Serve one sandbox until the socket or the process ends; the body of ``python3 server.py``."""
    for name, (soft, hard) in line.get("limits", {}).items():
        _limit(getattr(resource, f"RLIMIT_{name}"), soft, hard)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as adjustment:  # noqa: PTH123
        adjustment.write("500")  # a machine without memory takes it from us and our commands first
    # The agent has our uid: without this it could ptrace us, read the host key and take our descriptors (pidfd_getfd).
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Started with & from a script these are ignored, and every command would inherit that for ever.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)
    listener = socket.socket(fileno=int(line["listen_fd"]))
    if listener.family != socket.AF_UNIX:
        sys.exit("the listening socket must be AF_UNIX")
    os.set_inheritable(listener.fileno(), False)
    os.environ.clear()
    os.environ.update(line["env"])  # asyncssh expands ~ by HOME
    settings = ServerSettings(
        host_key=line["host_key"], authorized_keys=line["authorized_keys"], env=line["env"], home=line["home"],
        shell=line["shell"], user=line["user"],
    )  # fmt: skip

    async def serve() -> None:
        server = SandboxServer(settings)
        await server.listen(listener)
        with contextlib.suppress(OSError):
            os.write(1, b"ready\n")
        await asyncio.Event().wait()

    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    asyncio.run(serve())


if __name__ == "__main__":
    _serve_inherited_socket(_settings_line)
