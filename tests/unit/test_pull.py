"""``asp pull``: what an honest sandbox made is taken whole; what a hostile one sends is refused by name and writes nothing."""

import io
import json
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli_verbs import SAME, Place, place  # noqa: F401 - place is a fixture

from asp import archive, pull
from asp.archive import TreeError
from asp.patch import Entry, patch
from asp.terminal import printable
from asp.testing import InProcessSandbox

OLD = {
    b"kept.txt": Entry(b"kept\n"), b"changed.txt": Entry(b"one\r\ntwo\r\n"), b"gone.txt": Entry(b"x"),
    b"bin/tool": Entry(b"#!/bin/sh\n", True),
    b"folder/only": Entry(b"y"), b"was-file": Entry(b"f"), b"was-folder/a": Entry(b"a"), b"link": Entry(link=b"kept.txt"),
}  # fmt: skip
NEW = {
    b"kept.txt": Entry(b"kept\n"), b"changed.txt": Entry(b"one\r\n2\r\n"), b"bin/tool": Entry(b"#!/bin/sh\n"),
    b"new/deep/er": Entry(b"\0\xff", True),
    b"empty": Entry(), b"was-file/a": Entry(b"now a folder"), b"was-folder": Entry(b"now a file"),
    b"link": Entry(link=b"changed.txt"),
    b"moved.txt": Entry(b"x"),
}  # fmt: skip


def lay(root: Path, tree: dict[bytes, Entry]) -> None:
    for raw, entry in tree.items():
        path = root / os.fsdecode(raw)
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.link is not None:
            path.symlink_to(os.fsdecode(entry.link))
        else:
            path.write_bytes(entry.content)
            path.chmod(0o755 if entry.executable else 0o644)


def seen(root: Path) -> dict[bytes, Entry]:
    found: dict[bytes, Entry] = {}
    for folder, _, files in os.walk(root):
        for name in files:
            path = Path(folder, name)
            raw = os.fsencode(path.relative_to(root))
            if path.is_symlink():
                found[raw] = Entry(link=os.fsencode(path.readlink()))
            else:
                found[raw] = Entry(path.read_bytes(), bool(path.stat().st_mode & 0o100))
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    lay(folder, OLD)
    return folder


def test_everything_that_changed_is_taken(root: Path) -> None:
    (root / "mine.txt").write_text("not the sandbox's business")
    pull.apply(pull.plan(root, OLD, NEW))
    assert seen(root) == {**NEW, b"mine.txt": Entry(b"not the sandbox's business")}
    assert not (root / "folder").exists(), "a folder that became empty goes, as in git"
    assert pull.plan(root, OLD, NEW).changes == [], "what is there already is not taken twice"


