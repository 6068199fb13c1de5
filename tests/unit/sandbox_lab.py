"""Real local sandboxes for tests: made by the command, in a state directory of their own, reached with asyncssh."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

COMMAND = [sys.executable, "-P", "-c", "import sys; from asp_sandboxes.cli import main; sys.exit(main())"]
WAIT_S = 20.0


@dataclass
class Lab:
    """One state directory, the repositories beside it, and what the command makes of them."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        """Build the command's environment; the secret is there to be looked for inside."""
        home = self.folder / "home-of-the-lab"
        home.mkdir()
        self.environment = {
            "PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "XDG_STATE_HOME": str(self.state.parent),
            "LAB_SECRET": "lab-secret-value",
        }  # fmt: skip

    @property
    def state(self) -> Path:
        """Our own folder in it."""
        return self.folder / "state-of-the-lab" / "asp"

    def repository(self, name: str = "repo") -> Path:
        """Make an empty folder."""
        path = self.folder / name
        path.mkdir()
        return path

    def run(self, *arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``asp-sandbox`` to its end."""
        return subprocess.run(
            [*COMMAND, *arguments], cwd=cwd or self.folder, env={**self.environment, **variables}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=50, check=False,
        )  # fmt: skip

    def up(self, repository: Path, *arguments: str) -> "Box":
        """Start a sandbox that must start."""
        done = self.run("up", "local", *arguments, cwd=repository)
        assert done.returncode == 0, done.stderr
        return Box(self, repository)

    def listed(self) -> list[dict[str, Any]]:
        """Return what ``list --json`` says."""
        done = self.run("list", "--json")
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    def gateway(self) -> int | None:
        """Return the pid of this lab's gateway."""
        mark = f"XDG_STATE_HOME={self.state.parent}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                mine = mark in (process / "environ").read_bytes().split(b"\0")
                if mine and b"asp_sandboxes.gateway" in (process / "cmdline").read_bytes().split(b"\0"):
                    return int(process.name)
            except OSError:
                continue
        return None

    def close(self) -> None:
        """Take all sandboxes away, and the gateway with them."""
        gateway = self.gateway()
        with_pidfd = None if gateway is None else os.pidfd_open(gateway)
        done = self.run("down", "--all")
        assert done.returncode == 0, done.stderr
        if with_pidfd is not None:
            wait_for_end(with_pidfd)


@dataclass
class Box:
    """One running sandbox."""

    lab: Lab
    repository: Path

    def __post_init__(self) -> None:
        """Read the contract."""
        self.contract = json.loads((self.repository / ".asp.json").read_bytes())
        self.port: int = self.contract["connection"]["port"]
        self.key = Path(self.contract["connection"]["identity"]["file"])
        self.folder = self.key.parent
        self.name = self.folder.name

    @property
    def python(self) -> str:
        """The interpreter that is in every sandbox: the server's own."""
        runtime = json.loads((self.folder / "sandbox.json").read_bytes())["runtime"]
        return str(json.loads((self.lab.state / "runtime" / runtime / "runtime.json").read_bytes())["python"])

    def connect(self) -> Any:
        """Connect with the pinned key: ``async with box.connect() as connection``."""
        connection = self.contract["connection"]
        pinned = asyncssh.import_known_hosts(f"[127.0.0.1]:{self.port} {connection['host_key']}\n")
        return asyncssh.connect(
            "127.0.0.1", self.port, username=connection["user"], client_keys=[str(self.key)], known_hosts=pinned,
            config=None, agent_path=None, encoding=None, connect_timeout=WAIT_S,
        )  # fmt: skip

    async def sh(self, script: str, stdin: bytes = b"") -> tuple[int | None, str]:
        """Run one script; return its status and all that it wrote."""
        async with self.connect() as connection:
            done = await connection.run(script, input=stdin, stderr=asyncssh.STDOUT)
            return done.exit_status, (done.stdout or b"").decode("utf-8", "replace")

    async def run_python(self, script: str) -> str:
        """Run Python in the sandbox; it must end well."""
        status, output = await self.sh(f"{self.python} -I -S -", script.encode())
        assert status == 0, output
        return output

    def processes(self) -> list[int]:
        """Return the pids, as seen from here, of what runs inside: the descendants of bubblewrap's own child."""
        return [pid for bwrap in children(self.lab.gateway()) for pid in descendants(bwrap)]


def children(pid: int | None) -> list[int]:
    """Return the children of a process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if pid is not None and int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


def descendants(pid: int) -> Iterator[int]:
    """Return the processes below one."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def wait_for_end(pidfd: int) -> None:
    """Wait until a process has ended. Closes the descriptor."""
    readable, _, _ = select.select([pidfd], [], [], WAIT_S)
    os.close(pidfd)
    assert readable, "it still runs"


def end(pid: int) -> None:
    """Kill a process that the lab started, and wait for it."""
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    wait_for_end(pidfd)
