"""Every failure that asp names. Each class knows its exit code (DESIGN L7) and prints as one line.

AspError
├── UsageError                    2  the caller asked for something that cannot be
├── ContractError                 2  .asp.json
│   ├── ContractMissing              no file here or above
│   ├── ContractInvalid              it does not follow the schema; carries the findings
│   ├── ContractUnsafe               not a regular file of ours, or others may write it
│   └── ContractUntrusted            nobody has said that this file may be used
├── IdentityError                 2  the private key cannot be used
├── HostKeyError                  2  refused before authentication
│   ├── HostKeyMissing               the contract pins no host key
│   └── HostKeyMismatch              the server showed another one
├── SameHost                      2  the "sandbox" is this machine
├── TransportError                4  the sandbox did not answer as an SSH server must
│   ├── NotStarted                   the command provably did not start; safe to retry
│   │   ├── Unreachable                  no TCP connection: no such host, refused, timed out
│   │   ├── NotSSH                       something else listens there, or it never speaks
│   │   ├── AuthenticationFailed      2  the server refused the identity
│   │   ├── ExecNotAllowed               logged in, but no command may run
│   │   ├── LoginShellFailed             the login shell ended before it became ready
│   │   └── WorkspaceMissing             the workspace is not there
│   └── ConnectionLost               outcome unknown; never retried; carries partial output
├── CommandRefused                2  refused before it was sent (a NUL byte in the script)
└── RemotePathError               1  a path in the sandbox; carries the path
    ├── PathMissing   ├── PathIsDirectory   ├── PathNotDirectory   ├── PathDenied
    ├── PathLoop      ├── PathSpecial       ├── NoSpace            └── FileTooLarge

A message says what, where and what to do. It never holds a secret; text that a server sent is quoted,
made safe for terminals and cut at 200 characters (:func:`quoted`).
"""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import ClassVar

from asp.terminal import printable

FOREIGN_TEXT_LIMIT = 200


def quoted(foreign: str | bytes) -> str:
    """Return text that somebody else wrote as a quoted, printable string of at most 200 characters."""
    text = foreign.decode("utf-8", "replace") if isinstance(foreign, bytes) else foreign
    text = printable(text.strip(), newlines=False)
    if len(text) > FOREIGN_TEXT_LIMIT:
        text = text[: FOREIGN_TEXT_LIMIT - 1] + "…"
    return f'"{text}"'


class AspError(Exception):
    """A failure with a name, one line of text and an exit code."""

    exit_code: ClassVar[int] = 1


class UsageError(AspError):
    """The caller asked for something that cannot be (a bad option, an impossible combination)."""

    exit_code = 2


class ContractError(AspError):
    """The contract, ``.asp.json``, cannot be used."""

    exit_code = 2


class ContractMissing(ContractError):
    """No ``.asp.json`` in the working directory or above it."""


class ContractInvalid(ContractError):
    """The file does not follow the schema or the rules that the schema cannot say.

    ``findings`` holds one line for each fault: file, field, what is wrong, what to write instead.
    """

    def __init__(self, findings: Sequence[str]) -> None:
        """Keep every finding; the text is all of them, one a line."""
        super().__init__("\n".join(findings))
        self.findings = tuple(findings)


class ContractUnsafe(ContractError):
    """The file is not a regular file, is not the caller's (or root's), or others may write it (C3)."""


class ContractUntrusted(ContractError):
    """Nobody has said that this file may be used to connect (C3)."""


class IdentityError(AspError):
    """The private key that the contract names cannot be read or used (C5)."""

    exit_code = 2


class HostKeyError(AspError):
    """The server's host key was refused before authentication (C6)."""

    exit_code = 2


class HostKeyMissing(HostKeyError):
    """The contract pins no host key, so nothing would tell one server from another."""


class HostKeyMismatch(HostKeyError):
    """The server showed a host key that is not the pinned one."""


class SameHost(AspError):
    """The endpoint is the machine we run on, so a tool call would act on it (C4)."""

    exit_code = 2


class TransportError(AspError):
    """The sandbox could not be used."""

    exit_code = 4


class NotStarted(TransportError):
    """The command provably did not start (E2): trying again cannot run it twice."""


class Unreachable(NotStarted):
    """No TCP connection: no such host, refused, or no answer in time."""


class NotSSH(NotStarted):
    """What listens there does not speak SSH, or stays silent."""


class AuthenticationFailed(NotStarted):
    """The server accepted neither the identity nor a login without a key."""

    exit_code = 2


class ExecNotAllowed(NotStarted):
    """The login works, but the server refuses to run commands, or to open one more session."""


class LoginShellFailed(NotStarted):
    """The login shell ended, or said something else, before the session became ready."""


class WorkspaceMissing(NotStarted):
    """The working directory does not exist in the sandbox, or may not be entered."""


class ConnectionLost(TransportError):
    """The connection or the exit status was lost after the command may have started (E7).

    ``stdout`` and ``stderr`` hold what had arrived. The outcome is unknown: never retry, never call it success.
    """

    def __init__(self, message: str, *, stdout: bytes = b"", stderr: bytes = b"") -> None:
        """Keep the partial output beside the message."""
        super().__init__(message)
        self.stdout = stdout
        self.stderr = stderr


class CommandRefused(AspError):
    """The command was refused before it was sent; nothing ran."""

    exit_code = 2


class RemotePathError(AspError):
    """A path in the sandbox cannot be used; ``path`` is the path as it was asked for."""

    reason: ClassVar[str] = "cannot be used"

    def __init__(self, path: str | PurePosixPath, detail: str = "") -> None:
        """Build the line ``PATH: reason`` and keep the path."""
        self.path = str(path)
        shown = printable(self.path, newlines=False)
        super().__init__(f"{shown}: {detail or self.reason}")


class PathMissing(RemotePathError):
    """There is no such file or directory."""

    reason = "no such file or directory"


class PathIsDirectory(RemotePathError):
    """A file was needed, this is a directory."""

    reason = "is a directory"


class PathNotDirectory(RemotePathError):
    """A part of the path is not a directory."""

    reason = "not a directory"


class PathDenied(RemotePathError):
    """The sandbox's user may not do this."""

    reason = "permission denied"


class PathLoop(RemotePathError):
    """Too many symbolic links."""

    reason = "too many levels of symbolic links"


class PathSpecial(RemotePathError):
    """A FIFO, device or socket: reading it could wait for ever (F2)."""

    reason = "not a regular file (a FIFO, device or socket)"


class NoSpace(RemotePathError):
    """The disk or the quota is full; the file is as it was before."""

    reason = "no space left"


class FileTooLarge(RemotePathError):
    """More bytes than the caller's limit."""

    reason = "larger than the limit"
