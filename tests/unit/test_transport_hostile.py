"""The other side is hostile, or the wire is cut at the worst place: nothing runs that was not asked for, nothing is lost
silently, and the connection stays usable. Each of these was a bug once."""

import asyncio
import contextlib
import getpass
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import asyncssh
import pytest
from conftest import OpenSSH, trusted
from test_transport_corpus import is_gone

from asp import errors
from asp.ssh import SSHTransport, open_transport
from asp.testing import InProcessSandbox
from asp.transport import Stream


@contextlib.asynccontextmanager
async def cutting_proxy(port: int, cut_after: Callable[[], int | None]) -> AsyncIterator[int]:
    """Pass bytes on; when the client has sent ``cut_after()`` bytes since it was first asked, cut both sides."""
    tasks: set[asyncio.Task[None]] = set()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)

        async def up() -> None:
            room: int | None = None
            while data := await reader.read(65536):
                room = cut_after() if room is None else room
                if room is not None:
                    if len(data) >= room:
                        there_writer.write(data[:room])
                        await there_writer.drain()
                        there_writer.close()
                        writer.close()
                        return
                    room -= len(data)
                there_writer.write(data)
                await there_writer.drain()

        async def down() -> None:
            with contextlib.suppress(ConnectionError):
                while data := await there_reader.read(65536):
                    writer.write(data)
                    await writer.drain()

        with contextlib.suppress(ConnectionError):
            await asyncio.gather(up(), down())
        for end in (writer, there_writer):
            end.close()
            with contextlib.suppress(ConnectionError, OSError):
                await end.wait_closed()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await join(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


@pytest.mark.parametrize("size", [20_000, 110_000, 400_000])
@pytest.mark.parametrize("share", [0.3, 0.85, 0.95])
async def test_a_script_that_is_cut_off_does_not_run(
    sandbox: InProcessSandbox, tmp_path: Path, size: int, share: float,
) -> None:
    """What is left of a long script is another script: `rm -rf ./build/x` may have become `rm -rf ./b`."""
    cut: int | None = None
    async with cutting_proxy(sandbox.port, lambda: cut) as port:
        document = sandbox.document()
        document["connection"]["port"] = port
        async with open_transport(trusted(document, tmp_path), allow_same_host=True) as transport:
            await transport.exec("true")
            # Boot line and registration are under 2 KB; the cut falls into the script.
            script = b"touch RAN\n" + b"touch RAN #" + b"x" * 60 + b"\n"
            script += (b": " + b"y" * 77 + b"\n") * (size // 80)
            cut = 1_200 + int(len(script) * share)
            with pytest.raises(errors.ConnectionLost):
                await transport.exec(script)
    for command in list(sandbox.server.commands):
        await asyncio.wait_for(asyncio.shield(command.finished), 10)
    assert not (sandbox.workspace / "RAN").exists()


async def test_without_head_a_long_script_is_refused_and_not_empty(tmp_path: Path) -> None:
    """`__b=$(head ...)` gives nothing, and `bash -c ""` ends with 0: that must not be the answer."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "cat"):
        (tools / name).symlink_to(f"/bin/{name}")
    async with InProcessSandbox(tmp_path / "box", env={"PATH": str(tools), "HOME": "/"}) as box, open_transport(
        trusted(box.document(), tmp_path), allow_same_host=True,
    ) as transport:
        with pytest.raises(errors.LoginShellFailed, match="could not read the script"):
            await transport.exec(b"# " + b"x" * 6000 + b"\nexit 7")
        assert (await transport.exec("exit 7")).status == 7
        assert (await transport.exec(b"# " + b"x" * 300_000 + b"\nexit 8")).status == 8  # bash reads that one itself


async def test_a_script_may_end_with_255_and_print_what_it_likes(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    async with open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True) as transport:
        result = await transport.exec(b"# " + b"x" * 6000 + b"\necho 0123456789abcdef0123456789abcdef; exit 255")
        assert (result.status, result.stdout) == (255, b"0123456789abcdef0123456789abcdef\n")


async def test_a_receivers_own_not_started_runs_nothing_twice(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """The transport tries again when nothing ran; what a caller's receiver raises says nothing about that."""
    async with open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True) as transport:

        async def receive(stream: Stream, data: bytes) -> None:
            raise errors.NotStarted("of another transport")

        with pytest.raises(errors.NotStarted, match="another"):
            await transport.exec("echo run >> log; echo x; sleep 1", on_output=receive)
        assert (await transport.exec("cat log")).stdout == b"run\n"


@pytest.mark.openssh
async def test_cancelled_calls_give_their_sessions_back(openssh: OpenSSH, tmp_path: Path) -> None:
    """sshd has ten sessions a connection; asyncssh leaves a channel open when its opening is cancelled."""
    agreed = trusted(openssh.document(getpass.getuser(), tmp_path), tmp_path)
    async with open_transport(agreed, allow_same_host=True) as transport:
        connection = await transport.connect()
        for steps in range(60):
            for verb in (transport.exec("sleep 5"), transport.read("/etc/hostname")):
                call = asyncio.create_task(verb)
                for _ in range(steps):
                    await asyncio.sleep(0)
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError, errors.RemotePathError):
                    await call
        assert (await transport.exec("echo ok")).stdout == b"ok\n"
        assert await transport.connect() is connection
        assert (await transport.read("/proc/version")).startswith(b"Linux")


