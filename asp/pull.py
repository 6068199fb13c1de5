"""Take what the sandbox made into the local folder: shown first, all of it or nothing, and nothing that leads elsewhere (S6).

What comes is hostile (S7). A tree with a name or a link that no honest project has is refused whole, by name. A file that was
changed here since the push is never overwritten. New files are written whole before any old one is moved away; if anything
fails, all of it is put back.
"""

import contextlib
import os
import re
import shutil
import stat
import tarfile
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO

from asp.archive import TreeError
from asp.contract import CONTRACT_NAME
from asp.errors import quoted
from asp.patch import Entry
from asp.terminal import printable

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 3000
MAX_FILE_BYTES = 256 << 20
"""The largest file that is taken. 256 MiB."""

_SHOWN = 10
# What HFS+ ignores in a name, so that ".g\u200cit" is ".git" there (git's own list, CVE-2014-9390).
_IGNORED = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
_SHORT_NAME = re.compile(r"git~[0-9]+")

_RUNS_BY_ITSELF = tuple((re.compile(pattern), why) for pattern, why in (
    (r"(.*/)?\.envrc", "direnv runs it"),
    (r"(.*/)?\.(vscode|idea|devcontainer|fleet|zed)/.*", "an editor runs what it says"),
    (r"(.*/)?.*\.code-workspace", "an editor runs what it says"),
    (r"\.(github|gitea|forgejo)/(workflows|actions)/.*", "continuous integration runs it"),
    (r"(\.gitlab-ci\.yml|\.travis\.yml|azure-pipelines\.yml|Jenkinsfile|\.circleci/.*|\.woodpecker.*|\.drone\.yml)",
     "continuous integration runs it"),
    (r"(.*/)?(\.husky|\.githooks|hooks)/.*", "git may run it"),
    (r"(.*/)?(\.gitattributes|\.gitmodules|\.gitconfig)", "git obeys it"),
    (r"(.*/)?(\.pre-commit-config\.yaml|lefthook\.ya?ml)", "git may run what it says"),
    (r"(.*/)?(conftest|sitecustomize|usercustomize|noxfile|setup)\.py", "Python tools run it"),
    (r"(.*/)?.*\.pth", "Python runs it at every start"),
    (r"(.*/)?(pyproject\.toml|tox\.ini|setup\.cfg|pytest\.ini)", "Python tools run what it says"),
    (r"(.*/)?([Mm]akefile|GNUmakefile|[Jj]ustfile|Rakefile|Taskfile\.ya?ml|CMakeLists\.txt|.*\.mk)", "a build runs it"),
    (r"(.*/)?(package\.json|\.npmrc|\.yarnrc.*|\.pnpmfile\.cjs|.*\.config\.(c|m)?[jt]s)", "npm and its tools run what it says"),
    (r"(.*/)?(build\.rs|\.cargo/.*)", "cargo runs it"),
    (r"(.*/)?(Dockerfile.*|Containerfile|(docker-)?compose.*\.ya?ml)", "a container engine runs what it says"),
    (r"(.*/)?(\.claude|\.cursor|\.codex|\.mcp)[/.].*", "an agent obeys it"),
    (r"(.*/)?(AGENTS|CLAUDE)\.md", "an agent obeys it"),
))  # fmt: skip


class PullRefused(TreeError):
    """The tree of the sandbox is not taken, and nothing was changed."""


class LocalChanged(PullRefused):
    """Files were changed here since the push, and there too."""


@dataclass(frozen=True)
class Change:
    """One name: what it was when it was pushed, and what it shall be."""

    name: str
    old: Entry | None
    new: Entry | None


@dataclass(frozen=True)
class Plan:
    """What a pull would do: the changes that are still to be made, and which of them run by themselves, with the reason."""

    root: Path
    changes: list[Change] = field(default_factory=list[Change])
    warnings: list[str] = field(default_factory=list[str])


def plan(root: Path, old: Mapping[bytes, Entry], new: Mapping[bytes, Entry], odd: Iterable[str] = ()) -> Plan:
    """Compare what was pushed with what is there now, and both with the folder ``root``; write nothing.

    Raises PullRefused for a hostile tree (each reason by name), LocalChanged.
    """
    found = [*odd, *_faults(old, new)]
    if found:
        raise PullRefused(_listed("the sandbox's files are not taken", found))
    made = Plan(root)
    conflicts: list[str] = []
    going = old.keys() - new.keys()
    for raw in sorted(old.keys() | new.keys()):
        before, after = old.get(raw), new.get(raw)
        if before == after:
            continue
        change = Change(raw.decode(), before, after)
        if after is None and (root / change.name).is_dir() and before is not None and before.link is None:
            continue  # the file is gone already, and a folder is in its place
        here = _here(root, change.name, going)
        if here == after:
            continue
        if here != before:
            conflicts.append(printable(change.name, newlines=False))
            continue
        made.changes.append(change)
        reason = _runs_by_itself(change)
        if reason:
            made.warnings.append(f"{printable(change.name, newlines=False)}: {reason}")
    if conflicts:
        raise LocalChanged(_listed("changed here since the push, and in the sandbox too; nothing was taken", conflicts))
    return made


