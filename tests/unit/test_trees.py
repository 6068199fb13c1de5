"""Push and diff: what travels, what stays, and that what comes back is taken for hostile."""

import dataclasses
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from conftest import trusted
from hypothesis import given, settings
from hypothesis import strategies as st

from asp import trees
from asp.archive import TreeError, pack, read_entries
from asp.contract import Contract
from asp.patch import Entry, PatchTooLarge, patch
from asp.ssh import SSHTransport, open_transport
from asp.testing import InProcessSandbox

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed, and it judges our patches")


@pytest.fixture
async def place(tmp_path: Path, sandbox: InProcessSandbox) -> AsyncIterator[tuple[SSHTransport, Contract, Path, Path]]:
    """A transport, its contract, the local folder and the workspace as we see it."""
    repository = tmp_path / "repository"
    repository.mkdir()
    agreed = trusted(sandbox.document(), repository)
    async with open_transport(agreed, allow_same_host=True) as transport:
        yield transport, agreed.contract, repository, sandbox.workspace


def names(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if ".git" not in path.relative_to(folder).parts
    )


async def test_what_travels_and_what_stays(place: tuple[SSHTransport, Contract, Path, Path]) -> None:
    """Files, modes, links and empty folders travel; the contract, history, credentials and caches do not."""
    transport, contract, repository, workspace = place
    (repository / "src").mkdir()
    (repository / "empty").mkdir()
    (repository / "src" / "a b'c\n").write_bytes(b"\xff\0x")
    (repository / "src" / ".asp.json").write_text("{}")
    (repository / "run").write_text("#!/bin/sh\n")
    (repository / "run").chmod(0o4755)
    (repository / "private").write_text("p")
    (repository / "private").chmod(0o600)
    (repository / "link").symlink_to("src/../run")
    os.link(repository / "private", repository / "hard")
    for secret in (".env", ".env.local", ".netrc", "id_ed25519"):
        (repository / secret).write_text("MARKER-SECRET")
    (repository / ".env.example").write_text("A=")
    (repository / ".git").mkdir()
    (repository / ".git" / "config").write_text("MARKER-SECRET")
    (repository / "venv").mkdir()
    (repository / "venv" / "pyvenv.cfg").write_text("home = /x")
    (repository / "__pycache__").mkdir()
    (repository / "__pycache__" / "x.pyc").write_bytes(b"x")
    os.mkfifo(repository / "fifo")
    report = await trees.push(transport, contract, repository)
    assert names(workspace) == [".env.example", "empty", "hard", "link", "private", "run", "src", "src/a b'c\n"]
    assert (workspace / "src" / "a b'c\n").read_bytes() == b"\xff\0x"
    assert oct((workspace / "run").stat().st_mode & 0o7777) == "0o755"
    assert oct((workspace / "private").stat().st_mode & 0o7777) == "0o600"
    assert (workspace / "link").readlink() == Path("src/../run")
    assert report.files == 5
    assert sorted(entry.partition(" ")[0] for entry in report.left_out) == sorted([
        ".asp.json", ".env", ".env.local", ".git", ".netrc", "__pycache__", "fifo", "id_ed25519", "src/.asp.json", "venv",
    ])  # fmt: skip
    found = await transport.exec("grep -rl MARKER-SECRET . ; git log --format=%s%an; git remote; git status --short")
    assert found.stdout == (b"basebase\n" if report.git else b"")
    found = await trees.diff(transport, contract)
    assert (found.patch(), found.odd) == (b"", [])


@pytest.mark.parametrize(
    ("patterns", "stays"),
    [
        (["*.log"], {"a.log", "sub/b.log"}), (["sub/*.log"], {"sub/b.log"}), (["sub/"], {"sub/b.log", "sub/c"}),
        (["./sub"], {"sub/b.log", "sub/c"}), (["none"], set()), (["[ab].log", "c"], {"a.log", "sub/b.log", "sub/c"}),
    ],
)  # fmt: skip
def test_excluded(tmp_path: Path, patterns: list[str], stays: set[str]) -> None:
    root = tmp_path / "tree"
    names = {"a.log", "sub/b.log", "sub/c", "d"}
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    packed = io.BytesIO()
    report = pack(root, packed, exclude=patterns)
    packed.seek(0)
    assert {name.decode() for name in read_entries(packed)[0]} == names - stays
    assert all(line.endswith("(excluded)") for line in report.left_out)
    assert bool(report.left_out) == bool(stays)


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "src/../../outside", "..", "/"])
async def test_links_that_leave_are_refused(place: tuple[SSHTransport, Contract, Path, Path], target: str) -> None:
    """Nothing is sent at all."""
    transport, contract, repository, workspace = place
    (repository / "file").write_text("x")
    (repository / "bad").symlink_to(target)
    with pytest.raises(TreeError, match="bad"):
        await trees.push(transport, contract, repository)
    assert names(workspace) == []
    with pytest.raises(TreeError, match="nothing was pushed"):
        await trees.diff(transport, contract)