@pytest.mark.openssh
async def test_cancelled_stubborn_commands_are_paid_for_until_they_end(openssh: OpenSSH, tmp_path: Path) -> None:
    """They hold sessions of the server for the 2 s of grace: new ones wait instead of being refused."""
    agreed = trusted(openssh.document(getpass.getuser(), tmp_path), tmp_path)
    async with open_transport(agreed, allow_same_host=True) as transport:
        began = [asyncio.Event() for _ in range(6)]

        async def stubborn(event: asyncio.Event) -> None:
            async def receive(stream: Stream, data: bytes) -> None:
                event.set()

            await transport.exec("trap '' TERM; echo on; while :; do sleep .1; done", on_output=receive)

        calls = [asyncio.create_task(stubborn(event)) for event in began]
        await asyncio.gather(*(event.wait() for event in began))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        results = await asyncio.gather(*(transport.exec(f"exit {number}") for number in range(8)))
        assert [result.status for result in results] == list(range(8))


@pytest.mark.openssh
async def test_a_killed_sftp_server_is_replaced(openssh: OpenSSH, tmp_path: Path) -> None:
    """The connection lives on: the call that was under way is lost, the next one works, and no temporary file stays."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    agreed = trusted(openssh.document(getpass.getuser(), workspace), tmp_path)
    async with open_transport(agreed, allow_same_host=True) as transport:
        await transport.write("file", b"old")
        writing = asyncio.create_task(transport.write("file", b"n" * 100_000_000))
        while not any(entry.name.startswith(".") for entry in workspace.iterdir()):
            await asyncio.sleep(0)
        connection = await transport.connect()
        sshd = Path(f"/proc/{connection.guard.pid}/stat").read_text().rpartition(")")[2].split()[1]
        (server,) = [
            path.parent for path in Path("/proc").glob("[0-9]*/comm")
            if path.read_text() == "sftp-server\n" and Path(path.parent, "stat").read_text().rpartition(")")[2].split()[1] == sshd
        ]  # fmt: skip
        os.kill(int(server.name), signal.SIGKILL)
        with pytest.raises(errors.ConnectionLost):
            await writing
        assert await transport.read("file") == b"old"
        await transport.write("file", b"new")
        assert await transport.read("file") == b"new"
    for _ in range(500):
        if [entry.name for entry in workspace.iterdir()] == ["file"]:
            break
        await asyncio.sleep(0.01)
    assert [entry.name for entry in workspace.iterdir()] == ["file"]


async def test_a_copy_in_place_is_whole_whoever_stops_it(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """A file with two names cannot be replaced by a rename. A slow cat in the sandbox, and we are cut in the middle."""
    started = tmp_path / "started"
    async with open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True) as transport:
        await transport.exec("printf old > one; ln one two; mkdir bin; cat > bin/cat; chmod +x bin/cat", stdin=(
            f'#!/bin/sh\nexec <"$2"; /bin/head -c 1; touch {started}; sleep 3; /bin/tail -c +2 "$2"\n'.encode()
        ))  # fmt: skip
        sandbox.server.settings.env["PATH"] = f"{sandbox.workspace}/bin:{os.environ['PATH']}"  # type: ignore[index]
        writing = asyncio.create_task(transport.write("one", b"new content"))
        while not started.exists():
            assert not writing.done()
            await asyncio.sleep(0.01)
        (await transport.connect()).ssh.abort()
        with pytest.raises(errors.ConnectionLost):
            await writing
    for _ in range(1500):
        if not any(entry.name.startswith(".") for entry in sandbox.workspace.iterdir()):
            break
        await asyncio.sleep(0.01)
    started.unlink()
    # The old or the new content, never a part; both names show it; nothing is left beside them.
    assert (sandbox.workspace / "one").read_bytes() in {b"old", b"new content"}
    assert (sandbox.workspace / "one").samefile(sandbox.workspace / "two")
    assert sorted(entry.name for entry in sandbox.workspace.iterdir()) == ["bin", "one", "two"]


async def test_guards_that_are_killed_in_a_loop_end_the_connection(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """Not a storm of new ones; the next call has a new connection."""
    async with open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True) as transport:
        connection = await transport.connect()
        killed = set()
        while not connection.closed:
            guard = connection.guard
            if guard.pid not in killed and not guard.dead.done():
                killed.add(guard.pid)
                os.kill(guard.pid, signal.SIGKILL)
            await asyncio.sleep(0.005)
        assert len(killed) < 10
        assert (await transport.exec("echo ok")).stdout == b"ok\n"


async def test_closing_while_a_call_waits_for_a_new_guard_is_no_cancel(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    transport = SSHTransport(trusted(sandbox.document(), tmp_path), allow_same_host=True)
    connection = await transport.connect()
    os.kill(connection.guard.pid, signal.SIGKILL)
    await connection.guard.dead
    call = asyncio.create_task(transport.exec("echo x"))
    await asyncio.sleep(0)
    await transport.aclose()
    with contextlib.suppress(errors.NotStarted, errors.ConnectionLost):
        await call
    assert not call.cancelled()


@pytest.mark.parametrize("greeting", [b"SSH-2.0-\xff\xfe\r\n", b"SSH-2.0-x\r\n" + b"\0\0\0\x0c\x04\x14" + b"\xff" * 10])
async def test_garbage_instead_of_ssh(sandbox: InProcessSandbox, tmp_path: Path, greeting: bytes) -> None:
    """Malformed lines and packets come as ValueError from below; they have a name here."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        with contextlib.suppress(ConnectionError):
            while await reader.read(1000):
                pass
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    document = sandbox.document()
    document["connection"]["port"] = server.sockets[0].getsockname()[1]
    with pytest.raises(errors.NotSSH):
        async with open_transport(trusted(document, tmp_path)):
            pass
    server.close()
    await server.wait_closed()


