"""Folders as tar archives: one of ours packed, one of the sandbox's read (S6).

What the sandbox sends is hostile: it is never unpacked to disk, only read, within limits.
"""

import contextlib
import fnmatch
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO

from asp.contract import CONTRACT_NAME
from asp.errors import AspError, quoted
from asp.patch import Entry
from asp.state import state_dir
from asp.terminal import printable

MAX_TREE_BYTES = 512 << 20
"""The largest tree that is pushed or compared: it passes through memory once."""

MAX_HEADER_BYTES = 64 << 10
"""pax headers that stand for all members; tar sends none of them by itself."""

MAX_ENTRIES = 200_000
"""Names in a tree that is compared; a sandbox can make more than anyone wants to read."""

SECRET_NAMES = frozenset({
    ".env", ".netrc", ".git-credentials", ".pypirc", ".npmrc", ".dockercfg",
    "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519",
})  # fmt: skip
"""Files that usually hold credentials and never leave this machine."""

NEVER = {CONTRACT_NAME: "contract", ".git": "history"}
SECRET_FOLDERS = frozenset({".ssh", ".aws", ".gnupg", ".kube", ".docker", ".azure", ".password-store"})
"""Folders of credentials; they lie in a home folder, which should not be pushed at all."""

SHAREABLE_ENV = (".example", ".sample", ".template", ".dist")


class TreeError(AspError):
    """A tree cannot be pushed or compared."""


@dataclass
class Pushed:
    """What a push did.

    ``files`` and ``size`` in bytes went in; ``left_out`` did not, each with its reason; ``git``: a fresh history was made.
    """

    files: int = 0
    size: int = 0
    left_out: list[str] = field(default_factory=list[str])
    git: bool = False


@dataclass(frozen=True)
class _Found:
    path: Path
    name: str
    status: os.stat_result
    link: str


def is_cache(name: str) -> bool:
    """Whether a name is that of compiled Python, which is made again where it is needed."""
    return name == "__pycache__" or name.endswith((".pyc", ".pyo"))


def _holds_credentials(entry: "os.DirEntry[str]") -> bool:
    name = entry.name
    if name in SECRET_NAMES or (name.startswith(".env.") and not name.endswith(SHAREABLE_ENV)):
        return True
    if name in SECRET_FOLDERS:
        return entry.is_dir(follow_symlinks=False)
    return name.startswith("id_") and Path(f"{entry.path}.pub").is_file()  # a key pair, whatever it is called


def _reason_to_leave_out(entry: "os.DirEntry[str]", identity: Path | None, state: Path) -> str | None:
    """Return why a name does not travel, or None. Cheap tests first."""
    name = entry.name
    if name in NEVER:
        return NEVER[name]
    if _holds_credentials(entry):
        return "credentials"
    if identity is not None and entry.path == str(identity):
        return "identity"
    if entry.path == str(state):
        return "our own state, with the keys of sandboxes"
    if is_cache(name):
        return "cache"
    if entry.is_dir(follow_symlinks=False):
        if Path(entry.path, "CACHEDIR.TAG").is_file():
            return "cache"
        if Path(entry.path, "pyvenv.cfg").is_file():
            return "virtual environment, its paths are of this machine"
        return None
    if not entry.is_symlink() and not entry.is_file(follow_symlinks=False):
        return "not a regular file"
    return None


def _unreadable(name: str, error: OSError) -> TreeError:
    return TreeError(f"{printable(name, newlines=False)}: cannot be read ({error.strerror or error}); nothing was sent")


def _excluded(relative: str, patterns: Sequence[str]) -> bool:
    """Whether a glob matches the path, its name alone if the glob has no slash, as in .gitignore; ``dir/`` is ``dir``."""
    name = relative.rpartition("/")[2]
    for pattern in patterns:
        plain = pattern.rstrip("/").removeprefix("./")
        if fnmatch.fnmatchcase(relative if "/" in plain else name, plain):
            return True
    return False


