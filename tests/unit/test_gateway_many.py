"""The gateway under many, silent, half-open and slow connections. The sandboxes are echo servers in this process."""

import asyncio
import contextlib
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from asp_sandboxes import gateway as gateway_module
from asp_sandboxes import joining
from asp_sandboxes.gateway import LOGIN_BYTES, MAX_LOGINS, MAX_STREAMS, Gateway

WAIT_S = 60.0
MEBIBYTE = 1 << 20


class Echo(asyncio.Protocol):
    """Sends back what comes, and reads no more while the other side does not."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()


class EchoSandbox:
    """A provider whose streams lead to an echo; ``opened`` counts them, ``open`` are those that are there."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.opened = 0
        self.open: set[asyncio.Transport] = set()

    async def open_stream(self, joined: Callable[[], asyncio.Protocol], user: str = "agent") -> asyncio.Protocol:
        self.opened += 1
        ours, far = socket.socketpair()
        loop = asyncio.get_running_loop()
        transport, echo = await loop.create_unix_connection(Echo, sock=far)
        self.open.add(transport)
        lost = echo.connection_lost

        def gone(error: Exception | None) -> None:
            self.open.discard(transport)
            lost(error)

        echo.connection_lost = gone  # type: ignore[method-assign]
        return (await loop.create_unix_connection(joined, sock=ours))[1]

    async def stop(self) -> None:
        for transport in list(self.open):
            transport.abort()
        self.ended.set()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.005)  # nothing tells


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[EchoSandbox]:
    made: list[EchoSandbox] = []

    async def start(_: object) -> EchoSandbox:
        made.append(EchoSandbox())
        return made[-1]

    monkeypatch.setattr(gateway_module, "_started", start)
    return made


async def stopped(gateway: Gateway, sandbox: EchoSandbox) -> None:
    """Stop the only sandbox, and let every connection that is being closed be closed."""
    ends = gateway._served["echo"].ends
    await gateway.stop("echo")
    await until(lambda: not ends and not sandbox.open)


