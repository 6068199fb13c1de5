"""Nothing is left after `down --all`, whenever the command or the gateway was killed."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import missing
from sandbox_lab import COMMAND, Lab, end

pytestmark = pytest.mark.bwrap

# Runs `asp-sandbox up local` and kills itself before or after the first call of one function.
KILLED_AT = """
import importlib, os, signal, sys
place, when = sys.argv[1:3]
module, name = place.rsplit(".", 1)
module = importlib.import_module(module)
real = getattr(module, name)
def killed(*arguments, **options):
    if when == "after":
        real(*arguments, **options)
    if name != "link" or ".asp.json" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)
setattr(module, name, killed)
from asp_sandboxes.cli import main
sys.exit(main(["up", "local"]))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    done = lab.run("up", "local", cwd=lab.repository())  # so that the runtime is staged
    if done.returncode == 2 and "local sandboxes" in done.stderr:
        missing("bwrap", done.stderr.strip())
    assert done.returncode == 0, done.stderr
    lab.close()
    return lab


def take_all_away(lab: Lab) -> None:
    done = lab.run("down", "--all")
    assert done.returncode == 0, done.stderr
    # A gateway whose `up` was killed before it asked for anything may come up only now; it waits a minute for a question.
    moment = threading.Event()
    for _ in range(12_000):
        if lab.gateway() is None:
            break
        moment.wait(0.01)
    assert lab.gateway() is None
    assert [path.name for path in (lab.state / "sandboxes").iterdir()] == [".lock"]
    assert processes_of(lab) == []


def processes_of(lab: Lab) -> list[str]:
    """Return what runs with this lab's state directory in its environment, or its folder in a mount."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mounted = str(lab.state) in (process / "mountinfo").read_text()
            if mounted or str(lab.state.parent).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "place",
    [
        "asp_sandboxes.records.Record.save",
        "asp_sandboxes.provisioning.write_private",
        "asp_sandboxes.control.ask",
        "os.link",
        "asp_sandboxes.contract_file.write",
        "asp.trust.remember",
        "asp_sandboxes.contract_file.exclude_from_git",
    ],
)
def test_up_that_is_killed_at_a_step(lab: Lab, tmp_path: Path, place: str, when: str) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "mine").write_text("kept\n")
    script = KILLED_AT
    if place.endswith("Record.save"):
        script = script.replace("module = importlib.import_module(module)", "from asp_sandboxes.records import Record as module")
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, place, when], cwd=repository, env=lab.environment, stdin=subprocess.DEVNULL,
        capture_output=True, check=False, timeout=50,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    take_all_away(lab)
    assert os.listdir(repository) == ["mine"]


@pytest.mark.timeout(300)
def test_up_and_the_gateway_are_killed_at_drawn_moments(lab: Lab, tmp_path: Path) -> None:
    seed = int(os.environ.get("ASP_SEED") or random.SystemRandom().randrange(10**8))
    print(f"ASP_SEED={seed}")
    draw = random.Random(seed)
    for number in range(6):
        repository = tmp_path / f"repo-{number}"
        repository.mkdir()
        process = subprocess.Popen(
            [*COMMAND, "up", "local"], cwd=repository, env=lab.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        threading.Event().wait(draw.uniform(0, 1.2))  # the drawn moment, not a wait for anything
        gateway = lab.gateway() if draw.random() < 0.5 else None
        if gateway is not None:
            end(gateway)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    take_all_away(lab)
    assert [list(repository.iterdir()) for repository in tmp_path.glob("repo-*")] == [[]] * 6