def apply(made: Plan) -> None:
    """Make the changes: all, or none if anything fails. Raises PullRefused."""
    moved: list[tuple[Path, Path]] = []  # where a file is now, and where it was
    placed: list[Path] = []
    folders: list[Path] = []
    try:
        store = Path(tempfile.mkdtemp(prefix=".pull-", dir=made.root))
    except OSError as error:
        msg = f"{made.root}: cannot be written ({error.strerror})"
        raise PullRefused(msg) from error
    try:
        fresh = [_written(store / f"{number}.new", made.root / change.name, change) for number, change in enumerate(made.changes)]
        _move_away(made, store, moved)
        for change, ready in zip(made.changes, fresh, strict=True):
            target = made.root / change.name
            if ready is not None:
                folders += _make_folders(made.root, target.parent)
                ready.rename(target)
                placed.append(target)
    except BaseException as error:
        _put_back(moved, placed, folders)
        if isinstance(error, OSError):
            msg = f"{error.filename}: cannot be written ({error.strerror}); everything is as it was"
            raise PullRefused(msg) from error
        raise
    finally:
        shutil.rmtree(store, ignore_errors=True)


def _move_away(made: Plan, store: Path, moved: list[tuple[Path, Path]]) -> None:
    """Move every file that goes or changes into ``store``, and remove the folders that this empties."""
    for number, change in enumerate(made.changes):
        target = made.root / change.name
        _no_link_above(made.root, target)
        if os.path.lexists(target) and not (target.is_dir() and not target.is_symlink()):
            kept = store / f"{number}.old"
            target.rename(kept)
            moved.append((kept, target))
    for change in made.changes:
        target = made.root / change.name
        if change.new is None:
            for parent in target.parents:
                if parent == made.root or not _remove_folder(parent):
                    break


