"""Transport over SSH: one connection per endpoint, opened when first needed, opened again when it is gone."""

import asyncio
import posixpath
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import PurePosixPath
from types import TracebackType
from typing import Self, TypeVar

from asp import errors
from asp.ssh import exec as remote
from asp.ssh import files
from asp.ssh.connection import Connection, open_connection
from asp.ssh.session import ReceiverFailed
from asp.transport import DEFAULT_KEEP_BYTES, DirEntry, ExecResult, FileStat, OnOutput, SandboxPath
from asp.trust import TrustedContract

_T = TypeVar("_T")


class SSHTransport:
    """Raw exec, read, write, stat and list in the sandbox of a trusted contract. See :class:`asp.transport.Transport`."""

    def __init__(self, trusted: TrustedContract, *, allow_same_host: bool = False) -> None:
        """Connect to nothing yet; :meth:`connect` or the first verb does."""
        self._trusted = trusted
        self._allow_same_host = allow_same_host
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._closed = False

    def __repr__(self) -> str:
        """Show the state of the connection."""
        return f"<SSHTransport {self._connection!r}>"

    @property
    def workspace(self) -> PurePosixPath:
        """The contract's workspace."""
        return self._trusted.contract.workspace

    async def connect(self) -> Connection:
        """Return a live connection. Raises what :func:`asp.ssh.connection.open_connection` raises."""
        async with self._opening:
            if self._closed:
                msg = "this transport is closed"
                raise errors.NotStarted(msg)
            if self._connection is not None and self._connection.closed:
                await self._connection.close()
                self._connection = None
            if self._connection is None:
                self._connection = await open_connection(self._trusted, allow_same_host=self._allow_same_host)
            return self._connection

    async def _use(self, verb: Callable[[Connection], Awaitable[_T]]) -> _T:
        """Use a live connection; if the one at hand turns out to be dead before anything started, use a new one, once."""
        connection = await self.connect()
        try:
            return await verb(connection)
        except errors.NotStarted as error:
            # Its subclasses tell of a live server's answer; asking again would only give it again.
            if type(error) is not errors.NotStarted and not connection.closed:
                raise
        return await verb(await self.connect())

    def _absolute(self, path: SandboxPath) -> bytes:
        raw = path if isinstance(path, bytes) else str(path).encode("utf-8", "surrogateescape")
        if b"\0" in raw:
            raise errors.RemotePathError(_shown(path), "a path cannot hold a NUL byte")
        return posixpath.join(str(self.workspace).encode("utf-8", "surrogateescape"), raw)

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
        """Run a script in a fresh shell. See :meth:`asp.transport.Transport.exec`."""
        command = remote.Command(
            script.encode("utf-8", "surrogateescape") if isinstance(script, str) else script,
            self._absolute(cwd if cwd is not None else b"").rstrip(b"/") or b"/",
            env, stdin, merge_streams, timeout_s, keep_bytes, on_output,
        )  # fmt: skip
        command.text()  # refuse before a connection is needed
        try:
            return await self._use(lambda connection: remote.run(connection, command))
        except ReceiverFailed as failed:
            raise failed.error from None

    async def read(self, path: SandboxPath, *, offset: int = 0, max_bytes: int | None = None) -> bytes:
        """Read a regular file. See :meth:`asp.transport.Transport.read`."""
        absolute = self._absolute(path)
        return await self._use(
            lambda connection: files.read(connection, absolute, _shown(path), offset=offset, max_bytes=max_bytes),
        )

    async def write(self, path: SandboxPath, data: bytes) -> None:
        """Write a file whole or not at all. See :meth:`asp.transport.Transport.write`."""
        absolute = self._absolute(path)
        await self._use(lambda connection: files.write(connection, absolute, _shown(path), data))

    async def stat(self, path: SandboxPath, *, follow: bool = True) -> FileStat:
        """Look at a path. See :meth:`asp.transport.Transport.stat`."""
        absolute = self._absolute(path)
        return await self._use(lambda connection: files.look(connection, absolute, _shown(path), follow=follow))

    async def list(self, path: SandboxPath, *, max_entries: int = 10_000) -> Sequence[DirEntry]:
        """List a directory. See :meth:`asp.transport.Transport.list`."""
        absolute = self._absolute(path)
        return await self._use(lambda connection: files.names(connection, absolute, _shown(path), max_entries=max_entries))

    async def aclose(self) -> None:
        """Kill what runs and close: some seconds, plus the time limits of a connection that is just being made."""
        self._closed = True
        async with self._opening:
            if self._connection is not None:
                await self._connection.close()
                self._connection = None

    async def __aenter__(self) -> Self:
        """Return self."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        """Close."""
        await self.aclose()


def _shown(path: SandboxPath) -> str:
    return path.decode("utf-8", "surrogateescape") if isinstance(path, bytes) else str(path)


@asynccontextmanager
async def open_transport(trusted: TrustedContract, *, allow_same_host: bool = False) -> AsyncIterator[SSHTransport]:
    """Connect, and give a transport that is closed at the end. Raises what ``open_connection`` raises."""
    async with SSHTransport(trusted, allow_same_host=allow_same_host) as transport:
        await transport.connect()
        yield transport
