"""The one listener: who may connect, what travels, what ends with what (S1)."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncssh
import pytest
from conftest import missing
from sandbox_lab import WAIT_S, Box, Lab, children, end, wait_for_end

from asp_sandboxes import gateway as gateway_module
from asp_sandboxes.gateway import Gateway
from asp_sandboxes.joining import End, join
from asp_sandboxes.peer import loopback_peer_uid

ROOT = os.getuid() == 0
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))  # shared: its runtime is staged once


@pytest.fixture
def box(lab: Lab, tmp_path: Path) -> Iterator[Box]:
    repository = tmp_path / "repo"
    repository.mkdir()
    done = lab.run("up", "local", cwd=repository)
    if done.returncode == 2 and "local sandboxes" in done.stderr:
        missing("bwrap", done.stderr.strip())
    assert done.returncode == 0, done.stderr
    yield Box(lab, repository)
    lab.close()


class Echo:
    """A provider without a sandbox: each stream is one end of a socket pair, the other is kept here."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.far: list[socket.socket] = []

    async def open_stream(self, joined: object, user: str = "agent") -> asyncio.Protocol:
        ours, far = socket.socketpair()
        far.setblocking(False)
        self.far.append(far)
        _, protocol = await asyncio.get_running_loop().create_unix_connection(joined, sock=ours)  # type: ignore[call-overload]
        return protocol  # type: ignore[no-any-return]

    async def stop(self) -> None:
        self.ended.set()
        for far in self.far:
            far.close()


@pytest.fixture
async def echo(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Echo, int]]:
    """A gateway that serves an Echo."""
    provider = Echo()

    async def start(_: object) -> Echo:
        return provider

    monkeypatch.setattr(gateway_module.local, "start", start)
    monkeypatch.setattr(gateway_module.local.Order, "from_json", lambda _: None)
    running = Gateway()
    port = await running.start("echo", {})
    yield provider, port
    await running.stop("echo")
    assert not running._served
    await asyncio.sleep(0)


async def far_end(provider: Echo, number: int = 0) -> socket.socket:
    async with asyncio.timeout(WAIT_S):
        while len(provider.far) <= number:
            await asyncio.sleep(0.001)  # nothing tells when a stream was opened
    return provider.far[number]


async def test_bytes_and_half_close_go_both_ways(echo: tuple[Echo, int]) -> None:
    provider, port = echo
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"early")
    writer.write_eof()
    far = await far_end(provider)
    loop = asyncio.get_running_loop()
    assert await loop.sock_recv(far, 100) == b"early"
    assert await loop.sock_recv(far, 100) == b""
    await loop.sock_sendall(far, b"answer after the end")
    far.shutdown(socket.SHUT_WR)
    assert await reader.read() == b"answer after the end"
    writer.close()
    await writer.wait_closed()


async def test_a_reader_that_does_not_read_holds_the_writer(echo: tuple[Echo, int]) -> None:
    provider, port = echo
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    far = await far_end(provider)
    writer.transport.set_write_buffer_limits(high=0)
    sent = 0

    async def send_all() -> None:
        nonlocal sent
        for _ in range(64):
            writer.write(b"x" * MEBIBYTE)
            await writer.drain()
            sent += MEBIBYTE

    sending = asyncio.create_task(send_all())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(sending), 0.5)
    assert sent < 32 * MEBIBYTE  # kernel buffers and one of ours
    received = 0
    while received < 64 * MEBIBYTE:
        received += len(await asyncio.get_running_loop().sock_recv(far, MEBIBYTE))
    await sending
    writer.close()
    await writer.wait_closed()
    assert await reader.read() == b""


async def test_the_sandbox_s_end_closes_the_connection(echo: tuple[Echo, int]) -> None:
    provider, port = echo
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    (await far_end(provider)).close()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_streams_are_bounded(echo: tuple[Echo, int], monkeypatch: pytest.MonkeyPatch) -> None:
    provider, port = echo
    monkeypatch.setattr(gateway_module, "MAX_STREAMS", 2)
    writers = []
    for number in range(2):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        await far_end(provider, number)
    reader, third = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read() == b""
    assert len(provider.far) == 2
    for writer in [*writers, third]:
        writer.close()
        await writer.wait_closed()


