"""``asp check`` and ``asp trust``: what they print, where, with which status; never a traceback (L7, L8)."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from asp import cli, trust
from asp.contract import CONTRACT_NAME, load, local_user
from asp.state import state_dir
from asp.testing import InProcessSandbox

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ3w2nq0m2mYpPq6yV1s9G1dQbqY3nK6k1p9l1m1d8Qz"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a project folder without a contract, with a state folder of our own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ASP_CONTRACT", raising=False)
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(folder: Path, **connection: object) -> Path:
    path = folder / CONTRACT_NAME
    document = {"version": "0", "transport": "ssh", "connection": {"host": "h", "port": 2222, **connection}}
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, list[str], list[str]]:
    status = cli.main(argv)
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


def spawn(
    *argv: str | bytes, stdout: int | IO[bytes] = subprocess.PIPE, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "asp.cli", *argv]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=env, timeout=30, check=False)


# --- check ---


def test_a_contract_without_a_flaw(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "id").write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    (project / "id").chmod(0o600)
    path = write(project, user="root", identity={"file": "id"}, host_key=KEY)
    trust.remember(load(path))
    assert run(capsys, "check") == (0, [f"{path}: ok: h:2222, workspace /"], [])


def test_warnings(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(project, host="127.0.0.1")
    status, out, err = run(capsys, "check")
    assert (status, err) == (0, [])
    assert out == [
        f"{path}: ok: 127.0.0.1:2222, workspace /",
        f"{path}: connection.user: warning: absent, so the login name is {local_user()}, your local account's",
        f"{path}: connection.identity: warning: absent, so no key is offered; fine if the server asks for none",
        f'{path}: connection.host_key: warning: no key is pinned, so a connection is refused; write "TYPE BASE64"',
        f"{path}: (file): warning: not trusted; type: asp trust {path}",
    ]


def test_an_identity_that_does_not_work_here_is_a_warning(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(project, user="tok_SECRET123", identity={"env": "NOT_SET"}, host_key=KEY)
    status, out, _ = run(capsys, "check")
    assert status == 0
    assert out[1].startswith(f"{path}: connection.identity: warning: not usable on this machine: the variable NOT_SET ")
    assert "SECRET" not in "".join(out)


def test_findings_are_the_answer(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(project, port="22", proxyCommand="touch /tmp/x")
    status, out, err = run(capsys, "check")
    assert (status, err) == (2, [])
    assert [line.split("; ")[0] for line in out] == [
        f"{path}: connection.port: is a text, not a whole number",
        f"{path}: connection.proxyCommand: is not a field of version 0",
    ]


def test_an_unsafe_file_is_a_finding(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(project)
    path.chmod(0o666)
    status, out, _ = run(capsys, "check")
    assert status == 2
    assert out == [f"{path}: its group or others can write it; type: chmod go-w {path}"]


def test_nothing_to_check(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "check")
    assert (status, out) == (2, [])
    assert err == [f"asp: no .asp.json in {project} or above it; make one with: asp-sandbox up local"]


def test_which_file(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """PATH, else ASP_CONTRACT, else the nearest one; a folder given as PATH is walked up."""
    here = write(project)
    other = tmp_path / "other"
    (other / "deep").mkdir(parents=True)
    there = write(other)
    assert run(capsys, "check")[1][0].startswith(f"{here}: ok")
    monkeypatch.setenv("ASP_CONTRACT", str(other))
    assert run(capsys, "check")[1][0].startswith(f"{there}: ok")
    monkeypatch.setenv("ASP_CONTRACT", "/does/not/exist")
    assert run(capsys, "check")[0] == 2
    assert run(capsys, "check", ".")[1][0].startswith(f"{here}: ok")
    assert run(capsys, "check", "../other/deep")[1][0].startswith(f"{there}: ok")
    assert run(capsys, "check", "../other/.asp.json")[1][0].startswith(f"{there}: ok")


@pytest.mark.parametrize("path", ["", "missing", "missing/.asp.json", "a\0b", "\0/b", "x" * 5000, "\udcff\x1b[31m", "/dev/null"])
@pytest.mark.parametrize("command", ["check", "trust"])
def test_bad_paths_are_one_line(command: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, command, path)
    assert status == 2
    (line,) = out + err
    assert "\x1b" not in line


def test_check_needs_no_state_folder(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    write(project, user="u", identity={"env": "X"}, host_key=KEY)
    status, out, _ = run(capsys, "check")
    assert status == 0
    assert "cannot make our state directory" in out[-1]


def test_connect_needs_trust(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    connected: list[trust.TrustedContract] = []

    def connect(trusted: trust.TrustedContract, *, allow_same_host: bool) -> int:
        connected.append(trusted)
        return int(allow_same_host)

    monkeypatch.setattr(cli, "_connect", connect)
    path = write(project)
    for argv in (["check", "--connect"], ["check", "--connect", "."]):
        status, _, err = run(capsys, *argv)
        assert status == 2
        assert err[0].endswith(f"type: asp trust {path}")
    assert not connected

    status, out, _ = run(capsys, "check", "--connect", str(path))
    assert (status, out[-1]) == (0, f"{path}: ok: h:2222 ran a command")
    trust.remember(load(path))
    assert run(capsys, "check", "--connect")[0] == 0
    assert [trusted.how for trusted in connected] == ["named", "remembered"]

    monkeypatch.setattr(cli, "_connect", lambda _, **__: 7)
    status, out, _ = run(capsys, "check", "--connect")
    assert (status, out[-1]) == (1, f"{path}: h:2222: logged in, but `exit 0` ended with status 7")


async def test_connect_runs_a_command(sandbox: InProcessSandbox, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = project / CONTRACT_NAME
    path.write_text(json.dumps(sandbox.document()))
    path.chmod(0o600)
    argv = ["check", "--connect", "--allow-same-host", str(path)]
    status, out, err = await asyncio.to_thread(run, capsys, *argv)
    assert (status, err) == (0, [])
    assert out[-1] == f"{path}: ok: 127.0.0.1:{sandbox.port} ran a command"
    status, _, err = await asyncio.to_thread(run, capsys, "check", "--connect", str(path))
    assert (status, len(err)) == (2, 1)  # C4: it is this machine


def test_connect_to_nobody_is_one_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(project, host="127.0.0.1", port=1, host_key=KEY, user="tok_SECRET123")
    status, out, err = run(capsys, "check", "--connect", str(path))
    assert status == 4
    assert len(err) == 1
    assert err[0].startswith("asp: ")
    assert "SECRET" not in "".join(out + err)


# --- trust ---


def test_trust_shows_and_remembers(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(project, user="tok_SECRET123")
    contract = load(path)
    status, out, err = run(capsys, "trust")
    assert (status, err) == (0, [])
    assert out == [
        *trust.describe(contract).splitlines(),
        f"trusted from now on, until one byte of it changes (SHA-256 {contract.digest})",
    ]
    assert "SECRET" not in "".join(out)
    assert trust.is_remembered(contract)
    assert run(capsys, "trust", str(project))[1][-1] == "trusted already; nothing has changed"


@pytest.mark.parametrize("flaw", ["invalid", "unsafe", "link"])
def test_trust_refuses_what_cannot_be_used(flaw: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(project)
    if flaw == "invalid":
        path.write_text("{}")
    elif flaw == "unsafe":
        path.chmod(0o666)
    else:
        path.rename(project / "real.json")
        path.symlink_to("real.json")
    status, out, err = run(capsys, "trust")
    assert (status, out) == (2, [])
    assert all(line.startswith("asp: ") for line in err)
    assert not (state_dir() / "trust.json").exists()


def test_a_damaged_store_is_one_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(project)
    (state_dir() / "trust.json").write_text("{")
    status, _, err = run(capsys, "trust")
    assert status == 2
    (line,) = err
    assert "is damaged; type: mv " in line


# --- the command itself ---


def test_every_subcommand_has_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    (commands,) = (action for action in cli.build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name in commands.choices:
        assert run(capsys, name, "--help")[0] == 0
    assert {"check", "trust"} <= commands.choices.keys()


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["check", "--nonsense"], ["check", "a", "\x1b]0;x\x07"]])
def test_wrong_usage_is_one_safe_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, [])
    (line,) = err
    assert line.startswith("asp: ")
    assert "\x1b" not in line


def test_an_interrupt_is_130(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    write(project)
    monkeypatch.setattr(cli, "load", interrupted)
    assert run(capsys, "check") == (130, [], [])


def test_help_is_instant_and_loads_no_ssh() -> None:
    fastest = 9.0
    for _ in range(5):
        started = time.monotonic()
        assert spawn("--help").returncode == 0
        fastest = min(fastest, time.monotonic() - started)
    assert fastest < 0.3
    script = (
        "import sys; from asp import cli; cli.main(['--help']);"
        "sys.exit(any(name in sys.modules for name in ('asyncssh', 'jsonschema', 'cryptography')))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


BUFFERING = pytest.mark.parametrize("unbuffered", ["", "1"], ids=["fails at the end", "fails at once"])


@BUFFERING
def test_the_reader_may_leave(unbuffered: str, project: Path) -> None:
    write(project)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        done = spawn("check", stdout=gone, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@BUFFERING
def test_a_full_disk_is_one_line(unbuffered: str, project: Path) -> None:
    write(project)
    with Path("/dev/full").open("wb") as full:
        done = spawn("check", stdout=full, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert done.returncode == 1
    assert done.stderr == b"asp: cannot write the answer (No space left on device)\n"


def test_bytes_that_are_not_utf8_and_a_terminal_that_is_ascii(project: Path) -> None:
    done = spawn("check", b"\xff\xc3\xa9", env={**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"Traceback" not in done.stderr


def test_an_answer_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    folder = tmp_path / "é"
    folder.mkdir()
    write(folder)
    done = spawn("check", str(folder), env={**os.environ, "PYTHONIOENCODING": "ascii:strict"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\xe9/.asp.json: ok" in done.stdout


def test_a_closed_stdout(project: Path) -> None:
    write(project)
    command = 'exec "$0" -m asp.cli check >&-'
    done = subprocess.run(["/bin/sh", "-c", command, sys.executable], stderr=subprocess.PIPE, check=False, timeout=30)
    assert b"Traceback" not in done.stderr