def _walk(root: Path, identity: Path | None, state: Path, report: Pushed, exclude: Sequence[str]) -> Iterator[_Found]:
    """Yield every file, folder and link that travels, parents first, names sorted; links are not followed."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                names = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            raise _unreadable(str(folder), error) from error
        for entry in names:
            relative = str(Path(entry.path).relative_to(root))
            reason = _reason_to_leave_out(entry, identity, state) or ("excluded" if _excluded(relative, exclude) else None)
            if reason is not None:
                report.left_out.append(f"{printable(relative, newlines=False)} ({reason})")
                continue
            try:
                status = entry.stat(follow_symlinks=False)
                link = str(Path(entry.path).readlink()) if stat.S_ISLNK(status.st_mode) else ""
            except OSError as error:  # it went while we looked
                raise _unreadable(relative, error) from error
            yield _Found(Path(entry.path), relative, status, link)
            if stat.S_ISDIR(status.st_mode):
                waiting.append(Path(entry.path))


def _leaves(found: _Found) -> bool:
    """Whether a link points out of the tree, or by an absolute path, which is a path of this machine."""
    if found.link.startswith("/"):
        return True
    landing = os.path.normpath(os.path.join(os.path.dirname(found.name), found.link))  # noqa: PTH118, PTH120 - pure text
    return landing == ".." or landing.startswith("../")


def pack(root: Path, output: IO[bytes], *, identity: Path | None = None, exclude: Sequence[str] = ()) -> Pushed:
    """Write the tree below ``root`` as a tar archive (GNU format, which busybox reads too); return what it holds.

    ``exclude`` are globs of what stays here besides.

    Owners and set-id bits do not travel. Raises TreeError, before anything is sent, for links that leave the tree, for
    files that cannot be read, and above 512 MiB.
    """
    report = Pushed()
    leaving: list[str] = []
    with tarfile.open(fileobj=output, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as archive:
        for found in _walk(root, identity, state_dir().resolve(), report, exclude):
            member = tarfile.TarInfo(found.name)
            member.mode = stat.S_IMODE(found.status.st_mode) & 0o777
            member.mtime = int(found.status.st_mtime)
            if stat.S_ISDIR(found.status.st_mode):
                member.type = tarfile.DIRTYPE
                member.mode |= 0o700
                archive.addfile(member)
            elif stat.S_ISLNK(found.status.st_mode):
                if _leaves(found):
                    leaving.append(printable(found.name, newlines=False))
                    continue
                member.type, member.linkname = tarfile.SYMTYPE, found.link
                archive.addfile(member)
            else:
                report.size += _add_file(archive, member, found, MAX_TREE_BYTES - report.size)
                report.files += 1
    if leaving:
        shown = ", ".join(leaving[:5]) + (f" and {len(leaving) - 5} more" if len(leaving) > 5 else "")  # noqa: PLR2004
        msg = f"links that lead out of the folder are not sent; remove them or make them relative: {shown}"
        raise TreeError(msg)
    return report


def single(name: str, content: bytes) -> bytes:
    """Return an archive of one file."""
    made = BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, BytesIO(content))
    return made.getvalue()


def _add_file(archive: tarfile.TarFile, member: tarfile.TarInfo, found: _Found, room: int) -> int:
    """Add a file of at most ``room`` bytes; return its size. A file that shrinks meanwhile cannot be read (OSError)."""
    try:
        descriptor = os.open(found.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            member.size = os.fstat(descriptor).st_size
            if member.size > room:
                msg = f"the folder holds more than {MAX_TREE_BYTES >> 20} MiB; nothing was sent"
                raise TreeError(msg)
            archive.addfile(member, file)
    except OSError as error:
        raise _unreadable(found.name, error) from error
    return member.size


def _entry(
    archive: tarfile.TarFile, member: tarfile.TarInfo, entries: dict[bytes, Entry], room: int,
) -> Entry | str | None:
    """Return what a member is: an entry, what is odd about it, or None for a folder. Reads at most ``room`` bytes."""
    if member.issym():
        return Entry(link=member.linkname.encode("utf-8", "surrogateescape"))
    if member.islnk():  # another name of a file that came before: the same bytes, not another copy
        target = entries.get(os.path.normpath(member.linkname).encode("utf-8", "surrogateescape"))
        return target if target is not None else "a hard link to nothing"
    if not member.isreg():
        return None if member.isdir() else "not a regular file"
    content = archive.extractfile(member) if member.size <= room else None
    if content is None:
        msg = f"the workspace holds more than {MAX_TREE_BYTES >> 20} MiB"
        raise TreeError(msg)
    return Entry(content.read(), executable=bool(member.mode & 0o100))


def read_entries(archive_file: IO[bytes]) -> tuple[dict[bytes, Entry], list[str]]:
    """Read an archive that the sandbox made; return its files and links, and what was odd about it. Writes nothing."""
    entries: dict[bytes, Entry] = {}
    odd: list[str] = []
    size = count = 0
    with tarfile.open(fileobj=archive_file, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
        while (member := archive.next()) is not None:
            # tarfile keeps every member, and each with a copy of the headers that stand for all.
            archive.members.clear()  # type: ignore[attr-defined]
            count += 1
            if count > MAX_ENTRIES:
                msg = f"the workspace holds more than {MAX_ENTRIES} names"
                raise TreeError(msg)
            if sum(map(len, archive.pax_headers.values())) > MAX_HEADER_BYTES:
                msg = "the sandbox sent an archive with huge headers"
                raise TreeError(msg)
            name = os.path.normpath(member.name)
            if name == ".":
                continue
            if name.startswith(("/", "../")) or name == "..":
                odd.append(f"a name that leads out of the workspace: {quoted(member.name)}")
                continue
            if CONTRACT_NAME in name.split("/") or ".git" in name.split("/"):
                continue
            entry = _entry(archive, member, entries, MAX_TREE_BYTES - size)
            if isinstance(entry, Entry):
                size += member.size
                entries[name.encode("utf-8", "surrogateescape")] = entry
            elif entry is not None:
                odd.append(f"{entry}: {quoted(member.name)}")
    return entries, odd


@contextlib.contextmanager
def broken() -> Iterator[None]:
    """Turn what tarfile raises for an archive that makes no sense into a TreeError."""
    try:
        yield
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError, KeyError, MemoryError) as error:
        msg = f"the sandbox sent an archive that cannot be read: {quoted(str(error))}"
        raise TreeError(msg) from error
