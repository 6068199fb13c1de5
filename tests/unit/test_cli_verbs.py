"""The command ``asp`` as a user types it: its own process, a real server, exit codes, pipes, Ctrl-C."""

import asyncio
import json
import os
import pty
import signal
import sys
from pathlib import Path

import asyncssh
import pytest
from conftest import OpenSSH

from asp.testing import InProcessSandbox

ASP = str(Path(sys.executable).with_name("asp"))
AGENT = str(Path(sys.executable).with_name("asp-agent"))


class Place:
    """A repository with a contract that is trusted, and the means to run asp in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def agent(self, *words: str) -> tuple[int, bytes, str]:
        """Run asp-agent; the script that it names is not there, which it must not come to."""
        process = await self.start("run", "x", "--model", "scripted/none.json", *words, program=AGENT)
        out, err = await asyncio.wait_for(process.communicate(), 30)
        assert b"Traceback" not in err
        return process.returncode or 0, out, err.decode()

    async def start(self, *words: str, **fields: object) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            str(fields.get("program", ASP)), *words, cwd=self.folder, stdin=fields.get("stdin", asyncio.subprocess.DEVNULL),  # type: ignore[arg-type]
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]},
        )  # fmt: skip

    async def run(self, *words: str, given: bytes | None = None) -> tuple[int, bytes, str]:
        process = await self.start(*words, **({"stdin": asyncio.subprocess.PIPE} if given is not None else {}))
        out, err = await asyncio.wait_for(process.communicate(given), 30)
        assert b"Traceback" not in err
        return process.returncode or 0, out, err.decode()


def contract(folder: Path, document: object, mode: int = 0o600) -> Path:
    path = folder / ".asp.json"
    path.write_text(json.dumps(document) if not isinstance(document, str) else document)
    path.chmod(mode)
    return path


@pytest.fixture
async def place(tmp_path: Path, sandbox: InProcessSandbox) -> Place:
    folder = tmp_path / "repository"
    folder.mkdir()
    contract(folder, sandbox.document())
    place = Place(folder)
    status, _, err = await place.run("trust")
    assert (status, err) == (0, "")
    return place


SAME = "--allow-same-host"


async def test_exec_has_the_commands_status_and_streams(place: Place) -> None:
    assert await place.run("exec", SAME, "echo out; echo err >&2; exit 3") == (3, b"out\n", "err\n")
    assert await place.run("exec", SAME, "-", given=b"echo $0; exit 4") == (4, b"bash\n", "")
    assert (await place.run("exec", SAME, "kill -9 $$"))[0] == 137
    status, out, err = await place.run("exec", SAME, "--timeout", "0.3", "echo part; sleep 9")
    assert (status, out, err) == (124, b"part\n", "asp: killed after 0.3 s\n")


async def test_exec_json_tells_the_outcomes_apart(place: Place, sandbox: InProcessSandbox) -> None:
    async def outcome(*words: str) -> tuple[str, int]:
        status, out, _err = await place.run("exec", "--json", *words)
        report = json.loads(out)
        assert report["duration_s"] >= 0
        return report["outcome"], status

    assert await outcome(SAME, "exit 5") == ("exited", 5)
    assert await outcome(SAME, "kill -TERM $$") == ("signalled", 143)
    assert await outcome(SAME, "--timeout", "0.2", "sleep 9") == ("timed_out", 124)
    assert await outcome("true") == ("refused", 255)  # this machine
    lost = asyncio.create_task(outcome(SAME, "echo part; touch started; sleep 60"))
    while not (sandbox.workspace / "started").exists():
        await asyncio.sleep(0.01)
    await sandbox.aclose()
    assert await lost == ("lost", 255)
    assert await outcome(SAME, "true") == ("not_started", 255)


async def test_a_reader_that_has_seen_enough(place: Place) -> None:
    """asp exec yes | head -1: no traceback, and the command ends."""
    process = await asyncio.create_subprocess_shell(
        f"{ASP} exec {SAME} 'echo $$ > pid; exec yes' | head -n 1", cwd=place.folder, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert (out, err) == (b"y\n", b"")


@pytest.mark.parametrize(("command", "status", "out"), [
    ("echo hi; exit 7", 7, b"hi\n"),  # nothing closed: the control
    ("exec 2>&-; {asp} exec {same} 'echo e >&2; echo o; exit 7'; exit $?", 7, b"o\n"),
    ("exec >&-; {asp} exec {same} 'echo o; exit 7'; exit $?", 7, b""),
    ("exec <&- >&- 2>&-; {asp} exec {same} 'exit 7'; exit $?", 7, b""),
    ("exec >/dev/full; {asp} exec {same} 'echo o; exit 7'; exit $?", 255, b""),
    ("exec >/dev/full; {asp} check; exit $?", 1, b""),
])
async def test_streams_that_are_closed_or_full(place: Place, command: str, status: int, out: bytes) -> None:
    """Not a traceback, not a status that could be the command's, and no output in whatever got descriptor 1."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command.format(asp=ASP, same=SAME), cwd=place.folder, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )
    shown, err = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, shown) == (status, out), err
    assert b"Traceback" not in err
    if "full" in command:
        assert err.count(b"\n") == 1
        assert b"No space left" in err


