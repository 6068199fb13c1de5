"""``asp-sandbox with``: one command in a sandbox of its own, and nothing lost of what it did."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_parts import call, calls, write_script
from conftest import missing
from sandbox_lab import COMMAND, Lab

from asp.errors import UsageError
from asp_sandboxes import bubblewrap
from asp_sandboxes.with_command import parse

AGENT = str(Path(sys.executable).with_name("asp-agent"))
ASP = str(Path(sys.executable).with_name("asp"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def repository(lab: Lab, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    try:
        bubblewrap.find()
    except UsageError as error:
        missing("bwrap", str(error))
    yield folder
    left = lab.listed()
    lab.run("down", "--all")
    assert left == []
    assert not (folder / ".asp.json").exists()


def patches(lab: Lab) -> list[Path]:
    folder = lab.state / "patches"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def with_local(lab: Lab, repository: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    for path in patches(lab):
        path.unlink()
    return lab.run("with", "local", *words, cwd=repository)


def test_a_scripted_agent_and_its_patch(lab: Lab, repository: Path, tmp_path: Path) -> None:
    script = write_script(tmp_path, calls(call("bash", command="echo two >> a.txt; echo new > b.txt")), {"text": "The answer."})
    done = with_local(lab, repository, "--no-apply", "--", AGENT, "run", "add a line", "--model", f"scripted/{script}")
    assert done.returncode == 0, done.stderr
    assert "The answer." in done.stdout.splitlines()
    assert "+two" in done.stderr
    (patch,) = patches(lab)
    assert f"not applied; the patch is kept: {patch}" in done.stderr
    assert patch.stat().st_mode & 0o777 == 0o600
    assert (repository / "a.txt").read_text() == "one\n", "nothing was applied"
    subprocess.run(["git", "apply", str(patch)], cwd=repository, check=True)
    assert (repository / "a.txt").read_text() == "one\ntwo\n"
    assert (repository / "b.txt").read_text() == "new\n"


def test_the_status_is_the_commands(lab: Lab, repository: Path) -> None:
    for words, status in (
        (["sh", "-c", "exit 7"], 7), (["sh", "-c", "kill -9 $$"], 137), (["/nonexistent"], 127), ([ASP, "exec", "exit 5"], 5),
    ):  # fmt: skip
        done = with_local(lab, repository, "--", *words)
        assert done.returncode == status, done.stderr
        assert "nothing was changed" in done.stderr
    assert patches(lab) == []


def test_what_a_failed_command_did_is_kept_too(lab: Lab, repository: Path) -> None:
    done = with_local(lab, repository, "--", ASP, "exec", "echo half > half.txt; exit 3")
    assert done.returncode == 3
    (patch,) = patches(lab)
    assert "+half" in patch.read_text()


def test_a_patch_shows_escapes_and_obeys_none(lab: Lab, repository: Path) -> None:
    done = with_local(lab, repository, "--", ASP, "exec", "printf 'a\\033[8mb\\n' > a.txt")
    assert "^[[8m" in done.stderr
    assert "\x1b" not in done.stderr


def test_up_that_fails_ends_it(lab: Lab, repository: Path) -> None:
    done = with_local(lab, repository, "--name", "Not A Name", "--", "touch", str(repository / "ran"))
    assert done.returncode == 2
    assert "a sandbox's name has" in done.stderr
    assert not (repository / "ran").exists()


def test_changes_that_cannot_be_fetched_are_not_thrown_away(lab: Lab, repository: Path) -> None:
    done = with_local(lab, repository, "--", "sh", "-c", "mv .asp.json moved")
    assert done.returncode != 0
    assert "stays as it is" in done.stderr
    (repository / "moved").rename(repository / ".asp.json")
    (row,) = lab.listed()
    assert lab.run("down", row["name"]).returncode == 0
    assert not (repository / "moved").exists()


def test_keep(lab: Lab, repository: Path) -> None:
    done = with_local(lab, repository, "--keep", "--name", "kept", "--", "true")
    assert (done.returncode, [row["name"] for row in lab.listed()]) == (0, ["kept"])
    assert lab.run("down", "kept").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(lab: Lab, repository: Path, number: signal.Signals) -> None:
    for path in patches(lab):
        path.unlink()
    running = subprocess.Popen(
        [*COMMAND, "with", "local", "--", ASP, "exec", "echo x > a.txt; echo ready; sleep 1000"], cwd=repository,
        env=lab.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert running.stdout is not None
    while running.stdout.readline() != b"ready\n":
        assert running.poll() is None, running.stderr.read() if running.stderr else ""
    if number == signal.SIGINT:
        os.killpg(running.pid, number)  # as the terminal does
    else:
        running.send_signal(number)
    _, err = running.communicate(timeout=50)
    assert running.returncode in {128 + number, 130}
    assert b"Traceback" not in err
    (patch,) = patches(lab)
    assert "+x" in patch.read_text()


@pytest.mark.parametrize("words", [[], ["local"], ["local", "--"], ["local", "--apply", "--no-apply", "--", "x"]])
def test_what_cannot_be_meant(lab: Lab, tmp_path: Path, words: list[str]) -> None:
    done = lab.run("with", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("asp-sandbox: ")
    assert done.stderr.count("\n") == 1


def test_words_are_sorted_to_whom_they_are_for(tmp_path: Path) -> None:
    order = parse(
        [
            "docker",
            "--image",
            "x",
            "--exclude=*.log",
            "--repo",
            str(tmp_path),
            "--keep",
            "--",
            "a",
            "--apply",
            "--",
        ]
    )
    assert order.up == ("docker", "--image", "x", "--repo", str(tmp_path))
    assert order.push == ("--exclude=*.log",)
    assert order.command == ("a", "--apply", "--")
    assert (order.folder, order.apply, order.keep) == (tmp_path, None, True)
    assert json.dumps(order.command)