async def test_a_workspace_that_is_not_empty(place: tuple[SSHTransport, Contract, Path, Path]) -> None:
    """Refused, and emptied only on demand."""
    transport, contract, repository, workspace = place
    (workspace / "agents-work").write_text("x")
    (repository / "file").write_text("x")
    with pytest.raises(TreeError, match="--replace"):
        await trees.push(transport, contract, repository)
    assert names(workspace) == ["agents-work"]
    await trees.push(transport, contract, repository, replace=True)
    assert names(workspace) == ["file"]


@needs_git
async def test_the_patch_applies(place: tuple[SSHTransport, Contract, Path, Path], tmp_path: Path) -> None:
    """What diff prints, git apply takes: changed, new, deleted, mode, link, no final newline, odd names."""
    transport, contract, repository, workspace = place
    (repository / "changed").write_text("a\nb\nc\n")
    (repository / "crlf").write_bytes(b"a\r\nb\rc\r\n\x0c\n")
    (repository / "deleted").write_text("gone\n")
    (repository / "tail").write_text("no newline")
    (repository / "empty").write_text("")
    (repository / "mode").write_text("x\n")
    (repository / "was-link").symlink_to("mode")
    await trees.push(transport, contract, repository)
    script = (
        "printf 'a\\nB\\nc\\n' > changed; printf 'a\\r\\nX\\rc\\r\\n' > crlf; rm deleted; printf 'no newline!' > tail; "
        "chmod +x mode; rm was-link; echo file > was-link; ln -s changed link; "
        "printf 'h\\n' > \"$(printf 'o\\td\"d\\n\\303\\251')\"; "
        "mkdir -p new/dir; echo n > new/dir/f; echo x > empty; echo evil > .asp.json; mkdir -p sub/.git; echo h > sub/.git/config"
    )
    assert (await transport.exec(script)).status == 0
    found = await trees.diff(transport, contract)
    shown = found.patch()
    assert found.odd == []
    assert b"evil" not in shown
    assert b"sub/.git" not in shown
    copy = tmp_path / "copy"
    shutil.copytree(repository, copy, symlinks=True)
    subprocess.run(["git", "apply", "-"], cwd=copy, input=shown, check=True, capture_output=True)
    for name in names(workspace):
        if name in {".asp.json", "sub"}:
            continue
        here, there = copy / name, workspace / name
        if there.is_file() and not there.is_symlink():
            assert here.read_bytes() == there.read_bytes(), name
            assert (here.stat().st_mode & 0o100) == (there.stat().st_mode & 0o100), name
    assert not (copy / "deleted").exists()
    assert (copy / "link").readlink() == Path("changed")


