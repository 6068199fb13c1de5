"""Dependencies before the block (S4): made once with a network, there without one, and in nobody's patch."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_parts import call, calls, write_script
from conftest import trusted
from docker_lab import DockerLab, docker

from asp.ssh import open_transport
from asp_sandboxes.docker_setup import digest

pytestmark = [pytest.mark.docker, pytest.mark.timeout(200)]
SETUP = (
    "mkdir -p node_modules/left .venv && echo 'print(\"from the dependency\")' > node_modules/left/x.py && "
    "cp -r vendor/tool .venv/ && id -u > .venv/who"
)


@pytest.fixture
def repository(docker_lab: DockerLab, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "repo"
    (folder / "vendor").mkdir(parents=True)
    (folder / "vendor/tool").write_text("tool\n")
    (folder / "test.sh").write_text("python3 node_modules/left/x.py && cat .venv/tool\n")
    (folder / "package-lock.json").write_text(json.dumps({"made by": str(tmp_path)}))
    (folder / ".env").write_text("SECRET=1")
    yield folder
    docker_lab.run("down", "--all")
    for line in docker("images", "-q", "asp-setup").stdout.split():
        docker("rmi", "-f", line.decode(), check=False)


def up(lab: DockerLab, repository: Path, *more: str) -> tuple[int, str]:
    words = ("up", "docker", "--image", "asp-test-debian", "--setup", SETUP, "--setup-network", "none", *more)
    done = lab.run(*words, cwd=repository)
    return done.returncode, done.stderr


async def test_what_the_set_up_made_is_there_and_in_no_patch(docker_lab: DockerLab, repository: Path, tmp_path: Path) -> None:
    status, said = up(docker_lab, repository)
    assert status == 0, said
    assert "setting up, with a network, once" in said
    asp = shutil.which("asp", path=str(Path(sys.executable).parent))
    assert asp is not None

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [asp, *words], cwd=repository, env=docker_lab.environment, capture_output=True, text=True, check=False
        )

    pushed = run("push")
    assert pushed.returncode == 0, pushed.stderr
    (tmp_path / "c").mkdir()
    async with open_transport(trusted(json.loads((repository / ".asp.json").read_bytes()), tmp_path / "c")) as transport:
        tested = await transport.exec("sh test.sh")
        assert (tested.status, tested.stdout) == (0, b"from the dependency\ntool\n"), tested.stderr
        assert (await transport.exec("cat .venv/who")).stdout == b"0\n", "set-up is root's"
        assert (await transport.exec("touch node_modules/left/y")).status != 0, "and read-only"
        assert (await transport.exec("ls -A")).stdout.split() == [
            b".git",
            b".venv",
            b"node_modules",
            b"package-lock.json",
            b"test.sh",
            b"vendor",
        ]
        assert (await transport.exec("find / -xdev -name .env 2>/dev/null")).stdout == b"", "no secret went into the image"
    assert run("diff").stdout == ""
    assert run("push", "--replace").returncode == 0
    assert run("exec", "sh test.sh").returncode == 0, "--replace leaves the dependencies"
    assert docker_lab.run("down", "--all").returncode == 0
    status, said = up(docker_lab, repository)
    assert (status, "setting up" in said) == (0, False), "the second time there is nothing to do"


def test_other_lock_files_other_image(repository: Path) -> None:
    before = digest("base", "cmd", repository)
    assert before == digest("base", "cmd", repository)
    assert before not in {digest("base", "cmd2", repository), digest("base2", "cmd", repository)}
    (repository / "vendor/tool").write_text("changed")
    assert digest("base", "cmd", repository) == before
    (repository / "package-lock.json").write_text("{}")
    assert digest("base", "cmd", repository) != before


def test_a_set_up_that_fails_says_why_and_leaves_nothing(docker_lab: DockerLab, repository: Path) -> None:
    before = docker("images", "-q", "asp-setup").stdout
    done = docker_lab.run(
        "up", "docker", "--image", "asp-test-debian", "--setup", "echo on the way; echo 'broken\033[8m' >&2; exit 3",
        "--setup-network", "none", cwd=repository,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the set-up ended with status 3" in done.stderr
    assert "broken^[[8m" in done.stderr
    assert docker("images", "-q", "asp-setup").stdout == before
    assert not (repository / ".asp.json").exists()


async def test_a_dockerfile_of_the_repository(docker_lab: DockerLab, repository: Path, tmp_path: Path) -> None:
    (repository / "Dockerfile.agent").write_text("FROM asp-test-debian\nCOPY vendor/tool /opt/tool\nENV BUILT=yes\n")
    done = docker_lab.run("up", "docker", "--dockerfile", "Dockerfile.agent", cwd=repository)
    assert done.returncode == 0, done.stderr
    (tmp_path / "c").mkdir()
    async with open_transport(trusted(json.loads((repository / ".asp.json").read_bytes()), tmp_path / "c")) as transport:
        assert (await transport.exec("cat /opt/tool; echo $BUILT")).stdout == b"tool\nyes\n"


def test_from_clone_to_fixed_test(docker_lab: DockerLab, repository: Path, tmp_path: Path) -> None:
    """The day-one path: dependencies by set-up, an agent (a script) without a network, and its patch taken."""
    (repository / "test.sh").write_text("python3 node_modules/left/x.py | grep fixed\n")
    fix = calls(call("bash", command="sh test.sh"), text="It fails.")
    mend = calls(
        call("write", path="test.sh", content="python3 node_modules/left/x.py | grep dependency\n"),
        call("bash", command="sh test.sh"),
    )
    script = write_script(tmp_path, fix, mend, {"text": "The test passes."})
    agent = shutil.which("asp-agent", path=str(Path(sys.executable).parent))
    done = docker_lab.run(
        "with", "docker", "--image", "asp-test-debian", "--setup", SETUP, "--setup-network", "none", "--apply", "--",
        str(agent), "run", "make the test pass", "--model", f"scripted/{script}", cwd=repository,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The test passes." in done.stdout
    assert "asp: took 1 file" in done.stderr
    assert (repository / "test.sh").read_text() == "python3 node_modules/left/x.py | grep dependency\n"
    assert docker_lab.listed() == []
