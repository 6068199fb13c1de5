"""``-o FILE``: the last answer in a file of this machine, whole or not at all, and only when the run is done."""

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import NoReturn

from asp.errors import AspError, UsageError, quoted

_MAX_NAME_BYTES = 240


class AnswerNotWritten(AspError):
    """The run is done, but its answer could not be written to the file that was named."""


def check(path: Path) -> None:
    """Find out before the run whether the answer can be written to ``path`` after it. Raises UsageError.

    The folder must be there and open to us, and what has the name already must be a regular file. Nothing is changed.
    """
    folder = path.parent
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            _refuse(path, "its folder is not a folder")
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(path.stat().st_mode):
                _refuse(path, "it is there and not a regular file")
        if not path.name or len(os.fsencode(path.name)) > _MAX_NAME_BYTES:
            _refuse(path, "it is not the name of a file")
        if not os.access(folder, os.W_OK | os.X_OK):
            _refuse(path, "its folder is not writable")
    except (OSError, ValueError) as error:
        _refuse(path, getattr(error, "strerror", None) or "it is not a path")


def write(path: Path, text: str) -> None:
    """Write ``text`` and a last newline, by a new file that takes the place of the old one. Raises AnswerNotWritten."""
    target = path.resolve() if path.is_symlink() else path  # the link stays a link
    fresh = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
    data = text.encode("utf-8", "replace")
    try:
        with fresh.open("xb") as opened:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(opened.fileno(), stat.S_IMODE(target.stat().st_mode))
            opened.write(data if data.endswith(b"\n") else data + b"\n")
        fresh.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        msg = f"cannot write the answer to {quoted(str(path))} ({error.strerror})"
        raise AnswerNotWritten(msg) from error


def _refuse(path: Path, why: str) -> NoReturn:
    msg = f"-o {quoted(str(path))}: {why}"
    raise UsageError(msg)