@pytest.fixture
async def echo(started: list[EchoSandbox]) -> AsyncIterator[tuple[EchoSandbox, int]]:
    gateway = Gateway()
    port = await gateway.start("echo", {})
    yield started[0], port
    await stopped(gateway, started[0])


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192
    if soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            pytest.skip(f"this process may have {hard} descriptors; 800 connections inside one take 3200")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def spoken(port: int, text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    return reader, writer


async def close(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
    for writer in writers:
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("many_descriptors")
async def test_a_hundred_sandboxes_with_eight_connections_each(started: list[EchoSandbox]) -> None:
    gateway = Gateway()
    ports = [await gateway.start(f"s{number}", {}) for number in range(100)]
    text = bytes(range(256)) * 16
    async with asyncio.timeout(10 * WAIT_S):
        connections = await asyncio.gather(*(spoken(port, text) for port in ports for _ in range(8)))
        for reader, _ in connections:
            assert await reader.readexactly(len(text)) == text
        assert [len(sandbox.open) for sandbox in started] == [8] * 100
        await close(*(writer for _, writer in connections))
        await until(lambda: not any(sandbox.open for sandbox in started))
        await gateway.stop_all()
    assert gateway.idle.is_set()


async def test_who_has_not_logged_in_takes_one_of_ten_places(echo: tuple[EchoSandbox, int]) -> None:
    sandbox, port = echo
    quiet = [await spoken(port, b"SSH-2.0-x\r\n") for _ in range(MAX_LOGINS)]
    await until(lambda: sandbox.opened == MAX_LOGINS)
    waiting = [await spoken(port, b"later") for _ in range(2)]
    await quiet[0][0].readexactly(11)  # the loop has gone round: all have been accepted
    assert sandbox.opened == MAX_LOGINS
    quiet[0][1].write(b"x" * LOGIN_BYTES)  # logged in, so that one comes in
    await until(lambda: sandbox.opened == MAX_LOGINS + 1)
    await close(quiet[1][1])  # left, so the other
    await until(lambda: sandbox.opened == MAX_LOGINS + 2)
    assert {await reader.readexactly(5) for reader, _ in waiting} == {b"later"}
    await close(*(writer for _, writer in [*quiet, *waiting]))


async def test_many_may_be_logged_in(echo: tuple[EchoSandbox, int]) -> None:
    sandbox, port = echo
    connections = [await spoken(port, b"x" * LOGIN_BYTES) for _ in range(MAX_STREAMS)]
    await until(lambda: sandbox.opened == MAX_STREAMS)
    reader, writer = await spoken(port, b"one too many")
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    await close(writer, *(writer for _, writer in connections))


async def test_a_silent_connection_is_closed(started: list[EchoSandbox], monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that waits for a place as long as a login may take; who has spoken stays."""
    monkeypatch.setattr(gateway_module, "LOGIN_S", 1.0)
    gateway = Gateway()
    port = await gateway.start("echo", {})
    speaking, writer = await spoken(port, b"hello")
    assert await speaking.readexactly(5) == b"hello"
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_LOGINS * 2)]
    async with asyncio.timeout(WAIT_S):
        for reader, _ in silent:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
    writer.write(b"still here")
    assert await speaking.readexactly(10) == b"still here"
    await until(lambda: len(started[0].open) == 1)
    await close(writer, *(silent_writer for _, silent_writer in silent))
    await stopped(gateway, started[0])


async def test_a_closed_connection_is_closed_on_both_sides(echo: tuple[EchoSandbox, int]) -> None:
    """Whoever closes first; one that stays half-open would keep a place of the sandbox's for ever."""
    sandbox, port = echo
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        reader, writer = await spoken(port, b"hello")
        assert await reader.readexactly(5) == b"hello"
        await close(writer)
    for _ in range(3):
        reader, writer = await spoken(port, b"hello")
        assert await reader.readexactly(5) == b"hello"
        for transport in list(sandbox.open):
            transport.close()
        assert await reader.read() == b""
        await close(writer)
    await until(lambda: len(os.listdir("/proc/self/fd")) == descriptors)


async def test_a_half_open_connection_ends(echo: tuple[EchoSandbox, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox hangs: it does not answer the client's end with its own."""
    sandbox, port = echo
    monkeypatch.setattr(joining, "HALF_OPEN_S", 0.5)
    reader, writer = await spoken(port, b"hello")
    assert await reader.readexactly(5) == b"hello"
    for transport in sandbox.open:
        transport.pause_reading()
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    await close(writer)
    for transport in list(sandbox.open):
        transport.resume_reading()


async def test_connections_that_are_reset_at_once_leave_nothing(echo: tuple[EchoSandbox, int]) -> None:
    sandbox, port = echo
    reset = struct.pack("ii", 1, 0)
    for number in range(200):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        if number % 2:
            writer.write(b"x")
        writer.transport.abort()
    await until(lambda: not sandbox.open)
    reader, writer = await spoken(port, b"and now")
    assert await asyncio.wait_for(reader.readexactly(7), WAIT_S) == b"and now"
    await close(writer)


async def test_who_does_not_read_is_not_buffered(echo: tuple[EchoSandbox, int]) -> None:
    """An echo that nobody reads fills the kernel's buffers and one of ours each way, then the sender waits."""
    _, port = echo
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=65536)
    sent = 0
    async with asyncio.timeout(WAIT_S):
        while True:
            writer.write(b"x" * 65536)
            try:
                await asyncio.wait_for(writer.drain(), 1)
            except TimeoutError:
                break
            sent += 65536
            assert sent < 64 * MEBIBYTE
        received = 0
        while received < sent:
            received += len(await reader.read(MEBIBYTE))
    await close(writer)


async def test_without_descriptors_the_log_says_so_once(
    echo: tuple[EchoSandbox, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, port = echo
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(gateway_module._log_failure)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [socket.socket() for _ in range(4)]
    with contextlib.ExitStack() as restored:
        restored.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        restored.callback(loop.set_exception_handler, None)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # so that accept(2) finds none
        for client in clients:
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
        complaints: list[str] = []
        async with asyncio.timeout(WAIT_S):
            while not complaints:
                await asyncio.sleep(0.05)
                complaints += [line for line in capsys.readouterr().err.splitlines() if "accept" in line]
        await asyncio.sleep(2.5)  # asyncio tries again after a second: that says it twice more, and we do not
        complaints += capsys.readouterr().err.splitlines()
        assert len(complaints) == 1, complaints
    for client in clients:  # and then they are served
        await loop.sock_sendall(client, b"hello")
        async with asyncio.timeout(WAIT_S):
            assert await loop.sock_recv(client, 5) == b"hello"
        client.close()