def pack_entries(entries: Mapping[bytes, Entry], output: IO[bytes]) -> None:
    """Write a tree as an archive that :func:`asp.archive.read_entries` reads: the new base after a pull."""
    with tarfile.open(fileobj=output, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as archive:
        for raw, entry in sorted(entries.items()):
            member = tarfile.TarInfo(os.fsdecode(raw))
            member.mode = 0o755 if entry.executable else 0o644
            if entry.link is not None:
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(entry.link)
                archive.addfile(member)
            else:
                member.size = len(entry.content)
                archive.addfile(member, BytesIO(entry.content))


def _faults(old: Mapping[bytes, Entry], new: Mapping[bytes, Entry]) -> Iterator[str]:
    """Say what is wrong with the names and links that the sandbox made or changed. What was pushed is ours."""
    folders = {parent for raw in new for parent in _parents(raw)}
    seen: dict[str, bytes] = {}
    for raw in sorted(new.keys() | folders):
        entry = new.get(raw)
        is_new = raw not in old and not any(name.startswith(raw + b"/") for name in (old if entry is None else ()))
        if is_new or entry != old.get(raw):
            yield from _name_faults(raw)
            if entry is not None:
                yield from _entry_faults(raw, entry)
        if raw in new and raw in folders:
            yield f"a name that is a file or link and a folder: {quoted(raw)}"
        same = unicodedata.normalize("NFC", os.fsdecode(raw)).casefold()
        other = seen.setdefault(same, raw)
        if other != raw and not (raw in old and other in old):
            yield f"names that differ only in case or spelling: {quoted(other)} and {quoted(raw)}"


def _name_faults(raw: bytes) -> Iterator[str]:
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        yield f"a name that is not UTF-8: {quoted(raw)}"
        return
    if printable(name, newlines=False) != name:
        yield f"a name with control characters: {quoted(name)}"
    if len(raw) > MAX_PATH_BYTES or any(len(part) > MAX_NAME_BYTES for part in raw.split(b"/")):
        yield f"a name that is too long: {quoted(name)}"
    for part in name.split("/"):
        plain = _IGNORED.sub("", unicodedata.normalize("NFKC", part)).casefold().rstrip(". ")
        stem = plain.partition(":")[0]
        if plain in {"", "."} or part in {".", ".."}:
            yield f"a name that is no name: {quoted(name)}"
        elif stem in {".git", CONTRACT_NAME} or _SHORT_NAME.fullmatch(stem):
            yield f"a name that means {'.git' if stem != CONTRACT_NAME else CONTRACT_NAME}: {quoted(name)}"


def _entry_faults(raw: bytes, entry: Entry) -> Iterator[str]:
    if len(entry.content) > MAX_FILE_BYTES:
        yield f"a file larger than {MAX_FILE_BYTES >> 20} MiB: {quoted(raw)}"
    if entry.link is None:
        return
    target = os.fsdecode(entry.link)
    landing = os.path.normpath(os.path.join(os.path.dirname(os.fsdecode(raw)), target))  # noqa: PTH118, PTH120 - pure text
    inside = not (target.startswith("/") or landing == ".." or landing.startswith("../"))
    if not inside or not target or "\0" in target:
        yield f"a link that leads out of the folder: {quoted(raw)} to {quoted(entry.link)}"
    elif any(part.casefold() in {".git", CONTRACT_NAME} for part in landing.split("/")):
        yield f"a link into .git or to {CONTRACT_NAME}: {quoted(raw)}"


def _parents(raw: bytes) -> Iterator[bytes]:
    while b"/" in raw:
        raw = raw.rpartition(b"/")[0]
        yield raw


def _here(root: Path, name: str, going: AbstractSet[bytes]) -> Entry | None:
    """Return what the folder holds under a name now, None for nothing, and for a folder of which all is ``going``.

    Raises PullRefused for what is in the way.
    """
    path = root / name
    _no_link_above(root, path)
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            return Entry(link=os.fsencode(path.readlink()))
        if stat.S_ISREG(status.st_mode):
            return Entry(path.read_bytes(), executable=bool(status.st_mode & 0o100))
        if stat.S_ISDIR(status.st_mode) and all(
            os.fsencode(Path(folder, file).relative_to(root)) in going for folder, _, files in os.walk(path) for file in files
        ):
            return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        msg = f"{printable(name, newlines=False)}: cannot be read ({error.strerror}); nothing was taken"
        raise PullRefused(msg) from error
    return Entry(b"a folder or special file is here\0")  # equal to nothing that comes


def _no_link_above(root: Path, path: Path) -> None:
    """Refuse to go through a link of this side, wherever it leads. Raises PullRefused."""
    for parent in path.parents:
        if parent == root:
            return
        if parent.is_symlink():
            msg = f"{printable(str(parent.relative_to(root)), newlines=False)}: is a link on this side; nothing was taken"
            raise PullRefused(msg)


def _runs_by_itself(change: Change) -> str:
    if change.new is None:
        return ""
    for pattern, why in _RUNS_BY_ITSELF:
        if pattern.fullmatch(change.name):
            return why
    if change.new.executable and not (change.old is not None and change.old.executable):
        return "a new program"
    return ""


def _make_folders(root: Path, folder: Path) -> list[Path]:
    """Make what is missing, and return it, the outermost first."""
    missing = [
        parent for parent in (folder, *folder.parents) if parent != root and root in parent.parents and not parent.is_dir()
    ]
    _no_link_above(root, folder / "x")
    for parent in reversed(missing):
        parent.mkdir()
    return missing[::-1]


def _written(fresh: Path, target: Path, change: Change) -> Path | None:
    """Write the new file to ``fresh`` with the mode that it shall have; None if it shall be gone."""
    entry = change.new
    if entry is None:
        return None
    if entry.link is not None:
        fresh.symlink_to(os.fsdecode(entry.link))
        return fresh
    mode = 0o777 if entry.executable else 0o666
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode), "wb") as file:
        file.write(entry.content)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = target.lstat()
            if stat.S_ISREG(status.st_mode):
                kept = stat.S_IMODE(status.st_mode) & 0o777
                os.fchmod(file.fileno(), kept | (kept & 0o444) >> 2 if entry.executable else kept & ~0o111)
    return fresh


def _put_back(moved: list[tuple[Path, Path]], placed: list[Path], folders: list[Path]) -> None:
    for target in placed:
        target.unlink()
    for folder in reversed(folders):
        _remove_folder(folder)
    for kept, target in moved:
        target.parent.mkdir(parents=True, exist_ok=True)
        kept.rename(target)


def _remove_folder(folder: Path) -> bool:
    """Remove a folder if it is empty; return whether it is gone."""
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def _listed(head: str, found: list[str]) -> str:
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{head}: {'; '.join(found[:_SHOWN])}{more}"