def test_modes_of_this_side_stay(root: Path) -> None:
    (root / "changed.txt").chmod(0o640)
    (root / "bin/tool").chmod(0o750)
    pull.apply(pull.plan(root, OLD, NEW))
    assert stat.S_IMODE((root / "changed.txt").stat().st_mode) == 0o640
    assert stat.S_IMODE((root / "bin/tool").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    "name", ["changed.txt", "gone.txt", "new/deep/er", "was-file", "was-folder/a", "link", "was-folder/mine"]
)
def test_what_changed_here_is_never_overwritten(root: Path, name: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text("changed here")
    before = seen(root)
    with pytest.raises(pull.LocalChanged, match="changed here since the push") as refused:
        pull.plan(root, OLD, NEW)
    assert name.partition("/")[0] in str(refused.value)
    assert seen(root) == before


@pytest.mark.parametrize("at", range(9))
def test_a_failure_in_the_middle_puts_all_back(root: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    before = seen(root)
    made = pull.plan(root, OLD, NEW)
    real, count = Path.rename, 0

    def rename(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == at + 1:
            raise OSError(28, "No space left on device", str(target))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(pull.PullRefused, match="everything is as it was"):
        pull.apply(made)
    assert seen(root) == before
    assert not [path for path in root.iterdir() if path.name.startswith(".pull-")]


def test_a_link_on_this_side_is_not_followed(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "new").symlink_to(outside)
    with pytest.raises(pull.PullRefused, match="is a link on this side"):
        pull.plan(root, OLD, NEW)
    (root / "new").unlink()
    made = pull.plan(root, OLD, NEW)
    (root / "new").symlink_to(outside)  # changed between the look and the use
    with pytest.raises(pull.PullRefused):
        pull.apply(made)
    assert list(outside.iterdir()) == []


def test_what_runs_by_itself_is_named(root: Path) -> None:
    names = [
        ".envrc", ".vscode/tasks.json", ".github/workflows/x.yml", "conftest.py", "sub/conftest.py", "x.pth",
        "Makefile", "package.json",
        ".husky/pre-commit", ".gitattributes", "tool.sh", "sitecustomize.py", ".pre-commit-config.yaml", "setup.py", "CLAUDE.md",
    ]  # fmt: skip
    new = {**OLD, **{name.encode(): Entry(b"x", executable=name == "tool.sh") for name in names}, b"plain.py": Entry(b"x")}
    warned = [line.partition(":")[0] for line in pull.plan(root, OLD, new).warnings]
    assert sorted(warned) == sorted(names)


def tree(*members: tuple[str, bytes | str | None] | tarfile.TarInfo) -> bytes:
    """An archive: (name, content), (name, None) for a folder, (name, "link target")."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as packed:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                packed.addfile(member)
                continue
            name, content = member
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                packed.addfile(info, io.BytesIO(content))
            else:
                info.type = tarfile.DIRTYPE if content is None else tarfile.SYMTYPE
                info.linkname = content or ""
                packed.addfile(info)
    return made.getvalue()


def odd(name: str, kind: bytes, link: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


def sparse() -> bytes:
    """A header that promises more than there is."""
    return odd("big", tarfile.REGTYPE, size=1 << 40).tobuf(tarfile.GNU_FORMAT)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "absolute": lambda: tree(("/etc/x", b"x")),
    "dot dot": lambda: tree(("../x", b"x")),
    "dot dot inside": lambda: tree(("a/../../x", b"x")),
    "git hooks, capital": lambda: tree((".GIT/hooks/pre-commit", b"x")),
    "git with a dot": lambda: tree((".git./config", b"x")),
    "git with a space": lambda: tree((".git /config", b"x")),
    "git for HFS": lambda: tree((".g\u200cit/config", b"x")),
    "git short name": lambda: tree(("git~1/config", b"x")),
    "git stream": lambda: tree((".git::$INDEX_ALLOCATION/config", b"x")),
    "git full width": lambda: tree((".\uff47it/config", b"x")),
    "git in a folder": lambda: tree(("sub/.Git/config", b"x")),
    "the contract": lambda: tree((".ASP.json", b"x")),
    "the contract below": lambda: tree(("sub/.asp.JSON", b"x")),
    "link absolute": lambda: tree(("l", "/etc/passwd")),
    "link out": lambda: tree(("l", "../../x")),
    "link out from deep": lambda: tree(("a/b/l", "../../../x")),
    "link into git": lambda: tree(("l", ".git/config")),
    "link, then below it": lambda: tree(("l", "."), ("l/x", b"x")),
    "link and file of one name": lambda: tree(("l/x", b"x"), ("l", "elsewhere")),
    "hard link to nothing": lambda: tree(odd("h", tarfile.LNKTYPE, "/etc/passwd")),
    "fifo": lambda: tree(odd("f", tarfile.FIFOTYPE)),
    "character device": lambda: tree(odd("d", tarfile.CHRTYPE)),
    "block device": lambda: tree(odd("d", tarfile.BLKTYPE)),
    "case clash": lambda: tree(("Readme", b"1"), ("README", b"2")),
    "case clash of folders": lambda: tree(("Sub/a", b"1"), ("sub/b", b"2")),
    "normalisation clash": lambda: tree(("\u00e9", b"1"), ("e\u0301", b"2")),
    "control characters": lambda: tree(("a\x1b[8mb", b"x")),
    "newline": lambda: tree(("a\nb", b"x")),
    "bidi": lambda: tree(("a\u202eb", b"x")),
    "not UTF-8": lambda: tree(("a\udcffb", b"x")),
    "long name": lambda: tree(("a" * 300, b"x")),
    "deep": lambda: tree(("/".join(["d"] * 2000), b"x")),
    "promises a terabyte": sparse,
    "garbage": lambda: b"x" * 1024,
    "cut": lambda: tree(("a", b"x" * 5000))[:2000],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tree_is_refused_by_name_and_writes_nothing(root: Path, tmp_path: Path, name: str) -> None:
    before, around = seen(root), sorted(tmp_path.iterdir())
    with pytest.raises(TreeError) as refused:
        with archive.broken():
            entries, strange = archive.read_entries(io.BytesIO(HOSTILE[name]()))
        made = pull.plan(root, OLD, {**OLD, **entries}, strange)
        pull.apply(made)
    text = str(refused.value)
    assert printable(text, newlines=False) == text, "one line, nothing obeyed"
    assert len(text) < 4000
    assert seen(root) == before
    assert sorted(tmp_path.iterdir()) == around


def test_the_corpus_is_as_large_as_promised() -> None:
    assert len(HOSTILE) >= 25


def test_what_was_pushed_with_an_odd_name_is_ours(root: Path) -> None:
    old = {b"Readme": Entry(b"1"), b"README": Entry(b"2"), b"a\nb": Entry(b"3")}
    lay(root, old)
    changed = {**OLD, **old, b"README": Entry(b"22")}
    made = pull.plan(root, {**OLD, **old}, changed)
    assert [change.name for change in made.changes] == ["README"]


def test_the_diff_shows_escapes_and_obeys_none() -> None:
    hostile = b"a\x1b[8mhidden\x1b]52;c;ZXZpbA==\x07\rover\xe2\x80\xae\n"
    shown = printable(patch({}, {b"f": Entry(hostile)}).decode("utf-8", "replace"))
    for obeyed in ("\x1b", "\x07", "\r", "\u202e"):
        assert obeyed not in shown
    assert "+a^[[8mhidden^[]52;c;ZXZpbA==^G^Mover<U+202E>" in shown


def test_the_new_base_reads_back() -> None:
    made = io.BytesIO()
    pull.pack_entries(NEW, made)
    made.seek(0)
    assert archive.read_entries(made) == (NEW, [])


async def test_the_command(place: Place, sandbox: InProcessSandbox) -> None:  # noqa: F811
    (place.folder / "a.txt").write_text("one\n")
    assert (await place.run("push", SAME))[0] == 0
    assert await place.run("pull", SAME, "--apply") == (0, b"", "asp: nothing to take\n")
    assert (await place.run("exec", SAME, "echo two >> a.txt; mkdir -p b; echo x > b/conftest.py; chmod +x a.txt"))[0] == 0
    status, out, err = await place.run("pull", SAME)
    assert (status, b"+two" in out) == (1, True)
    assert "look at this before you take it: b/conftest.py: Python tools run it" in err
    assert "nothing was taken; to take it without a terminal, pass --apply" in err
    assert (place.folder / "a.txt").read_text() == "one\n"
    status, _, err = await place.run("pull", SAME, "--apply")
    assert (status, err.splitlines()[-1]) == (0, "asp: took 2 files")
    assert (place.folder / "a.txt").read_text() == "one\ntwo\n"
    assert os.access(place.folder / "a.txt", os.X_OK)
    assert (await place.run("diff", SAME))[1] == b"", "what was taken is the new base"
    (place.folder / "a.txt").write_text("mine\n")
    assert (await place.run("exec", SAME, "echo three >> a.txt"))[0] == 0
    status, _, err = await place.run("pull", SAME, "--apply")
    assert (status, "changed here since the push" in err) == (1, True)
    assert (place.folder / "a.txt").read_text() == "mine\n"
    contract = json.loads((place.folder / ".asp.json").read_text())
    assert contract == sandbox.document()
