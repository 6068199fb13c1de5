"""The one listener (S1): a process per user that starts sandboxes and joins TCP connections on 127.0.0.1 to their streams.

``asp-sandbox up`` starts it; it ends by itself with the last sandbox, and on SIGTERM. Local sandboxes are its children and
die with it; one whose agent has killed it is started again by the next connection. It is asked over a unix socket in our
state directory: one JSON line in, one JSON line out; see :meth:`Gateway.answer`.

TCP stays on this side. A sandbox gets one AF_UNIX listening socket; every connection to the TCP port, if it comes from the
user's own uid, is joined to a fresh connection to that socket.
"""

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asp.errors import AspError, TransportError, UsageError, quoted
from asp.state import state_dir
from asp_sandboxes import local
from asp_sandboxes.docker_stream import DockerOrder, DockerSandbox
from asp_sandboxes.joining import End, join
from asp_sandboxes.peer import loopback_peer_uid, unix_peer_uid
from asp_sandboxes.returning import ReturningSandbox

MAX_STREAMS = 64
"""Joined connections of one sandbox at a time; one more is closed unanswered."""

MAX_LOGINS = 10
"""Streams of one sandbox at a time that have not logged in; one more connection waits, unread."""

LOGIN_S = 30.0
"""When a stream counts as logged in whatever it sent: the servers close one that is not (after 20 s). Without a byte it is
closed here; so is a connection that has waited as long for its turn."""

LOGIN_BYTES = 2048
"""What a client sends until it has logged in, at least, as the gateway cannot look inside. [ran: OpenSSH 2.1 kB, asyncssh 4.1]"""

CONTROL_NAME = "control"
READY = b"ready\n"
_MAX_DESCRIPTORS = 65536
_MAX_REQUEST_BYTES = 1 << 20
_FIRST_REQUEST_TIMEOUT_S = 60.0
_BACKLOG = 64
_MAX_LOG_LINES = 1000
_log_lines = itertools.count(1)
_last_line = ""
_LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_768)
_PORT_TRIES = 50


class Sandbox(Protocol):
    """What a provider gives for a started sandbox (S1)."""

    ended: asyncio.Event

    async def open_stream(self, joined: Callable[[], asyncio.Protocol], user: str = ...) -> asyncio.Protocol:
        """Open a stream to a fresh SSH server inside. Raises TransportError."""
        ...

    async def stop(self) -> None:
        """Kill all of it."""
        ...


@dataclass(eq=False)
class Served:
    """One running sandbox and its port."""

    sandbox: Sandbox
    server: asyncio.Server
    port: int
    ends: set[End] = field(default_factory=set[End])
    streams: int = 0
    logins: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LOGINS))

    def close_door(self) -> None:
        """Listen no longer and cut what is joined."""
        self.server.close()
        for end in list(self.ends):
            end.abort()


class Gateway:
    """All sandboxes of one user. ``idle`` is set when there is none and nobody is asking."""

    def __init__(self) -> None:
        """Start with none."""
        self._served: dict[str, Served] = {}
        self._starting: dict[str, asyncio.Event] = {}
        self._requests = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.idle = asyncio.Event()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one control connection; a connection of another uid is closed unread."""
        self._requests += 1
        try:
            peer = writer.get_extra_info("socket")
            if unix_peer_uid(peer) == os.getuid():
                request = await reader.readline()
                if request:
                    answer = await self._answer_or_error(request)
                    writer.write(json.dumps(answer).encode() + b"\n")
                    await writer.drain()
        except (OSError, ValueError) as error:
            _log(f"control connection: {error}")
        finally:
            writer.close()
            self._requests -= 1
            self.look_idle()

    async def _answer_or_error(self, request: bytes) -> dict[str, Any]:
        try:
            return await self.answer(json.loads(request))
        except AspError as error:
            return {"error": str(error), "exit_code": error.exit_code}
        except (OSError, KeyError, TypeError, ValueError) as error:
            _log(f"request failed: {error!r}")
            return {"error": f"the gateway failed: {quoted(str(error))}", "exit_code": 1}

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked: ``start`` (name, order), ``stop`` (name) or ``list``. Raises AspError."""
        match request["verb"]:
            case "start":
                return {"port": await self.start(request["name"], request["order"], int(request.get("port", 0)))}
            case "stop":
                return {"stopped": await self.stop(request["name"])}
            case "list":
                return {"running": {name: served.port for name, served in self._served.items()}}
            case verb:
                msg = f"the gateway does not know {verb!r}"
                raise UsageError(msg)

    async def start(self, name: str, order: Mapping[str, Any], port: int = 0) -> int:
        """Start a sandbox and listen for it, on ``port`` if that is free. Returns the port. Raises UsageError."""
        if name in self._served or name in self._starting:
            msg = f"a sandbox named {name} runs already"
            raise UsageError(msg)
        started = self._starting[name] = asyncio.Event()
        try:
            sandbox = await _started(order)
            try:
                served = await self._listen(sandbox, port)
            except BaseException:
                await sandbox.stop()
                raise
            self._served[name] = served
        finally:
            del self._starting[name]
            started.set()
        self._run(self._forget_when_ended(name, served))
        _log(f"{name}: listening on {_LOOPBACK}:{served.port}")
        return served.port

    async def stop(self, name: str) -> bool:
        """Stop a sandbox, also one that is only starting; return whether there was one."""
        if name in self._starting:
            await self._starting[name].wait()
        served = self._served.get(name)
        if served is None:
            return False
        served.close_door()
        await served.sandbox.stop()
        self._forget(name, served)
        return True

    async def stop_all(self) -> None:
        """Stop every sandbox."""
        async with asyncio.TaskGroup() as group:
            for name in list(self._served):
                group.create_task(self.stop(name))

    async def _listen(self, sandbox: Sandbox, wanted: int) -> Served:
        listener = _bound(wanted)
        port: int = listener.getsockname()[1]
        served: Served

        def accept() -> End:
            end = End(lost=lambda: served.ends.discard(end), made=lambda: self._run(self._join(served, end)))
            served.ends.add(end)
            return end

        server = await asyncio.get_running_loop().create_server(accept, sock=listener, backlog=_BACKLOG, start_serving=False)
        served = Served(sandbox, server, port)
        await server.start_serving()
        return served

    async def _join(self, served: Served, client: End) -> None:
        """Join one accepted connection, or close it."""
        peer = client.connection
        if peer is None or loopback_peer_uid(peer) != os.getuid():
            _log("refused a connection that is not from our uid")
            client.abort()
            return
        if served.streams >= MAX_STREAMS:
            _log(f"refused a connection: {MAX_STREAMS} streams are open")
            client.abort()
            return
        served.streams += 1
        try:
            async with asyncio.timeout(LOGIN_S):
                await served.logins.acquire()
        except TimeoutError:
            served.streams -= 1
            _log(f"refused a connection: {MAX_LOGINS} others have not logged in for {LOGIN_S:g} s")
            client.abort()
            return
        logged_in = _Once(served.logins.release)
        asyncio.get_running_loop().call_later(LOGIN_S, _login_is_over, client, logged_in)

        def stream_lost() -> None:
            served.streams -= 1
            logged_in()

        try:
            stream = await served.sandbox.open_stream(lambda: End(stream_lost))
        except TransportError as error:
            stream_lost()
            _log(str(error))
            client.abort()
            return
        client.call_after(LOGIN_BYTES, logged_in)
        if isinstance(stream, End):
            join(client, stream)

    async def _forget_when_ended(self, name: str, served: Served) -> None:
        await served.sandbox.ended.wait()
        served.close_door()
        await served.sandbox.stop()
        self._forget(name, served)

    def _forget(self, name: str, served: Served) -> None:
        if self._served.get(name) is served:
            del self._served[name]
            _log(f"{name}: ended")
            self.look_idle()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def look_idle(self) -> None:
        """Set ``idle`` if nothing holds us."""
        if not (self._served or self._starting or self._requests):
            self.idle.set()
        else:
            self.idle.clear()