async def test_credentials_and_our_own_state_stay_here(
    place: tuple[SSHTransport, Contract, Path, Path], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S6: also when somebody pushes a folder that holds the state directory, or a home."""
    transport, contract, repository, workspace = place
    monkeypatch.setenv("XDG_STATE_HOME", str(repository / "deep" / "state"))
    for name in (".ssh/id_ed25519_work", ".aws/credentials", "keys/id_deploy", "keys/id_deploy.pub", "id_card.txt"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("MARKER-SECRET")
    report = await trees.push(transport, contract, repository)
    assert names(workspace) == ["deep", "deep/state", "id_card.txt", "keys", "keys/id_deploy.pub"]
    assert any("our own state" in entry for entry in report.left_out)


async def test_what_is_too_large_is_refused_before_it_is_copied(
    place: tuple[SSHTransport, Contract, Path, Path], monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport, contract, repository, workspace = place
    monkeypatch.setattr("asp.archive.MAX_TREE_BYTES", 1 << 20)
    with (repository / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TreeError, match="more than 1 MiB"):
        await trees.push(transport, contract, repository)
    assert names(workspace) == []


async def test_hard_links_are_one_content(
    place: tuple[SSHTransport, Contract, Path, Path], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A header says size 0 for each of them: they must cost nothing, or the agent chooses how much memory we use."""
    transport, contract, repository, _workspace = place
    (repository / "file").write_text("x")
    await trees.push(transport, contract, repository)
    await transport.exec("head -c 900000 /dev/zero > big; for i in $(seq 300); do ln big l$i; done; ln file same")
    monkeypatch.setattr("asp.archive.MAX_TREE_BYTES", 1 << 20)
    found = await trees.diff(transport, contract)
    assert len(found.new) == 303
    assert len({id(entry.content) for entry in found.new.values() if len(entry.content) > 1}) == 1
    monkeypatch.setattr("asp.patch.LONGEST_PATCH", 10 << 20)
    with pytest.raises(PatchTooLarge):
        found.patch()


async def test_new_caches_are_not_part_of_the_patch(place: tuple[SSHTransport, Contract, Path, Path]) -> None:
    transport, contract, repository, _workspace = place
    (repository / "file").write_text("x")
    await trees.push(transport, contract, repository)
    await transport.exec("mkdir __pycache__; echo x > __pycache__/a.pyc; echo y > new")
    found = await trees.diff(transport, contract)
    assert list(found.new) == [b"file", b"new"]


async def test_a_base_follows_its_sandbox(place: tuple[SSHTransport, Contract, Path, Path]) -> None:
    transport, contract, repository, _workspace = place
    (repository / "file").write_text("x")
    await trees.push(transport, contract, repository)
    moved = dataclasses.replace(contract, port=contract.port + 1)
    trees.move_base(contract, moved)
    with pytest.raises(TreeError, match="nothing was pushed"):
        await trees.diff(transport, contract)
    assert (await trees.diff(transport, moved)).patch() == b""
    trees.forget_base(moved)
    with pytest.raises(TreeError, match="nothing was pushed"):
        await trees.diff(transport, moved)


def test_comparing_takes_time_that_the_sandbox_cannot_choose() -> None:
    """difflib is quadratic: many lines, few different ones. The test's own limit is for hangs."""
    old = b"".join(b"%d\n" % (number % 120) for number in range(100_000))
    new = b"".join(b"%d\n" % (number * 7 % 120) for number in range(150_000))
    shown = patch({b"f": Entry(old)}, {b"f": Entry(new)})
    assert shown.count(b"\n-") == 100_000 + 1


@needs_git
@pytest.mark.parametrize(("old", "new"), [
    (b"a\0b" * 1000, b"c\0d" * 3000),
    (b"", bytes(range(256)) * 300),
    (bytes(range(256)) * 300, b"text\n"),
    (b"x\n" * 400_000, b"x\n" * 200_000 + b"y\n" * 300_000),
    (b"x" * 600_000, b"x" * 600_001),
    (b"same\n" * 5000 + b"a" + b"same\n" * 5000, b"same\n" * 5000 + b"b" + b"same\n" * 5000),
])
def test_large_and_binary_contents_apply(tmp_path: Path, old: bytes, new: bytes) -> None:
    """The patch is what git reads, whatever is in it, and a second file in it is not hurt."""
    before, after = {b"a": Entry(old), b"gone": Entry(old)}, {b"a": Entry(new), b"z": Entry(b"last\n"), b"made": Entry(new)}
    for name, entry in before.items():
        (tmp_path / os.fsdecode(name)).write_bytes(entry.content)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch(before, after), check=True, capture_output=True)
    assert {os.fsencode(path.name): path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == {
        name: entry.content for name, entry in after.items()
    }


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def member(name: str, size: int = 0, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize("hostile", [
    archive((member("/etc/cron.d/x", 1), b"x"), (member("../../x", 1), b"x")),
    archive((member("dev", type=tarfile.CHRTYPE), b""), (member("fifo", type=tarfile.FIFOTYPE), b"")),
    archive((member("hard", type=tarfile.LNKTYPE, linkname="/etc/passwd"), b"")),
    archive((member("hard", type=tarfile.LNKTYPE, linkname="hard"), b"")),
    b"not a tar at all" * 100,
    b"",
    archive((member("cut", 5000), b"x" * 5000))[:1024],
    archive((member("huge", 0), b""))[:124] + b"777777777777" + archive((member("huge", 0), b""))[136:],
])
async def test_a_hostile_archive(place: tuple[SSHTransport, Contract, Path, Path], hostile: bytes, tmp_path: Path) -> None:
    """Whatever the sandbox's tar sends: an error of ours or a patch with a warning, and nothing is written anywhere."""
    transport, contract, repository, workspace = place
    (repository / "file").write_text("x")
    await trees.push(transport, contract, repository)
    (tmp_path / "archive").write_bytes(hostile)
    fake = sandbox_path(workspace) / "tar"
    fake.write_text(f"#!/bin/sh\nexec cat '{tmp_path}/archive'\n")
    fake.chmod(0o755)
    before = names(tmp_path)
    transport_result: bytes | None = None
    try:
        transport_result = (await trees.diff(transport, contract)).patch()
    except TreeError as error:
        assert "\n" not in str(error)
    assert names(tmp_path) == before
    if transport_result is not None:
        assert b"root:" not in transport_result


def sandbox_path(workspace: Path) -> Path:
    """Return a folder that is first in the sandbox's PATH."""
    folder = workspace.parent / "bin"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[InProcessSandbox]:
    box = tmp_path / "box"
    env = {"PATH": f"{box / 'bin'}:{os.environ['PATH']}", "HOME": str(box)}
    async with InProcessSandbox(box, env=env) as running:
        yield running


def test_terminal_bytes_do_not_hide_in_names() -> None:
    shown = patch({}, {b"a\x1b[2Jb": Entry(b"x\n")})
    assert b"\x1b" not in shown


@needs_git
@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_two_contents_make_a_patch_that_git_takes(tmp_path_factory: pytest.TempPathFactory, old: bytes, new: bytes) -> None:
    """Property: applying the patch gives the new bytes, text or not."""
    shown = patch({b"f": Entry(old)}, {b"f": Entry(new)})
    if old == new:
        assert shown == b""
        return
    folder = tmp_path_factory.mktemp("patch")
    (folder / "f").write_bytes(old)
    subprocess.run(["git", "apply", "-"], cwd=folder, input=shown, check=True, capture_output=True)
    assert (folder / "f").read_bytes() == new
