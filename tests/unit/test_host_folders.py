"""`asp-sandbox up local --ro DIR`: what is shown, what is refused."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import missing
from sandbox_lab import Box, Lab, end

from asp.errors import UsageError
from asp_sandboxes import host_folders


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home" / "state"))
    for name in ("home/toolchain/bin", "home/src/repo", "home/state/asp"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "home/state").chmod(0o700)
    return tmp_path / "home"


def refused(place: Path, folder: Path | str) -> str:
    with pytest.raises(UsageError) as raised:
        host_folders.checked([Path(folder)], place / "src" / "repo", [place])
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_folders_are_shown_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    asked = [Path("toolchain"), place / "toolchain", place / "toolchain" / "bin" / ".."]
    assert host_folders.checked(asked, place / "src" / "repo", [place]) == [str(place / "toolchain")]


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/", "keys of sandboxes"),
        (".", "keys of sandboxes"),
        ("state/asp/sandboxes", "no such folder"),
        ("state/asp", "keys of sandboxes"),
        ("src", "holds the repository"),
        ("src/repo", "holds the repository"),
        ("nothing", "no such folder"),
        ("/etc", "no sandbox sees"),
        ("/proc/self", "no sandbox sees"),
        ("/usr/share", "seen in the sandbox already"),
        ("/tmp", "would cover"),
    ],
)
def test_places_that_are_refused(place: Path, folder: str, expected: str) -> None:
    if folder == "/proc/self":
        folder = f"/proc/{os.getpid()}"
    if folder == "/tmp" and (place.is_relative_to("/tmp") or Path("/tmp").is_symlink()):
        expected = "--ro /tmp: "
    assert expected in refused(place, place / folder)


def test_a_home_folder_is_refused(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UsageError, match="holds a home folder"):
        host_folders.checked([other], place / "src", [place, other])


def test_a_link_is_named_by_what_it_leads_to(place: Path) -> None:
    (place / "link").symlink_to("toolchain")
    assert str(place / "toolchain") in refused(place, place / "link")


def key_pair(folder: Path) -> None:
    (folder / "id_work").touch()
    (folder / "id_work.pub").touch()


def listener(folder: Path) -> None:
    descriptor = os.open(folder, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{descriptor}/s")
    os.close(descriptor)


def ssh_folder(folder: Path) -> None:
    (folder / ".ssh").mkdir()


def token(folder: Path) -> None:
    (folder / "credentials.toml").touch()


def what_packages_bring(folder: Path) -> None:
    (folder / ".env").touch()
    (folder / "\x1b[8m.netrc").symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (key_pair, "credentials (bin/id_work"),
        (listener, "socket (bin/s)"),
        (ssh_folder, "folder of credentials (bin/.ssh)"),
        (token, "credentials (bin/credentials.toml)"),
        (what_packages_bring, None),
    ],
)
def test_content_that_is_refused(place: Path, make: Callable[[Path], None], expected: str | None) -> None:
    make(place / "toolchain" / "bin")
    if expected is None:
        assert host_folders.checked([place / "toolchain"], place / "src", [place])
    else:
        assert expected in refused(place, place / "toolchain")


def test_more_than_can_be_looked_through(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_folders, "MAX_ENTRIES", 3)
    for number in range(5):
        (place / "toolchain" / f"{number}").touch()
    assert "more than 3 files" in refused(place, place / "toolchain")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


@pytest.mark.bwrap
async def test_a_sandbox_sees_it_read_only_and_again_when_it_is_started_again(lab: Lab, tmp_path: Path) -> None:
    repository = lab.repository()
    tools = tmp_path / "closed" / "tool chain"
    tools.mkdir(parents=True)
    (tools.parent / "secret").write_text("not for the sandbox\n")
    tool = tools / "tool"
    tool.write_text("#!/bin/sh\necho it works\n")
    for path in (tools, tool):
        path.chmod(0o755)
    if os.getuid() == 0:
        tools.parent.chmod(0o700)  # as a home folder is: the sandbox's own uid does not get through it
    done = lab.run("up", "local", "--ro", str(tools), cwd=repository)
    if done.returncode == 2 and "local sandboxes" in done.stderr:
        missing("bwrap", done.stderr.strip())
    assert done.returncode == 0, done.stderr
    box = Box(lab, repository)
    script = f"'{tool}'; touch '{tools}/x' 2>/dev/null || echo read-only; ls '{tools.parent}'"
    assert await box.sh(script) == (0, "it works\nread-only\ntool chain\n")
    gateway = lab.gateway()
    assert gateway is not None
    end(gateway)
    done = lab.run("start", box.name)
    assert done.returncode == 0, done.stderr
    assert (await Box(lab, repository).sh(f"'{tool}'")) == (0, "it works\n")
    done = lab.run("up", "docker", "--image", "x", "--ro", str(tools), cwd=repository)
    assert (done.returncode, "--ro is for local" in done.stderr) == (2, True)