async def test_ctrl_c_ends_the_remote_command(place: Place, sandbox: InProcessSandbox) -> None:
    process = await place.start("exec", SAME, "echo $$ > pid; exec sleep 601")
    pid_file = sandbox.workspace / "pid"
    while not pid_file.exists() or not pid_file.read_text().endswith("\n"):
        await asyncio.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _out, err = await asyncio.wait_for(process.communicate(), 15)
    assert process.returncode == 130
    assert b"Traceback" not in err
    await gone(int(pid_file.read_text()))


async def test_kill_9_of_us_ends_the_remote_command(place: Place, sandbox: InProcessSandbox) -> None:
    """P06."""
    process = await place.start("exec", SAME, "echo $$ > pid; sleep 601; echo x")
    pid_file = sandbox.workspace / "pid"
    while not pid_file.exists() or not pid_file.read_text().endswith("\n"):
        await asyncio.sleep(0.01)
    process.kill()
    await process.communicate()
    await gone(int(pid_file.read_text()))


async def gone(pid: int) -> None:
    for _ in range(1500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state in "ZX":
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"process {pid} lives on")


async def test_read_and_write(place: Place) -> None:
    assert await place.run("write", SAME, "a/b", given=b"\0\xff\n") == (0, b"", "")
    assert await place.run("read", SAME, "a/b") == (0, b"\0\xff\n", "")
    assert await place.run("read", SAME, "nope") == (1, b"", "asp: nope: no such file or directory\n")


async def test_on_a_terminal_escapes_are_shown(place: Place) -> None:
    """L8: our stdout is a terminal."""
    master, slave = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        ASP, "exec", SAME, "printf 'a\\033[31mb\\n'", cwd=place.folder, stdin=slave, stdout=slave, stderr=slave,
    )
    os.close(slave)
    await asyncio.wait_for(process.wait(), 20)
    shown = os.read(master, 1000)
    os.close(master)
    assert shown == b"a^[[31mb\r\n"


BASE = {"version": "0", "transport": "ssh", "connection": {"host": "127.0.0.1", "port": 1}, "workspace": "/"}


@pytest.mark.parametrize(("document", "mode", "words"), [
    (None, 0o600, "no .asp.json"),
    ("{", 0o600, "JSON"),
    ({**BASE, "extra": 1}, 0o600, "extra"),
    ({**BASE, "connection": {"host": "127.0.0.1", "proxyCommand": "x"}}, 0o600, "connection.proxyCommand"),
    (BASE, 0o660, "chmod"),
    (BASE, 0o606, "chmod"),
    (BASE, 0o600, "asp trust"),
])
async def test_contracts_that_must_not_be_used(tmp_path: Path, document: object, mode: int, words: str) -> None:
    """Each one line, no connection: port 1 has no listener, and the error is not that."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    if document is not None:
        contract(folder, document, mode)
    place = Place(folder)
    for ended, code in ((place.run("read", "x"), 2), (place.run("exec", "true"), 255), (place.agent(), 2)):
        status, out, err = await ended
        assert (status, out, err.count("\n")) == (code, b"", 1), err
        assert words in err
        assert "connect (" not in err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
async def test_another_owners_contract(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    os.chown(contract(folder, BASE), 12345, 12345)
    status, _out, err = await Place(folder).run("read", "x")
    assert (status, err.count("\n")) == (2, 1)
    assert (await Place(folder).agent())[::2] == (2, err.replace("asp:", "asp-agent:"))


async def test_a_wrong_pin(place: Place, sandbox: InProcessSandbox) -> None:
    """C6: one line with both fingerprints, and no login was tried."""
    other = asyncssh.generate_private_key("ssh-ed25519")
    document = sandbox.document()
    document["connection"]["host_key"] = " ".join(other.export_public_key().decode().split()[:2])
    path = contract(place.folder, document)
    (place.folder / "none.json").write_text('{"turns": [{"text": "x"}]}')
    for ended in (place.run("read", "--contract", str(path), "x"), place.agent("--contract", str(path))):
        status, out, err = await ended
        assert (status, out) == (2, b"")
        assert err.count("\n") == 1
        assert err.count("SHA256:") == 2
    assert sandbox.server.logins == []


@pytest.mark.openssh
async def test_this_machines_own_sshd_with_the_users_own_key(tmp_path: Path, openssh: OpenSSH) -> None:
    """C4: the key works, the login works, and still nothing runs."""
    import getpass

    folder = tmp_path / "elsewhere"
    folder.mkdir()
    path = contract(folder, openssh.document(getpass.getuser(), tmp_path))
    status, out, err = await Place(folder).run("write", "--contract", str(path), "marker", given=b"x")
    assert (status, out, err.count("\n")) == (2, b"", 1), err
    assert "machine you are on" in err
    (folder / "none.json").write_text(
        '{"turns": [{"tool_calls": [{"name": "bash", "arguments": {"command": "touch marker"}}]}, {"text": "x"}]}',
    )
    status, out, err = await Place(folder).agent("--contract", str(path))
    assert (status, out) == (2, b"")
    assert "machine you are on" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "marker").exists()
