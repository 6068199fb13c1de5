"""What goes wrong between the two sides: each has its own name, and a lost result is never a success."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import asyncssh
import pytest
from conftest import trusted

from asp import errors
from asp.ssh import SSHTransport, open_transport
from asp.testing import InProcessSandbox
from asp.transport import Stream


class Misbehaving(asyncssh.SSHServerSession[bytes]):
    """A session that answers the boot and the guard as a sandbox does, then does what ``end`` says."""

    def __init__(self, end: Callable[["asyncssh.SSHServerChannel[bytes]"], None]) -> None:
        self.end, self.lines, self.buffer = end, 0, b""

    def connection_made(self, chan: "asyncssh.SSHServerChannel[bytes]") -> None:
        self.channel = chan

    def exec_requested(self, command: str) -> bool:
        return True

    def data_received(self, data: bytes, datatype: int | None) -> None:
        self.buffer += data
        while b"\n" in self.buffer:
            line, _, self.buffer = self.buffer.partition(b"\n")
            self.answer(line)

    def eof_received(self) -> bool:
        self.channel.close()
        return False

    def answer(self, line: bytes) -> None:
        words = line.split()
        if line.startswith((b"+ ", b"p ", b"t ")):
            self.channel.write(b" ".join(words[:2]) + b"\n")
        elif b"__h=there" in line:
            self.channel.write(line.split(b"echo ")[1].split()[0] + b" R 1 there\n")
        elif b"unset __b" in line:
            nonce = line.split(b"echo ")[1].split()[0]
            self.channel.write(nonce + b" R\n", asyncssh.EXTENDED_DATA_STDERR)
            self.channel.write(nonce + b" R 2\n")
        elif b"exec $__s" in line:
            self.end(self.channel)


@pytest.fixture
async def misbehave(tmp_path: Path) -> AsyncIterator[Callable[..., "asyncio.Future[SSHTransport]"]]:
    """Start a server that misbehaves; return a transport to it."""
    opened: list[SSHTransport] = []
    acceptors: list[asyncssh.SSHAcceptor] = []

    async def start(end: Callable[["asyncssh.SSHServerChannel[bytes]"], None]) -> SSHTransport:
        host = asyncssh.generate_private_key("ssh-ed25519")

        class Server(asyncssh.SSHServer):
            def begin_auth(self, username: str) -> bool:
                return False

            def session_requested(self) -> Misbehaving:
                return Misbehaving(end)

        acceptor = await asyncssh.listen("127.0.0.1", 0, server_factory=Server, server_host_keys=[host], encoding=None, config=[])
        acceptors.append(acceptor)
        document: dict[str, object] = {
            "version": "0", "transport": "ssh", "workspace": "/",
            "connection": {"host": "127.0.0.1", "port": acceptor.get_port(), "user": "u",
                           "host_key": " ".join(host.export_public_key().decode().split()[:2])},
        }  # fmt: skip
        opened.append(SSHTransport(trusted(document, tmp_path)))
        return opened[-1]

    yield start  # type: ignore[misc]
    for transport in opened:
        await transport.aclose()
    for acceptor in acceptors:
        acceptor.close()
        await acceptor.wait_closed()


async def test_a_missing_status_is_lost_and_never_zero(misbehave: Callable[..., "asyncio.Future[SSHTransport]"]) -> None:
    """P14, E7: the server sends data and closes without a status."""

    def end(channel: "asyncssh.SSHServerChannel[bytes]") -> None:
        channel.write(b"partial\n")
        channel.write_eof()
        channel.close()

    transport = await misbehave(end)
    with pytest.raises(errors.ConnectionLost, match="outcome is unknown") as caught:
        await transport.exec("true")
    assert caught.value.stdout == b"partial\n"
    assert caught.value.exit_code == 4


async def test_a_connection_cut_after_the_status_but_before_the_output_is_lost(
    misbehave: Callable[..., "asyncio.Future[SSHTransport]"],
) -> None:
    """The status alone does not make a result: what the command wrote may be missing."""

    def end(channel: "asyncssh.SSHServerChannel[bytes]") -> None:
        channel._send_request(b"exit-status", asyncssh.packet.UInt32(0))
        channel.get_connection().abort()

    transport = await misbehave(end)
    with pytest.raises(errors.ConnectionLost):
        await transport.exec("true")


async def test_a_signal_with_a_foreign_name_is_a_signal(misbehave: Callable[..., "asyncio.Future[SSHTransport]"]) -> None:
    """RFC 4254 6.10: names outside the list come as NAME@domain."""
    transport = await misbehave(lambda channel: channel.exit_with_signal("USR1@openssh.com"))
    result = await transport.exec("true")
    assert (result.exit_status, result.signal, result.status) == (None, "USR1", 138)


async def test_half_a_gigabyte_does_not_grow_us(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """P12: 500 MB of output, memory growth under 64 MiB, the status right, the tail kept."""
    async with open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True) as transport:
        await transport.exec("head -c 50000000 /dev/zero")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = await transport.exec("head -c 500000000 /dev/zero | tr '\\0' x; echo end; exit 3", merge_streams=True)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (result.status, result.stdout_bytes) == (3, 500_000_004)
    assert result.stdout.endswith(b"xend\n")
    assert len(result.stdout) == 1 << 20
    assert grown < 64 << 10, f"grew by {grown} KiB"


async def test_nobody_listens(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """Unreachable is provably not started, and says where."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    document = sandbox.document()
    document["connection"]["port"] = port
    with pytest.raises(errors.Unreachable, match=f"127.0.0.1:{port}: cannot connect"):
        async with open_transport(trusted(document, tmp_path)):
            pass


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"220 mail ready\r\n"])
async def test_something_else_listens(greeting: bytes, sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """Not SSH, or closed at once."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    document = sandbox.document()
    document["connection"]["port"] = server.sockets[0].getsockname()[1]
    with pytest.raises(errors.NotSSH):
        async with open_transport(trusted(document, tmp_path)):
            pass
    server.close()
    await server.wait_closed()


async def test_a_wrong_pin_is_refused_before_authentication(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """P54: both fingerprints, and the server saw no login."""
    other = asyncssh.generate_private_key("ssh-ed25519")
    for pin in (other, asyncssh.generate_private_key("ecdsa-sha2-nistp256")):
        document = sandbox.document()
        document["connection"]["host_key"] = " ".join(pin.export_public_key().decode().split()[:2])
        with pytest.raises(errors.HostKeyMismatch) as caught:
            async with open_transport(trusted(document, tmp_path)):
                pass
        assert caught.value.exit_code == 2
        assert pin.get_fingerprint() in str(caught.value)
        assert "gone" in str(caught.value)
    assert sandbox.server.logins == []


async def test_a_pin_chooses_the_key_type(tmp_path: Path) -> None:
    """P55: the server has three keys and prefers one; whichever is pinned is asked for. A comment does not matter."""
    keys = [asyncssh.generate_private_key(kind) for kind in ("ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa")]

    class Server(asyncssh.SSHServer):
        def begin_auth(self, username: str) -> bool:
            return False

        def session_requested(self) -> Misbehaving:
            return Misbehaving(lambda channel: channel.exit(5))

    acceptor = await asyncssh.listen("127.0.0.1", 0, server_factory=Server, server_host_keys=keys, encoding=None, config=[])
    for key in keys:
        pin = " ".join(key.export_public_key().decode().split()[:2])
        for text in (pin, f"{pin} root@box"):
            document: dict[str, object] = {
                "version": "0", "transport": "ssh", "workspace": "/",
                "connection": {"host": "127.0.0.1", "port": acceptor.get_port(), "user": "u", "host_key": text},
            }  # fmt: skip
            async with open_transport(trusted(document, tmp_path)) as transport:
                assert (await transport.exec("true")).status == 5
    acceptor.close()
    await acceptor.wait_closed()


async def test_the_wrong_key_is_refused_without_the_user(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """P61: authentication fails in one line that does not hold the user name, which may be a token."""
    document = sandbox.document()
    document["connection"]["user"] = "tok_SECRET123"
    with pytest.raises(errors.AuthenticationFailed) as caught:
        async with open_transport(trusted(document, tmp_path)):
            pass
    assert "SECRET123" not in repr(caught.value) + str(caught.value.__cause__) + repr(caught.value.__context__)
    assert caught.value.exit_code == 2


async def test_only_the_named_key_is_offered(sandbox: InProcessSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P58, P59, C5: no agent, no default keys, no ~/.ssh/config."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text(f"Host *\n  ProxyCommand touch {tmp_path}/proxied\n  HostName 192.0.2.1\n")
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(home / ".ssh" / "id_ed25519"))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "no-agent"))
    async with open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True) as transport:
        assert (await transport.exec("echo ok")).stdout == b"ok\n"
    assert not (tmp_path / "proxied").exists()


async def test_a_server_that_refuses_commands(tmp_path: Path) -> None:
    """P34: exec is not allowed; nothing is called a success."""
    async with InProcessSandbox(tmp_path / "box", allow_exec=False) as box:
        with pytest.raises(errors.ExecNotAllowed):
            async with open_transport(trusted(box.document(), tmp_path), allow_same_host=True):
                pass


@pytest.mark.parametrize("shell", ["/usr/sbin/nologin", "/bin/false", "/does/not/exist"])
async def test_a_login_shell_that_ends(tmp_path: Path, shell: str) -> None:
    """The login shell's own words are in the error."""
    async with InProcessSandbox(tmp_path / "box", shell=shell) as box:
        with pytest.raises(errors.NotStarted, match="login shell"):
            async with open_transport(trusted(box.document(), tmp_path), allow_same_host=True):
                pass


async def test_login_noise_is_not_output(tmp_path: Path) -> None:
    """P30, E2: a login shell that prints on both streams."""
    shell = tmp_path / "noisy"
    shell.write_text('#!/bin/bash\necho WELCOME; echo NOISE >&2\nexec /bin/bash "$@"\n')
    shell.chmod(0o755)
    async with InProcessSandbox(tmp_path / "box", shell=str(shell)) as box, open_transport(
        trusted(box.document(), tmp_path), allow_same_host=True,
    ) as transport:
        result = await transport.exec("echo clean; echo err >&2; exit 4")
        assert (result.stdout, result.stderr, result.status) == (b"clean\n", b"err\n", 4)


async def test_no_sftp_is_one_sentence(tmp_path: Path) -> None:
    """P41: exec still works."""
    async with InProcessSandbox(tmp_path / "box", sftp=False) as box, open_transport(
        trusted(box.document(), tmp_path), allow_same_host=True,
    ) as transport:
        with pytest.raises(errors.ExecNotAllowed, match="SFTP"):
            await transport.read("x")
        assert (await transport.exec("echo ok")).stdout == b"ok\n"


async def test_a_sandbox_that_dies_and_comes_back(tmp_path: Path) -> None:
    """Dead during a call: lost, with the partial output. Dead between calls: not started. Back again: a new connection."""
    box = InProcessSandbox(tmp_path / "box")
    await box.start()
    async with open_transport(trusted(box.document(), tmp_path), allow_same_host=True) as transport:
        arrived = asyncio.Event()

        async def receive(stream: Stream, data: bytes) -> None:
            arrived.set()

        call = asyncio.create_task(transport.exec("echo run >> log; echo partial; sleep 60; echo end", on_output=receive))
        await arrived.wait()
        await box.aclose()
        with pytest.raises(errors.ConnectionLost) as caught:
            await call
        assert caught.value.stdout == b"partial\n"
        with pytest.raises(errors.Unreachable):
            await transport.exec("touch marker")
        assert not (box.workspace / "marker").exists()
        again = InProcessSandbox(tmp_path / "box2", workspace=box.workspace)
        again.server.settings = box.server.settings
        again.port = box.port
        await again.start()
        assert (await transport.exec("cat log")).stdout == b"run\n"  # P48: it ran once
        await again.aclose()


async def test_a_temporary_file_does_not_outlive_a_cut_connection(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """F3: cut while a file is written: the old content is whole, and nothing is left beside it."""
    async with open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True) as transport:
        await transport.write("file", b"old")
        connection = await transport.connect()
        writing = asyncio.create_task(transport.write("file", b"n" * 200_000_000))
        while not any(entry.name.startswith(".") for entry in sandbox.workspace.iterdir()):
            await asyncio.sleep(0)
        connection.ssh.abort()
        with pytest.raises(errors.TransportError):
            await writing
        for _ in range(1000):
            if [entry.name for entry in sandbox.workspace.iterdir()] == ["file"]:
                break
            await asyncio.sleep(0.01)
        assert [entry.name for entry in sandbox.workspace.iterdir()] == ["file"]
        assert await transport.read("file") == b"old"


async def test_it_is_not_this_machine(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """C4: without the word for it, a server on this machine ends everything, and no command of ours has run there."""
    with pytest.raises(errors.SameHost, match="allow-same-host"):
        async with open_transport(trusted(sandbox.document(), tmp_path)):
            pass
    assert list(sandbox.workspace.iterdir()) == []


async def test_nothing_but_a_trusted_contract_opens_a_connection(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """C3: there is one door."""
    from asp.ssh import open_connection

    contract = trusted(sandbox.document(), tmp_path).contract
    with pytest.raises(TypeError):
        await open_connection(contract)  # type: ignore[arg-type]


async def test_without_a_pin_nothing_connects(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """C6: refused, with the line that fixes it."""
    document = sandbox.document()
    del document["connection"]["host_key"]
    with pytest.raises(errors.HostKeyMissing):
        async with open_transport(trusted(document, tmp_path)):
            pass
    assert sandbox.server.logins == []


async def test_an_environment_of_nothing(sandbox: InProcessSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our servers start commands with what they were told and nothing else."""
    monkeypatch.setenv("CANARY", "value")
    async with open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True) as transport:
        result = await transport.exec("env | cut -d= -f1 | sort")
    assert result.stdout.split() == [b"HOME", b"PATH", b"PWD", b"SHLVL", b"_"]
