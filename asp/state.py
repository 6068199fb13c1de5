"""Where our own files live: one private folder per user, ``$XDG_STATE_HOME/asp`` (default ``~/.local/state/asp``).

Everything in it is 0600 in 0700 folders. Nothing here is ever inside a repository or a sandbox.
"""

import contextlib
import os
import secrets
from pathlib import Path

from asp.errors import UsageError


def state_dir(*parts: str) -> Path:
    """Return a folder below our state directory and make it, mode 0700, if it is not there.

    Raises UsageError if the place is not ours or cannot be made.
    """
    configured = os.environ.get("XDG_STATE_HOME", "")
    root = Path(configured) if configured.startswith("/") else _home() / ".local" / "state"
    folder = root.joinpath("asp", *parts)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in [folder, *folder.parents][: len(parts) + 1][::-1]:
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.lstat()
            if status.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
                msg = f"{path}: not a directory of ours; move it away or set XDG_STATE_HOME"
                raise UsageError(msg)
            if status.st_mode & 0o077:
                path.chmod(0o700)
    except OSError as error:
        msg = f"{folder}: cannot make our state directory ({error.strerror}); set XDG_STATE_HOME to a folder that you can write"
        raise UsageError(msg) from error
    return folder


def _home() -> Path:
    try:
        home = Path.home()
    except RuntimeError as error:
        msg = "no home directory is known for this user; set HOME or XDG_STATE_HOME"
        raise UsageError(msg) from error
    if not home.is_absolute() or str(home) == "/":  # HOME= and HOME=relative would put our keys where we happen to be
        msg = f"HOME is {str(home)!r}, which is no home directory; set HOME or XDG_STATE_HOME"
        raise UsageError(msg)
    if not home.is_dir():  # root could make it, and would leave a home behind that nobody asked for
        msg = f"{home}: the home directory does not exist; set HOME or XDG_STATE_HOME"
        raise UsageError(msg)
    return home


def write_private(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` atomically, mode 0600: a reader sees the old bytes or the new ones, never a part.

    Raises OSError; then the old file is untouched and no temporary file stays.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
