"""A person's ways in: ``asp shell`` on a real terminal, and the block for OpenSSH's own client."""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import sys
import termios
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from conftest import OpenSSH, missing

from asp import contract as contracts
from asp.errors import UsageError
from asp.shell import ssh_config
from asp.testing import InProcessSandbox

ASP = str(Path(sys.executable).with_name("asp"))
WAIT_S = 50
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ3w2nq0m2mYpPq6yV1s9G1dQbqY3nK6k1p9l1m1d8Qz"


class Person:
    """Somebody at a terminal with asp in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = bytearray()
        self._more = asyncio.Event()

    async def start(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        self.before = termios.tcgetattr(slave)
        self.process = await asyncio.create_subprocess_exec(
            ASP, *words, cwd=self._folder, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={"TERM": "xterm", **{name: os.environ[name] for name in ("PATH", "HOME", "XDG_STATE_HOME")}},
        )  # fmt: skip
        self.slave = slave  # kept: the settings of the terminal are looked at after the end
        os.set_blocking(self.master, False)
        asyncio.get_running_loop().add_reader(self.master, self._read)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            self._seen += os.read(self.master, 65536)
        self._more.set()

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    async def sees(self, text: str) -> str:
        """Wait for a text, and forget all up to its end."""
        try:
            async with asyncio.timeout(WAIT_S):
                while text.encode() not in self._seen:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            pytest.fail(f"not seen: {text!r}, but: {bytes(self._seen)!r}")
        end = self._seen.index(text.encode()) + len(text.encode())
        before = self._seen[:end].decode("utf-8", "replace")
        del self._seen[:end]
        return before

    async def ended(self) -> int:
        async with asyncio.timeout(WAIT_S):
            return await self.process.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.master)
        os.close(self.master)
        os.close(self.slave)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


def write_contract(folder: Path, document: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / ".asp.json"
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    return path


@pytest.fixture
async def person(tmp_path: Path, sandbox: InProcessSandbox) -> AsyncIterator[Person]:
    path = write_contract(tmp_path / "repository", sandbox.document())
    person = Person(path.parent)
    await person.start("shell", "--contract", str(path), "--allow-same-host")
    yield person
    person.close()
    await person.process.wait()


async def test_a_terminal_in_the_workspace(person: Person, sandbox: InProcessSandbox) -> None:
    person.type("tty; stty size; pwd; printf 'a\\142\\033[1mc\\n'\n")
    shown = await person.sees("ab\x1b[1mc")
    assert "/dev/pts/" in shown
    assert "24 80" in shown
    assert str(sandbox.workspace) in shown
    termios.tcsetwinsize(person.slave, (33, 99))
    person.process.send_signal(signal.SIGWINCH)  # the kernel does so where the terminal is the controlling one
    person.type("until [ \"$(stty size)\" = '33 99' ]; do :; done; echo re''sized\n")
    await person.sees("resized")
    person.type("echo in''put | cat - /dev/tty\n")
    await person.sees("input")
    person.type("\x03")  # Ctrl-C ends cat in the sandbox, not asp
    await person.sees("^C")
    person.type("echo sti''ll; exit 7\n")
    await person.sees("still")
    assert await person.ended() == 7
    assert termios.tcgetattr(person.slave) == person.before, "the terminal is as it was"


async def test_the_person_hangs_up(person: Person) -> None:
    person.type("echo rea''dy\n")
    await person.sees("ready")
    person.process.send_signal(signal.SIGHUP)
    assert await person.ended() == 128 + signal.SIGTERM
    assert termios.tcgetattr(person.slave) == person.before


async def test_tilde_dot_ends_it_from_this_side(person: Person) -> None:
    person.type("sleep 1000 #sle''ep\n")
    await person.sees("sle''ep")
    person.type("\r")
    person.type("~")
    await person.sees("~")  # what is typed is echoed by the terminal in the sandbox: it has arrived
    person.type(".")
    await person.sees("asp: the terminal was closed")
    assert await person.ended() == 4
    assert termios.tcgetattr(person.slave) == person.before


async def test_a_server_that_goes_away(person: Person, sandbox: InProcessSandbox) -> None:
    person.type("echo rea''dy\n")
    await person.sees("ready")
    for connection in list(sandbox.server.connections):
        connection.abort()
    await person.sees("asp: the connection to the sandbox was lost")
    assert await person.ended() == 4
    assert termios.tcgetattr(person.slave) == person.before


async def test_without_a_terminal(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        ASP, "shell", cwd=tmp_path, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert err == b"asp: asp shell needs a terminal; to run a command, type: asp exec CMD\n"


async def ssh(tmp_path: Path, block: str, alias: str, *words: str) -> tuple[int | None, str, str]:
    """Run OpenSSH's client with nothing but the block."""
    if shutil.which("ssh") is None:
        missing("openssh", "openssh-client is not installed")
    file = tmp_path / "block"
    file.write_text(block)
    process = await asyncio.create_subprocess_exec(
        "ssh", "-F", str(file), alias, *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env={"PATH": os.environ["PATH"], "SSH_AUTH_SOCK": "/nonexistent"},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    return process.returncode, out.decode(), err.decode()


async def test_openssh_reaches_the_sandbox_by_the_block(tmp_path: Path, sandbox: InProcessSandbox) -> None:
    loaded = contracts.load(write_contract(tmp_path / "my repo%h", sandbox.document()))
    block = ssh_config(loaded)
    assert block.startswith("Host asp-my-repo-h\n")
    assert await ssh(tmp_path, block, "asp-my-repo-h", "echo out; echo err >&2; exit 3") == (3, "out\n", "err\n")
    code, out, _ = await ssh(tmp_path, ssh_config(loaded, "box"), "box", "-tt", "tty")
    assert code == 0
    assert "/dev/pts/" in out
    wrong = contracts.load(write_contract(tmp_path / "wrong", {**sandbox.document(), "connection": {
        **sandbox.document()["connection"], "host_key": OTHER_KEY,
    }}))  # fmt: skip
    code, out, err = await ssh(tmp_path, ssh_config(wrong), "asp-wrong", "echo never")
    assert (code, out) == (255, "")
    assert "verification failed" in err


async def test_the_block_works_with_stock_sshd(tmp_path: Path, openssh: OpenSSH) -> None:
    user = os.environ.get("USER") or "root"
    loaded = contracts.load(write_contract(tmp_path / "r", openssh.document(user, tmp_path)))
    assert await ssh(tmp_path, ssh_config(loaded, "x"), "x", "echo in") == (0, "in\n", "")


@pytest.mark.parametrize(
    ("change", "name", "complaint"),
    [
        ({"host_key": None}, None, "no host key is pinned"),
        ({"user": "tok_ABCDEF0123456789abcdef0123456789"}, None, "may be a token, so it is not printed"),
        ({"identity": {"env": "KEY"}}, None, "the identity is in a variable"),
        ({"identity": {"file": 'a"b'}}, None, "cannot be written"),
        ({"identity": {"file": "${HOME}/x"}}, None, "cannot be written"),
        ({}, "two words", "cannot be the name"), ({}, "", "cannot be the name"), ({}, "*", "cannot be the name"),
    ],
)  # fmt: skip
async def test_what_a_block_cannot_say(
    tmp_path: Path, sandbox: InProcessSandbox, change: dict[str, object], name: str | None, complaint: str
) -> None:
    connection = {key: value for key, value in {**sandbox.document()["connection"], **change}.items() if value is not None}
    loaded = contracts.load(write_contract(tmp_path / "r", {**sandbox.document(), "connection": connection}))
    with pytest.raises(UsageError) as refused:
        ssh_config(loaded, name)
    assert complaint in str(refused.value)
    assert "tok_" not in str(refused.value)
