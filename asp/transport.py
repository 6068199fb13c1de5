"""The seam between the policy layer and the mechanism layer: raw exec, read, write, stat, list, and nothing else.

Tools are written against :class:`Transport`. ``asp.ssh`` implements it over SSH; ``asp.testing`` has the local twin.
Everything is bytes (E4); decoding belongs to the policy layer. Relative paths start at the workspace (never at a
directory of ours).
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from types import TracebackType
from typing import Protocol, Self, TypeAlias

DEFAULT_KEEP_BYTES = 1 << 20
"""How much of each output stream a result keeps unless told otherwise: its last 1 MiB."""

MAX_READ_BYTES = 64 << 20
"""The most that one read returns unless told otherwise: 64 MiB."""

SandboxPath: TypeAlias = str | bytes | PurePosixPath
"""A path in the sandbox. ``str`` is encoded as UTF-8 with surrogateescape, so any byte path can be named."""


class Stream(Enum):
    """The two output streams of a command."""

    STDOUT = 1
    STDERR = 2


OnOutput: TypeAlias = Callable[[Stream, bytes], Awaitable[None]]
"""Receives each piece of output in order. While it has not returned, the sandbox is made to wait (backpressure)."""


class FileKind(Enum):
    """What a path is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    SPECIAL = "special"


@dataclass(frozen=True, slots=True)
class FileStat:
    """What is known of a path: ``size`` in bytes, ``mode`` as permission bits (0o7777), ``mtime_s`` since 1970."""

    kind: FileKind
    size: int
    mode: int
    mtime_s: float


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name in a directory (no path), and what it is (a link is a link, it is not followed)."""

    name: bytes
    kind: FileKind


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. Exactly one of ``exit_status`` (0-255) and ``signal`` (``"KILL"``, ``"TERM"``...) is set.

    ``stdout`` and ``stderr`` are the *last* bytes of each stream, at most ``keep_bytes``; ``stdout_bytes`` and
    ``stderr_bytes`` count all that was written. With merged streams all is in ``stdout``. ``timed_out``: our time limit
    ended it, and the status is that of the killed command. ``background``: a child of the command still holds its output.
    """

    exit_status: int | None
    signal: str | None
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    stderr_bytes: int
    timed_out: bool = False
    background: bool = False

    @property
    def status(self) -> int:
        """The status as a shell shows it: 0-255, a death by signal N is 128 + N (POSIX 2.8.2)."""
        if self.exit_status is not None:
            return self.exit_status
        return 128 + SIGNAL_NUMBERS.get(self.signal or "", 0)


# RFC 4254 6.10 names; numbers as on Linux. Names outside the RFC are sent as NAME@domain by some servers.
SIGNAL_NUMBERS = {
    "HUP": 1, "INT": 2, "QUIT": 3, "ILL": 4, "TRAP": 5, "ABRT": 6, "BUS": 7, "FPE": 8, "KILL": 9, "USR1": 10, "SEGV": 11,
    "USR2": 12, "PIPE": 13, "ALRM": 14, "TERM": 15, "STKFLT": 16, "XCPU": 24, "XFSZ": 25, "SYS": 31,
}  # fmt: skip


class Transport(Protocol):
    """Raw read, write and exec in one sandbox. Safe for concurrent use by tasks of one event loop.

    Every verb may raise TransportError (the sandbox is gone or refuses) and its subclasses; file verbs also RemotePathError.
    """

    @property
    def workspace(self) -> PurePosixPath:
        """The absolute path in the sandbox that relative paths start from."""
        ...

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
        """Run ``script`` as ``bash -c -- SCRIPT`` (``sh`` where there is no bash) in a fresh shell, in ``cwd`` or the workspace.

        It returns when the foreground has ended and all that it wrote has arrived; a background child does not hold it
        (E5). stdin is empty, or exactly ``stdin``. After ``timeout_s`` seconds the whole process group gets TERM, then KILL,
        and the result keeps the partial output (E6). Cancelling the call kills too. Memory is bounded by ``keep_bytes``
        a stream, whatever is printed.

        Raises CommandRefused (a NUL byte; nothing was sent), NotStarted and its subclasses (provably did not run),
        ConnectionLost (may have run; never retried here).
        """
        ...

    async def read(self, path: SandboxPath, *, offset: int = 0, max_bytes: int | None = None) -> bytes:
        """Return the bytes of a file from ``offset``: at most ``max_bytes``; without it all, but FileTooLarge above 64 MiB.

        The type is looked at first: a FIFO, device or socket is refused and never opened. Files that say size 0 but hold
        content (``/proc``) are read to their end.
        """
        ...

    async def write(self, path: SandboxPath, data: bytes) -> None:
        """Make ``path`` hold exactly ``data``, or leave it as it was: never half a file, never a temporary file left.

        Mode, owner, symbolic links and hard links of an existing file stay; missing parent directories are made.
        """
        ...

    async def stat(self, path: SandboxPath, *, follow: bool = True) -> FileStat:
        """Return what ``path`` is; with ``follow`` false, what a link itself is."""
        ...

    async def list(self, path: SandboxPath, *, max_entries: int = 10_000) -> Sequence[DirEntry]:
        """Return the names in a directory without ``.`` and ``..``, sorted by bytes, at most ``max_entries``."""
        ...

    async def aclose(self) -> None:
        """End every command that still runs and close. Closing twice is harmless."""
        ...

    async def __aenter__(self) -> Self:
        """Return self."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        """Close."""
        ...
