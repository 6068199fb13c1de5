"""What the Docker tests share: an engine, the test images, and sandboxes made by the command."""

import json
import shutil
import subprocess
from pathlib import Path

from conftest import missing
from sandbox_lab import Box, Lab

IMAGES = ("asp-test-debian", "asp-test-busybox", "asp-test-empty", "asp-test-musl")
GVISOR = "runsc-asp"


def docker(*words: str, given: bytes | None = None, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    """Run the docker client."""
    more = {"stdin": subprocess.DEVNULL} if given is None else {"input": given}
    return subprocess.run(["docker", *words], capture_output=True, timeout=120, check=check, **more)  # type: ignore[call-overload]


def runtimes() -> frozenset[str]:
    """Return the runtimes of an engine that has the test images; skip without one."""
    if shutil.which("docker") is None:
        missing("docker", "there is no docker client")
    info = docker("info", "--format", "{{json .Runtimes}}", check=False)
    if info.returncode:
        missing("docker", "no Docker engine answers")
    for image in IMAGES:
        if docker("image", "inspect", image, check=False).returncode:
            missing("docker", f"there is no image {image}; make it with tests/docker/images")
    return frozenset(json.loads(info.stdout))


class DockerLab(Lab):
    """A state directory whose sandboxes are containers."""

    def up(self, repository: Path, *arguments: str) -> "Container":  # type: ignore[override]
        """Start a sandbox that must start."""
        done = self.run("up", "docker", *arguments, cwd=repository)
        assert done.returncode == 0, done.stderr
        return Container(self, repository, done.stderr)


class Container(Box):
    """A running container."""

    def __init__(self, lab: Lab, repository: Path, said: str) -> None:
        super().__init__(lab, repository)
        self.said = said
        self.kind = ""
        self.id: str = json.loads((self.folder / "sandbox.json").read_bytes())["container"]

    @property
    def account(self) -> str:
        """The uid and gid of the agent."""
        return str(json.loads((self.folder / "sandbox.json").read_bytes())["order"]["user"])

    def tool(self, name: str) -> str:
        """Return where a program is: in the image, else in what is mounted."""
        return f"/bin/{name}" if "debian" in self.kind or "busybox" in self.kind or name == "sh" else f"/opt/base/bin/{name}"

    def exec(self, *words: str, user: str = "0", check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run something in it by the engine: the second door."""
        return docker("exec", "-u", user, self.id, *words, check=check)