AS_NOBODY = """
import os, socket, sys
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
s = socket.socket()
s.settimeout(20)
s.connect(("127.0.0.1", int(sys.argv[1])))
s.sendall(b"SSH-2.0-stranger\\r\\n")
try:
    print(s.recv(100))
except ConnectionResetError:
    print(b"")
"""


async def test_another_user_s_connection_is_closed_before_a_stream_is_opened(echo: tuple[Echo, int]) -> None:
    if not ROOT:
        missing("root", "being another user needs root")
    provider, port = echo
    stranger = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", AS_NOBODY, str(port), stdout=subprocess.PIPE)
    assert (await stranger.communicate())[0] == b"b''\n"
    assert not provider.far


def test_an_owner_that_cannot_be_said_is_nobody(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted = server.accept()[0]
        with accepted:
            assert loopback_peer_uid(accepted) == os.getuid()
            assert loopback_peer_uid(accepted, table) is None
            lines = Path("/proc/self/net/tcp").read_text().splitlines()
            port = f":{client.getsockname()[1]:04X}"
            mine = next(line.split() for line in lines if line.split()[1].endswith(port))
            for column, value in ((3, "06"), (9, "0")):  # TIME_WAIT; a socket that nobody holds has uid 0 and no inode
                changed = [*mine[:column], value, *mine[column + 1 :]]
                table.write_text(f"header\n{' '.join(changed)}\n")
                assert loopback_peer_uid(accepted, table) is None
            table.write_text(f"header\n{' '.join(mine)}\n")
            assert loopback_peer_uid(accepted, table) == os.getuid()


def test_ends_that_are_gone_are_not_joined() -> None:
    join(End(lambda: None), End(lambda: None))


@pytest.mark.bwrap
async def test_a_wrong_key_and_another_user_are_refused(box: Box) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519")
    for user, key in (("agent", other), ("root", asyncssh.read_private_key(box.key))):
        with pytest.raises(asyncssh.PermissionDenied):
            await asyncssh.connect(
                "127.0.0.1", box.port, username=user, client_keys=[key], known_hosts=None, config=None, agent_path=None
            )


@pytest.mark.bwrap
async def test_no_forwarding_through_the_sandbox_s_server(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with box.connect() as connection:
            with pytest.raises(asyncssh.ChannelOpenError):
                await connection.open_connection("127.0.0.1", listener.getsockname()[1])
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.bwrap
async def test_the_agent_may_kill_its_server_and_the_sandbox_comes_back(box: Box) -> None:
    """The next connection finds it: same keys, same workspace, nothing of what ran before."""
    gateway = box.lab.gateway()
    assert await box.sh("echo kept > /workspace/work; touch /tmp/scratch; sleep 1000 >/dev/null 2>&1 &") == (0, "")
    for _ in range(2):
        pidfds = [os.pidfd_open(pid) for pid in box.processes()]
        with contextlib.suppress(asyncssh.Error, OSError):
            await box.sh("kill -9 -1")
        for pidfd in pidfds:
            wait_for_end(pidfd)
        # Many at once: one of them starts it, all are served.
        found = await asyncio.gather(*(box.sh("cat /workspace/work; ls /tmp") for _ in range(4)))
        assert found == [(0, "kept\n")] * 4
    assert box.lab.gateway() == gateway
    assert [(one["name"], one["state"]) for one in box.lab.listed()] == [("repo", "running")]
    pidfds = [os.pidfd_open(pid) for pid in box.processes()]
    assert box.lab.run("down", "repo").returncode == 0
    for pidfd in pidfds:
        wait_for_end(pidfd)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", box.port)


@pytest.mark.bwrap
async def test_a_sandbox_that_cannot_come_back_closes_connections_and_can_be_taken_away(box: Box) -> None:
    pidfds = [os.pidfd_open(pid) for pid in box.processes()]
    with contextlib.suppress(asyncssh.Error, OSError):
        await box.sh("kill -9 -1")
    for pidfd in pidfds:
        wait_for_end(pidfd)
    workspace = box.folder / "workspace"
    workspace.rename(box.folder / "elsewhere")
    reader, writer = await asyncio.open_connection("127.0.0.1", box.port)
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    writer.close()
    await writer.wait_closed()
    assert "does not start again" in (box.lab.state / "gateway" / "log").read_text()
    (box.folder / "elsewhere").rename(workspace)
    assert await box.sh("echo back") == (0, "back\n")


@pytest.mark.bwrap
async def test_sandboxes_die_with_the_gateway(box: Box) -> None:
    async with box.connect() as connection:
        process = await connection.create_process("sleep 1000")
        pidfds = [os.pidfd_open(pid) for pid in box.processes()]
        assert len(pidfds) >= 3
        gateway = box.lab.gateway()
        assert gateway is not None
        end(gateway)
        for pidfd in pidfds:
            wait_for_end(pidfd)
        connection.abort()
        process.close()
    assert box.lab.listed()[0]["state"] == "stopped"


@pytest.mark.bwrap
def test_terminate_stops_all(lab: Lab, box: Box) -> None:
    gateway = lab.gateway()
    assert gateway is not None
    pidfds = [os.pidfd_open(pid) for pid in [gateway, *box.processes()]]
    os.kill(gateway, 15)
    for pidfd in pidfds:
        wait_for_end(pidfd)


@pytest.mark.bwrap
def test_one_gateway_for_many_sandboxes_and_no_zombies(lab: Lab, box: Box) -> None:
    second = lab.up(lab.repository("second"))
    gateway = lab.gateway()
    assert len(children(gateway)) == 2
    assert lab.run("down", "second").returncode == 0
    assert lab.gateway() == gateway
    assert len(children(gateway)) == 1
    assert not second.folder.exists()
    descriptors = len(os.listdir(f"/proc/{gateway}/fd"))
    third = lab.up(lab.repository("third"))
    assert lab.run("down", third.name).returncode == 0
    assert len(os.listdir(f"/proc/{gateway}/fd")) == descriptors
    assert asyncio.run(box.sh("echo still here")) == (0, "still here\n")


@pytest.mark.bwrap
def test_the_gateway_knows_nothing_of_the_caller_s_environment(lab: Lab, box: Box) -> None:
    environment = Path(f"/proc/{lab.gateway()}/environ").read_bytes().decode().split("\0")
    assert {entry.partition("=")[0] for entry in environment if entry} == {"PATH", "LANG", "HOME", "XDG_STATE_HOME"}
    for pid in children(lab.gateway()):
        with contextlib.suppress(PermissionError):
            assert Path(f"/proc/{pid}/environ").read_bytes() == b""


@pytest.mark.bwrap
def test_control_refuses_what_it_does_not_know(lab: Lab, box: Box) -> None:
    control = lab.state / "gateway" / "control"
    for request, expected in (
        (b"{", "failed"),
        (b'{"verb": "grow"}', "does not know"),
        (b'{"verb": "start", "name": "repo", "order": {}}', "already"),
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            folder = os.open(control.parent, os.O_PATH)
            connection.connect(f"/proc/self/fd/{folder}/{control.name}")
            os.close(folder)
            connection.sendall(request + b"\n")
            answer = json.loads(connection.makefile().readline())
        assert expected in answer["error"]
    assert lab.gateway() is not None


async def test_small_pieces_do_not_wait_for_acknowledgements() -> None:
    """Without TCP_NODELAY each command through the gateway took 40 ms or a multiple of it; a listener of ours has protocol 0,
    for which asyncio does not set it."""
    ends: list[End] = []
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))

    def accept() -> End:
        ends.append(End(lambda: None))
        return ends[-1]

    server = await asyncio.get_running_loop().create_server(accept, sock=listener)
    _, writer = await asyncio.open_connection(*listener.getsockname())
    while not ends or ends[0].connection is None:
        await asyncio.sleep(0)
    assert ends[0].connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()
    ends[0].abort()
    server.close()
    await server.wait_closed()