class _Once:
    """Something to be done once, whoever is first to say so."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done: Callable[[], None] | None = done

    def __call__(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done()


def _login_is_over(client: End, logged_in: _Once) -> None:
    if client.is_silent:
        client.abort()
    logged_in()


async def _started(order: Mapping[str, Any]) -> Sandbox:
    """Start what a provider needs on this side (S1: a provider is one function, ``open_stream``)."""
    if order.get("provider") == "docker":
        return DockerSandbox(DockerOrder.from_json(order))
    return await ReturningSandbox.start(local.Order.from_json(order))


def _bound(wanted: int) -> socket.socket:
    """Return a socket bound to the port that is wanted, to any free one if somebody has it.

    A new port is below those that the kernel gives to outgoing connections (32768 and up on Linux): one of these could have
    it just when a gateway that was killed is started again.
    """
    new = (secrets.choice(_PORTS) for _ in range(_PORT_TRIES))
    for port in filter(None, itertools.chain([wanted], new)):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Connections of the gateway that had it may still be closing. On Linux this takes no port from anybody who listens.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_LOOPBACK, port))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
        else:
            return listener
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((_LOOPBACK, 0))
    return listener


def _log(text: str) -> None:
    """Write a line to the log, unless the last one was the same. Strangers can cause lines, so there is an end to them."""
    global _last_line  # noqa: PLW0603 - there is one log
    if text == _last_line:
        return
    _last_line = text
    number = next(_log_lines)
    if number <= _MAX_LOG_LINES:
        sys.stderr.write(f"{text}\n" if number < _MAX_LOG_LINES else "no more lines are written\n")
        sys.stderr.flush()


def _log_failure(_loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Log what no task handles in one line: out of descriptors, asyncio says so with a traceback each second and listener."""
    error = context.get("exception")
    _log(f"{context['message']}{'' if error is None else f' ({error!r})'}")


def _raise_descriptor_limit() -> None:
    """Allow ourselves what we may have: a hundred sandboxes with eight connections take 2000, the usual limit is 1024.

    Local sandboxes have a limit of their own.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _serve(folder: Path) -> None:
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(CONTROL_NAME, dir_fd=directory)
    control.bind(f"/proc/self/fd/{directory}/{CONTROL_NAME}")
    gateway = Gateway()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_failure)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, gateway.idle.set)
    server = await asyncio.start_unix_server(gateway.converse, sock=control, limit=_MAX_REQUEST_BYTES)
    loop.call_later(_FIRST_REQUEST_TIMEOUT_S, gateway.look_idle)  # who started us may have died
    os.write(1, READY)
    os.dup2(2, 1)
    await gateway.idle.wait()
    server.close()
    os.unlink(CONTROL_NAME, dir_fd=directory)
    await gateway.stop_all()


def main() -> int:
    """Run until idle; another gateway of this user that is about to end is waited for."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # inherited: what crashes in a sandbox leaves nothing on this machine
    _raise_descriptor_limit()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    folder = state_dir("gateway")
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    asyncio.run(_serve(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