class Scripted(asyncssh.SSHServerSession[bytes]):
    """A session that answers the boot line by what ``on_boot`` does, and a guard's requests properly."""

    def __init__(self, on_boot: Callable[["asyncssh.SSHServerChannel[bytes]", bytes], None]) -> None:
        self.on_boot, self.buffer = on_boot, b""

    def connection_made(self, chan: "asyncssh.SSHServerChannel[bytes]") -> None:
        self.channel = chan

    def exec_requested(self, command: str) -> bool:
        return True

    def eof_received(self) -> bool:
        self.channel.close()
        return False

    def data_received(self, data: bytes, datatype: int | None) -> None:
        self.buffer += data
        while b"\n" in self.buffer:
            line, _, self.buffer = self.buffer.partition(b"\n")
            if b"__h=there" in line:
                self.channel.write(line.split(b"echo ")[1].split()[0] + b" R 1 there\n")
            elif b"unset __b" in line:
                self.on_boot(self.channel, line.split(b"echo ")[1].split()[0])
            elif line.startswith((b"+ ", b"p ", b"t ")):
                self.channel.write(b" ".join(line.split()[:2]) + b"\n")


@contextlib.asynccontextmanager
async def scripted(
    folder: Path, on_boot: Callable[["asyncssh.SSHServerChannel[bytes]", bytes], None],
) -> AsyncIterator[SSHTransport]:
    host = asyncssh.generate_private_key("ssh-ed25519")

    class Server(asyncssh.SSHServer):
        def begin_auth(self, username: str) -> bool:
            return False

        def session_requested(self) -> Scripted:
            return Scripted(on_boot)

    acceptor = await asyncssh.listen("127.0.0.1", 0, server_factory=Server, server_host_keys=[host], encoding=None, config=[])
    document: dict[str, object] = {
        "version": "0", "transport": "ssh", "workspace": "/",
        "connection": {"host": "127.0.0.1", "port": acceptor.get_port(), "user": "u",
                       "host_key": " ".join(host.export_public_key().decode().split()[:2])},
    }  # fmt: skip
    try:
        async with open_transport(trusted(document, folder)) as transport:
            yield transport
    finally:
        acceptor.close()


