"""The local twin: a Transport over a directory and a bash of this machine, for tests and for the differential suite.

It runs what it is told *here*: never point an agent at it. It shares no code with ``asp.ssh``, so that the two can be
compared byte for byte (DESIGN promise 2).
"""

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Self

from asp import errors
from asp.transport import (
    DEFAULT_KEEP_BYTES,
    MAX_READ_BYTES,
    DirEntry,
    ExecResult,
    FileKind,
    FileStat,
    OnOutput,
    SandboxPath,
    Stream,
)

GRACE_S = 2.0
LONGEST_ARGUMENT = 120_000  # Linux MAX_ARG_STRLEN is 131,072 with the final NUL
_PIPE_MAX = 1 << 20

_ERRNO = {
    errno.ENOENT: errors.PathMissing,
    errno.EISDIR: errors.PathIsDirectory,
    errno.ENOTDIR: errors.PathNotDirectory,
    errno.EACCES: errors.PathDenied,
    errno.EPERM: errors.PathDenied,
    errno.EROFS: errors.PathDenied,
    errno.ELOOP: errors.PathLoop,
    errno.ENOSPC: errors.NoSpace,
    errno.EDQUOT: errors.NoSpace,
    errno.ENAMETOOLONG: errors.PathMissing,
}


class _Output:
    """The last bytes of one stream, and how many there were."""

    def __init__(self, keep: int) -> None:
        self.keep, self.kept, self.total = keep, bytearray(), 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        self.kept += data
        if len(self.kept) > 2 * self.keep:
            del self.kept[: len(self.kept) - self.keep]

    def tail(self) -> bytes:
        return bytes(self.kept[-self.keep :]) if self.keep else b""


