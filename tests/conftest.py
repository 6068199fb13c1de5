"""Fixtures for all tests: a home of its own, real SSH servers on loopback, and a check that nothing leaks."""

import asyncio
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from docker_lab import DockerLab

from asp import contract, trust
from asp.testing import InProcessSandbox

# Started by nohup we would ignore it, and with us every command that a test starts in this process.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

PRIVATE = ("ANTHROPIC_", "OPENAI_", "ASP_CONTRACT", "SSH_AUTH_SOCK")


def missing(requirement: str, why: str) -> None:
    """Skip, or fail where CI demands that this kind of test runs: a skip is a failure (restic)."""
    if requirement in os.environ.get("ASP_REQUIRE", "").split(","):
        pytest.fail(f"required here, but {why}")
    pytest.skip(why)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test an empty HOME and state directory, and none of the user's keys."""
    home = tmp_path / "home"
    home.mkdir()
    for name in list(os.environ):
        if name.startswith(PRIVATE):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    return home


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what failed, in the file that ASP_FAILED names, so that .ci/run can run it again by itself."""
    if report.failed and "ASP_FAILED" in os.environ:
        with open(os.environ["ASP_FAILED"], "a", encoding="utf-8") as noted:
            noted.write(f"{report.nodeid}\n")


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """After each test: what signals do. A command that is run in this process ignores them at its end."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def spill_in_a_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what tools leave outside the workspace out of the machine's /tmp, which the local twin has as its own."""
    monkeypatch.setattr("asp_agent.tools.spill.FOLDER", str(tmp_path_factory.getbasetemp()))


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue
    return found


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: no thread, no descriptor, no child process that was not there before (mitogen's check)."""
    if request.node.get_closest_marker("leaky"):
        yield
        return
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    before = set(threads)
    for _ in range(3000):  # a thread that is closing, or a server in a thread of its own (llmock), may still be at it
        new_threads = [t for t in threading.enumerate() if t not in before and not t.daemon and "asyncio" not in t.name]
        if not new_threads:
            break
        threading.Event().wait(0.01)
    else:
        pytest.fail(f"leaked threads: {new_threads}")
    for _ in range(1000):
        leaked = {entry for entry in _descriptors() - descriptors if "pipe:" in entry or "socket:" in entry or "pidfd" in entry}
        if not leaked:
            break
        threading.Event().wait(0.01)
    else:
        pytest.fail(f"leaked descriptors: {sorted(leaked)}")


@pytest.fixture(autouse=True)
async def no_leaked_tasks() -> AsyncIterator[None]:
    """After each test: no task of ours still runs."""
    yield
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not task.done()]
    assert not left, f"leaked tasks: {left}"


def trusted(document: dict[str, object], folder: Path) -> trust.TrustedContract:
    """Write a contract and trust it, as a person who names the file does."""
    path = folder / ".asp.json"
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    return trust.require(contract.load(path), named=True)


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[InProcessSandbox]:
    """A real SSH server in this process."""
    async with InProcessSandbox(tmp_path / "box") as running:
        yield running


@dataclass
class OpenSSH:
    """A stock sshd on loopback, and the keys for it."""

    port: int
    host_key: str
    identity: Path
    process: subprocess.Popen[bytes]
    log: Path

    def document(self, user: str, workspace: Path) -> dict[str, object]:
        """Return the contract for one login."""
        return {
            "version": "0", "transport": "ssh", "workspace": str(workspace),
            "connection": {"host": "127.0.0.1", "port": self.port, "user": user,
                           "identity": {"file": str(self.identity)}, "host_key": self.host_key},
        }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


SSHD = "/usr/sbin/sshd"
SECOND_USER = "asp-test-login"


@pytest.fixture(scope="session")
def second_user() -> Iterator[str]:
    """An ordinary login beside root's; made for the tests and removed after them."""
    if os.getuid() != 0:
        missing("root", "a second login needs root")
    made = False
    try:
        pwd.getpwnam(SECOND_USER)
    except KeyError:
        subprocess.run(["useradd", "-m", "-s", "/bin/bash", "-p", "*", SECOND_USER], check=True, capture_output=True)
        made = True
    yield SECOND_USER
    if made:
        subprocess.run(["userdel", "-r", SECOND_USER], check=False, capture_output=True)


@pytest.fixture(scope="session")
def openssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenSSH]:
    """Start the system's own sshd as it comes, but for port, keys and log."""
    if not Path(SSHD).exists():
        missing("openssh", "openssh-server is not installed")
    folder = tmp_path_factory.mktemp("sshd")
    folder.chmod(0o755)
    for name in ("host", "identity"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    root = os.getuid() == 0
    if root:
        Path("/run/sshd").mkdir(exist_ok=True)
    authorized = folder / "authorized_keys"
    shutil.copy(folder / "identity.pub", authorized)
    authorized.chmod(0o644)
    port = _free_port()
    config = folder / "sshd_config"
    config.write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host\nAuthorizedKeysFile {authorized}\nStrictModes no\n"
        f"PidFile none\nPermitRootLogin prohibit-password\nUsePAM {'yes' if root else 'no'}\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nAcceptEnv LANG LC_*\nPrintMotd no\nSubsystem sftp /usr/lib/openssh/sftp-server\n",
    )
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env={"PATH": os.environ.get("PATH", os.defpath)}, start_new_session=True,
        )
    for _ in range(500):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        if process.poll() is not None:
            pytest.fail(f"sshd ended: {log.read_text()[-500:]}")
        threading.Event().wait(0.01)
    words = (folder / "host.pub").read_text().split()
    yield OpenSSH(port, " ".join(words[:2]), folder / "identity", process, log)
    process.terminate()
    process.wait(10)


@pytest.fixture(scope="module")
def docker_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator["DockerLab"]:
    """Sandboxes in containers, for the tests of a module; nothing of them is left."""
    from docker_lab import DockerLab, runtimes

    runtimes()
    lab = DockerLab(tmp_path_factory.mktemp("docker-lab"))
    try:
        yield lab
    finally:
        lab.close()
