"""Folders of this machine that a local sandbox sees read-only at the same path: toolchains and caches (``up local --ro``).

What is inside can be read by the agent, and what listens there on a unix socket can be talked to: a read-only mount does
not stop ``connect``. So a folder with credentials or with a socket is refused. It is looked through once, when the sandbox
starts; what comes there later is seen too.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from asp import archive
from asp.errors import UsageError
from asp.state import state_dir
from asp.terminal import printable
from asp_sandboxes import bubblewrap

MAX_ENTRIES = 1_000_000
"""More cannot be looked through before a sandbox starts (about 10 s)."""

_ALREADY_SEEN = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
_CLOSED = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/var/run", str(bubblewrap.WORKSPACE))
_COVERED = ("/tmp", "/var/tmp", str(bubblewrap.HOME))  # noqa: S108 - places of the sandbox
_CREDENTIAL_FILES = frozenset({".netrc", ".git-credentials", ".pypirc", "credentials", "credentials.toml"})
"""Not all that ``asp push`` leaves out: packages bring files named ``.env`` or ``.npmrc``."""


def checked(paths: Iterable[Path], repository: Path, homes: Iterable[Path]) -> list[str]:
    """Return the folders, without repetitions. Raises UsageError, one line that names the folder and what is wrong."""
    found: list[str] = []
    for path in paths:
        folder = Path(os.path.abspath(path))  # noqa: PTH100 - a link is to be seen as one
        why = _refusal(folder, repository, homes) or _content(folder)
        if why:
            msg = f"--ro {printable(str(folder), newlines=False)}: {why}"
            raise UsageError(msg)
        if str(folder) not in found:
            found.append(str(folder))
    return sorted(found)


def _refusal(folder: Path, repository: Path, homes: Iterable[Path]) -> str | None:
    """Return why this place is not shown, whatever it holds."""
    real = Path(os.path.realpath(folder))
    if not real.is_dir():
        return "no such folder"
    if real != folder:
        return f"leads to {printable(str(real), newlines=False)}; name that"
    for places, why in ((_ALREADY_SEEN, "is seen in the sandbox already"), (_CLOSED, "is a place that no sandbox sees")):
        if any(folder.is_relative_to(place) for place in places):
            return why
    return _holder(folder, repository, homes)


def _holder(folder: Path, repository: Path, homes: Iterable[Path]) -> str | None:
    """Return what it is above of, or inside of, that is not to be shown or covered."""
    state = Path(os.path.realpath(state_dir()))
    if state.is_relative_to(folder) or folder.is_relative_to(state):
        return "holds the keys of sandboxes"
    if any(home.is_relative_to(folder) for home in homes):
        return "holds a home folder, with keys in it; name the folders that are needed"
    if repository.is_relative_to(folder):
        return "holds the repository; asp push sends that"
    if any(Path(place).is_relative_to(folder) for place in _COVERED):
        return "would cover a place of the sandbox's own"
    if any(part in archive.SECRET_FOLDERS for part in folder.parts):
        return "is a folder of credentials"
    return None


def _content(folder: Path) -> str | None:
    """Return what it holds that nobody in a sandbox may reach."""
    for number, entry in enumerate(_walk(folder)):
        shown = printable(os.path.relpath(entry.path, folder), newlines=False)
        if number >= MAX_ENTRIES:
            return f"holds more than {MAX_ENTRIES} files; name a smaller folder"
        if entry.is_symlink():
            continue  # it leads nowhere that is not seen anyway
        if entry.is_dir(follow_symlinks=False):
            if entry.name in archive.SECRET_FOLDERS:
                return f"holds a folder of credentials ({shown})"
        elif entry.is_file(follow_symlinks=False):
            if entry.name in _CREDENTIAL_FILES or (entry.name.startswith("id_") and Path(f"{entry.path}.pub").is_file()):
                return f"holds credentials ({shown})"
        elif stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
            return f"holds a socket ({shown}), by which the sandbox would reach what listens there"
    return None


def _walk(folder: Path) -> Iterator["os.DirEntry[str]"]:
    pending = [str(folder)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError:  # who cannot read it here does not in the sandbox
            continue