async def test_a_session_that_ends_before_the_command_was_sent_has_no_result(tmp_path: Path) -> None:
    """Exit status 0 and CLOSE come right after READY: the command line was never written."""

    def end(channel: "asyncssh.SSHServerChannel[bytes]", nonce: bytes) -> None:
        channel.write(nonce + b" R\n", asyncssh.EXTENDED_DATA_STDERR)
        channel.write(nonce + b" R 2\n")
        channel.exit(0)

    async with scripted(tmp_path, end) as transport:
        with pytest.raises(errors.TransportError):
            await transport.exec("true")


async def test_a_ready_line_without_end_is_refused(tmp_path: Path) -> None:
    """Bounded, and at once."""

    def end(channel: "asyncssh.SSHServerChannel[bytes]", nonce: bytes) -> None:
        channel.write(nonce + b" R" + b"1" * 1000)

    async with scripted(tmp_path, end) as transport:
        with pytest.raises(errors.LoginShellFailed):
            await asyncio.wait_for(transport.exec("true"), 5)


async def test_a_channel_that_is_never_opened_is_given_up(
    sandbox: InProcessSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that stops answering: a time limit of ours, not a wait for ever."""
    async with open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True) as transport:
        await transport.exec("true")
        monkeypatch.setattr("asp.ssh.session.READY_TIMEOUT_S", 0.3)
        connection = await transport.connect()
        answered = asyncio.Event()

        async def silent(*_: object, **__: object) -> None:
            await answered.wait()

        monkeypatch.setattr(type(connection.ssh), "create_session", silent)
        with pytest.raises(errors.NotStarted, match="did not answer"):
            await asyncio.wait_for(transport.exec("true"), 10)
        answered.set()


async def test_is_gone_says_both(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """The tests' own eye: it must see a living process, and a dead one."""
    async with open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True) as transport:
        pid = (await transport.exec("sleep 60 >/dev/null 2>&1 & echo $!")).stdout.decode().strip()
        assert not await is_gone(transport, pid, 0.3)
        await transport.exec(f"kill {pid}")
        assert await is_gone(transport, pid)
