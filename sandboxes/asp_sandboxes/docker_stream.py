"""A Docker sandbox as the gateway serves it: each connection becomes ``sshd -i`` by the engine's exec API (S1, S2).

The engine is spoken to over its unix socket with two small requests and a hijacked stream; docker-py needs a thread for each
stream, and the gateway has hundreds. What comes back is framed: one byte for the stream (1 stdout, 2 stderr), three zeros,
the length in four bytes, big-endian (Docker Engine API, "Attach to a container", stream format). Only stdout is the server's.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from asp.errors import TransportError
from asp_sandboxes.joining import End

API = "v1.41"
"""What every engine from 20.10 to today's speaks; a newer one that does not is asked for its oldest."""

ANSWER_TIMEOUT_S = 30.0
RETRY_S = 1.0
_HEADER = 8
_STDOUT = 1
_MAX_HEAD = 1 << 16
_MAX_BODY = 1 << 20


@dataclass(frozen=True)
class DockerOrder:
    """What the gateway is told about one container."""

    container: str
    socket: str
    user: str
    command: list[str]
    api: str = API

    def as_json(self) -> dict[str, Any]:
        """Return it as the gateway is sent it."""
        return {"provider": "docker", **asdict(self)}

    @classmethod
    def from_json(cls, sent: Mapping[str, Any]) -> Self:
        """Read it back. Raises KeyError or TypeError if it is not one."""
        return cls(**{key: value for key, value in sent.items() if key != "provider"})


class DockerSandbox:
    """One running container. ``ended`` is set when it runs no more, not when the engine only is away."""

    def __init__(self, order: DockerOrder) -> None:
        """Watch the container."""
        self._order = order
        self.ended = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())

    async def open_stream(self, joined: Callable[[], asyncio.Protocol], user: str = "") -> asyncio.Protocol:
        """Start an SSH server in the container and return the protocol that ``joined`` made, fed with its output.

        Raises TransportError: the engine is away, the container runs no more, or it has no room for another process.
        """
        order = self._order
        asked = {
            "AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "Tty": False, "Cmd": order.command,
            "User": user or order.user,
        }  # fmt: skip
        status, body = await self._ask("POST", f"/containers/{order.container}/exec", asked)
        if status != 201:  # noqa: PLR2004 - Created
            raise TransportError(f"the engine does not start a server in the container ({_said(status, body)})")
        path = f"/{order.api}/exec/{json.loads(body)['Id']}/start"
        end = joined()
        if not isinstance(end, End):
            raise TypeError
        stream = _Hijacked(end)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await asyncio.get_running_loop().create_unix_connection(lambda: stream, order.socket)
                stream.ask(_request("POST", path, {"Detach": False, "Tty": False}, upgrade=True))
                await stream.ready
        except (OSError, TimeoutError) as error:
            stream.abort()
            msg = f"the Docker engine does not answer ({error.__class__.__name__})"
            raise TransportError(msg) from error
        return end

    async def stop(self) -> None:
        """Watch no longer. The container is removed by the command."""
        self._watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watching
        self.ended.set()

    async def _watch(self) -> None:
        """Wait until the engine says that the container has stopped or is not there; an engine that is away is waited for."""
        while True:
            try:
                status, body = await self._ask("GET", f"/containers/{self._order.container}/json")
                gone = status == 404 or (status == 200 and not json.loads(body)["State"]["Running"])  # noqa: PLR2004 - HTTP
                if not gone:
                    await self._ask("POST", f"/containers/{self._order.container}/wait", timeout_s=None)
            except (TransportError, ValueError, KeyError, TypeError):
                gone = False
            if gone:
                self.ended.set()
                return
            await asyncio.sleep(RETRY_S)

    async def _ask(
        self, verb: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = ANSWER_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Ask the engine and return status and body. Raises TransportError."""
        writer = None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(self._order.socket, limit=_MAX_HEAD)
                writer.write(_request(verb, f"/{self._order.api}{path}", body))
                head = await reader.readuntil(b"\r\n\r\n")
                return _status(head), await _body(reader, head)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            msg = f"the Docker engine does not answer ({error.__class__.__name__})"
            raise TransportError(msg) from error
        finally:
            if writer is not None:
                writer.close()


class _Hijacked(asyncio.Protocol):
    """The engine's side of a stream: takes the answer's head and the frames off, and hands stdout to an End.

    The End keeps its transport: ours, so that what it writes goes to the server's stdin as it is.
    """

    def __init__(self, end: End) -> None:
        self._end = end
        self._head: bytearray | None = bytearray()
        self._frame = bytearray()
        self._left = self._stream = 0
        self._transport: asyncio.Transport | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ask(self, request: bytes) -> None:
        """Send the request that turns the connection into a stream."""
        if self._transport is not None:
            self._transport.write(request)

    def abort(self) -> None:
        """Give the connection up."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the End its transport."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            self._end.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Take the head off, then the frames."""
        if self._head is not None:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > _MAX_HEAD:
                    self.abort()
                return
            head, data = bytes(self._head[:end]), bytes(self._head[end + 4 :])
            self._head = None
            if self.ready.done():
                return
            if _status(head) not in {101, 200}:
                self.ready.set_exception(ConnectionRefusedError(_status(head)))
                return
            self.ready.set_result(None)
        self._deframe(data)

    def _deframe(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if not self._left:
                missing = _HEADER - len(self._frame)
                self._frame += view[:missing]
                view = view[missing:]
                if len(self._frame) == _HEADER:
                    self._stream, self._left = self._frame[0], int.from_bytes(self._frame[4:], "big")
                    self._frame.clear()
                continue
            piece = bytes(view[: self._left])
            self._left -= len(piece)
            view = view[len(piece) :]
            if self._stream == _STDOUT:
                self._end.data_received(piece)

    def eof_received(self) -> bool:
        """Pass it on."""
        return self._end.eof_received()

    def pause_writing(self) -> None:
        """Pass it on."""
        self._end.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._end.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on."""
        if not self.ready.done():
            self.ready.set_exception(exc if isinstance(exc, OSError) else ConnectionResetError())
            self.ready.exception()
        self._end.connection_lost(exc)


def _request(verb: str, path: str, body: Mapping[str, Any] | None, *, upgrade: bool = False) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{verb} {path} HTTP/1.1", "Host: docker", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    lines += ["Connection: Upgrade", "Upgrade: tcp"] if upgrade else ["Connection: close"]
    return "\r\n".join([*lines, "", ""]).encode() + data


def _status(head: bytes) -> int:
    words = head.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """Return the body of an answer that ends with its connection; chunked or not, at most 1 MiB."""
    data = bytearray()
    while len(data) <= _MAX_BODY and (piece := await reader.read(1 << 16)):
        data += piece
    if b"chunked" not in head.lower():
        return bytes(data)
    whole, rest = bytearray(), bytes(data)
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size.split(b";")[0] or b"0", 16)
        if not length:
            break
        whole += rest[:length]
        rest = rest[length + 2 :]
    return bytes(whole)


def _said(status: int, body: bytes) -> str:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return f"{status}: {json.loads(body)['message'][:200]}"
    return str(status)