class LocalTwin:
    """A Transport whose sandbox is the folder ``root`` of this machine."""

    def __init__(self, root: Path, *, env: Mapping[str, str] | None = None) -> None:
        """Use ``root`` as the workspace. ``env`` is the whole environment of commands (default: PATH and HOME=root)."""
        self._root = root
        self._env = dict(env) if env is not None else {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(root)}
        self._running: set[subprocess.Popen[bytes]] = set()
        self._drained: dict[int, IO[bytes]] = {}

    @property
    def workspace(self) -> PurePosixPath:
        """The folder."""
        return PurePosixPath(self._root)

    def _path(self, path: SandboxPath) -> bytes:
        return os.path.join(os.fsencode(self._root), path if isinstance(path, bytes) else os.fsencode(str(path)))

    async def exec(
        self,
        script: str | bytes,
        *,
        cwd: SandboxPath | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        merge_streams: bool = False,
        timeout_s: float | None = None,
        keep_bytes: int = DEFAULT_KEEP_BYTES,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run ``bash -c -- SCRIPT`` in a session of its own. See :class:`asp.transport.Transport`."""
        text = script.encode("utf-8", "surrogateescape") if isinstance(script, str) else script
        if b"\0" in text:
            msg = "the script holds a NUL byte, which no shell can take; nothing was run"
            raise errors.CommandRefused(msg)
        folder = self._path(cwd if cwd is not None else b"")
        if not os.path.isdir(folder):
            msg = f"the working directory {os.fsdecode(folder)} does not exist"
            raise errors.WorkspaceMissing(msg)
        argv: list[bytes] = [b"bash", b"-c", b"--", text]
        given = stdin or b""
        if len(text) > LONGEST_ARGUMENT:
            close = b"" if stdin is not None else b"exec </dev/null; "
            reader = b'LC_ALL=C IFS= read -rN %d BASH_EXECUTION_STRING; %seval " $BASH_EXECUTION_STRING"'
            argv = [b"bash", b"-c", reader % (len(text), close), b"bash"]
            given = text + given
        has_input = stdin is not None or len(text) > LONGEST_ARGUMENT
        process = subprocess.Popen(
            argv, cwd=folder, env={**self._env, **(env or {})}, umask=0o022, bufsize=0, start_new_session=True,
            stdin=subprocess.PIPE if has_input else subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merge_streams else subprocess.PIPE,
        )  # fmt: skip
        self._running.add(process)
        try:
            return await self._follow(process, given, timeout_s, keep_bytes, on_output)
        finally:
            self._running.discard(process)

    async def _follow(  # noqa: C901, PLR0915 - one story, told in order
        self, process: subprocess.Popen[bytes], given: bytes, timeout_s: float | None, keep: int, on_output: OnOutput | None,
    ) -> ExecResult:
        loop = asyncio.get_running_loop()
        outputs = {Stream.STDOUT: _Output(keep), Stream.STDERR: _Output(keep)}
        pipes = {Stream.STDOUT: process.stdout, Stream.STDERR: process.stderr}
        open_pipes = {stream: pipe for stream, pipe in pipes.items() if pipe is not None}
        pieces: asyncio.Queue[tuple[Stream, bytes] | None] = asyncio.Queue()
        ended: asyncio.Future[None] = loop.create_future()

        def read(stream: Stream) -> bool:
            try:
                data = os.read(open_pipes[stream].fileno(), 65536)
            except BlockingIOError:
                return False
            if not data:
                loop.remove_reader(open_pipes[stream].fileno())
                open_pipes.pop(stream).close()
                return False
            outputs[stream].add(data)
            if on_output is not None:
                pieces.put_nowait((stream, data))
            return True

        async def pass_on() -> None:
            while on_output is not None and (piece := await pieces.get()) is not None:
                await on_output(*piece)

        async def feed() -> None:
            if process.stdin is None:
                return
            descriptor, rest = process.stdin.fileno(), memoryview(given)
            os.set_blocking(descriptor, False)
            with contextlib.suppress(BrokenPipeError):
                while rest:
                    try:
                        rest = rest[os.write(descriptor, rest) :]
                    except BlockingIOError:
                        writable: asyncio.Future[None] = loop.create_future()
                        loop.add_writer(descriptor, _settle, writable)
                        try:
                            await writable
                        finally:
                            loop.remove_writer(descriptor)
            process.stdin.close()

        for stream, pipe in open_pipes.items():
            os.set_blocking(pipe.fileno(), False)
            loop.add_reader(pipe.fileno(), read, stream)
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, _settle, ended)
        feeder, passer = asyncio.create_task(feed()), asyncio.create_task(pass_on())
        timed_out = False
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(ended)
            except TimeoutError:
                timed_out = True
                await self._kill(process, ended)
            except asyncio.CancelledError:
                await self._kill(process, ended)
                raise
            for stream in list(open_pipes):  # the foreground's rest is in the pipe; more comes from background children
                limit = outputs[stream].total + _PIPE_MAX
                while stream in open_pipes and outputs[stream].total < limit and read(stream):
                    pass
        finally:
            feeder.cancel()
            pieces.put_nowait(None)
            await asyncio.gather(feeder, passer, return_exceptions=True)
            loop.remove_reader(pidfd)
            os.close(pidfd)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
            background = bool(open_pipes)
            for pipe in open_pipes.values():
                self._drain(loop, pipe.fileno(), pipe)
        code = process.returncode
        return ExecResult(
            exit_status=code if code >= 0 else None,
            signal=signal.Signals(-code).name.removeprefix("SIG") if code < 0 else None,
            stdout=outputs[Stream.STDOUT].tail(), stderr=outputs[Stream.STDERR].tail(),
            stdout_bytes=outputs[Stream.STDOUT].total, stderr_bytes=outputs[Stream.STDERR].total,
            timed_out=timed_out, background=background,
        )  # fmt: skip

    @staticmethod
    async def _kill(process: subprocess.Popen[bytes], ended: asyncio.Future[None]) -> None:
        """TERM, a grace of 2 s, then KILL, to the whole group."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        try:
            async with asyncio.timeout(GRACE_S):
                await asyncio.shield(ended)
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await ended

    def _drain(self, loop: asyncio.AbstractEventLoop, descriptor: int, pipe: IO[bytes]) -> None:
        """Read what a background child writes later, to nowhere: it must not die of SIGPIPE."""

        def discard() -> None:
            if not os.read(descriptor, 65536):
                loop.remove_reader(descriptor)
                del self._drained[descriptor]
                pipe.close()

        loop.remove_reader(descriptor)
        loop.add_reader(descriptor, discard)
        self._drained[descriptor] = pipe

    async def read(self, path: SandboxPath, *, offset: int = 0, max_bytes: int | None = None) -> bytes:
        """Read a regular file. See :class:`asp.transport.Transport`."""
        local = self._path(path)
        with _named(path):
            kind = os.stat(local).st_mode
            if stat.S_ISDIR(kind):
                raise errors.PathIsDirectory(_text(path))
            if not stat.S_ISREG(kind):
                raise errors.PathSpecial(_text(path))
            with open(local, "rb") as file:
                file.seek(offset)
                if max_bytes is not None:
                    return file.read(max_bytes)
                data = file.read(MAX_READ_BYTES + 1)
        if len(data) > MAX_READ_BYTES:
            raise errors.FileTooLarge(_text(path))
        return data

    async def write(self, path: SandboxPath, data: bytes) -> None:
        """Write a file whole or not at all. See :class:`asp.transport.Transport`."""
        with _named(path):
            target = os.path.realpath(self._path(path))
            try:
                self._replace(target, data, path)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                self._replace(target, data, path)

    @staticmethod
    def _replace(target: bytes, data: bytes, shown: SandboxPath) -> None:
        mode, links = 0o644, 1
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(target)
            mode, links = stat.S_IMODE(status.st_mode), status.st_nlink
            if stat.S_ISDIR(status.st_mode):
                raise errors.PathIsDirectory(_text(shown))
            if not stat.S_ISREG(status.st_mode):
                raise errors.PathSpecial(_text(shown))
        if links > 1:  # another name must go on showing the same file
            with open(target, "r+b") as file:
                file.write(data)
                file.truncate()
            return
        temporary = os.path.join(os.path.dirname(target), b"." + secrets.token_hex(8).encode())
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                os.fchmod(file.fileno(), mode)
            os.rename(temporary, target)
        except OSError:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(temporary)
            raise

    async def stat(self, path: SandboxPath, *, follow: bool = True) -> FileStat:
        """Look at a path. See :class:`asp.transport.Transport`."""
        with _named(path):
            status = os.stat(self._path(path), follow_symlinks=follow)
        return FileStat(_kind(status.st_mode), status.st_size, stat.S_IMODE(status.st_mode), int(status.st_mtime))

    async def list(self, path: SandboxPath, *, max_entries: int = 10_000) -> Sequence[DirEntry]:
        """List a directory. See :class:`asp.transport.Transport`."""
        with _named(path):
            local = self._path(path)
            names = sorted(os.listdir(local))[:max_entries]
            return [DirEntry(name, _kind(os.lstat(os.path.join(local, name)).st_mode)) for name in names]

    async def aclose(self) -> None:
        """Kill what runs; stop draining."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for descriptor, pipe in self._drained.items():
            asyncio.get_running_loop().remove_reader(descriptor)
            pipe.close()
        self._drained.clear()

    async def __aenter__(self) -> Self:
        """Return self."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        """Close."""
        await self.aclose()


def _text(path: SandboxPath) -> str:
    return os.fsdecode(path) if isinstance(path, bytes) else str(path)


@contextlib.contextmanager
def _named(path: SandboxPath) -> Iterator[None]:
    """Turn an OSError into the error that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise _ERRNO.get(error.errno, errors.RemotePathError)(_text(path)) from error


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _kind(mode: int) -> FileKind:
    if stat.S_ISREG(mode):
        return FileKind.FILE
    if stat.S_ISDIR(mode):
        return FileKind.DIRECTORY
    return FileKind.SYMLINK if stat.S_ISLNK(mode) else FileKind.SPECIAL
