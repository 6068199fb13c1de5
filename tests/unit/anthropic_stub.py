"""A local server that speaks the Anthropic Messages API, with faults on order; a strict one, as the real API is.

It plays one :class:`Reply` for each request, in order, and keeps every request that arrived. A request that the real
API would refuse (a call without its result, an empty text...) gets its 400, whatever was to be played, so a test of the
loop notices a history that is not valid::

    async with AnthropicStub(turn(tools=[("bash", {"command": "ls"})]), turn("Done.")) as stub:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", stub.base_url)
        ...
        assert stub.bodies[1]["messages"][-1]["content"][0]["type"] == "tool_result"
"""

import asyncio
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

KEY = "sk-stub-MARKER-4f1c9a77"  # the only key the stub accepts; no output may hold it


@dataclass(frozen=True)
class Reply:
    """One answer: server-sent events, or an HTTP error. The methods return a copy with one fault."""

    events: tuple[bytes, ...] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    end: str = "whole"  # of the body, after the events: whole, cut, reset

    def cut(self, after: int) -> "Reply":
        """Close the TCP connection in the middle of the body, after that many events."""
        return replace(self, events=self.events[:after], end="cut")

    def reset(self, after: int) -> "Reply":
        """Reset the TCP connection after that many events; the client may lose some that were sent."""
        return replace(self, events=self.events[:after], end="reset")

    def eof(self, after: int) -> "Reply":
        """End the body cleanly after that many events."""
        return replace(self, events=self.events[:after], end="whole")

    def stall(self, after: int) -> "Reply":
        """Send that many events, then nothing until :meth:`AnthropicStub.release`; then the rest."""
        return replace(self, events=(*self.events[:after], _STALL, *self.events[after:]))

    def error(self, after: int, kind: str = "overloaded_error", message: str = "Overloaded") -> "Reply":
        """Send an ``error`` event after that many events; the status stays 200."""
        return self.insert(after, sse("error", {"error": {"type": kind, "message": message}})).eof(after + 1)

    def insert(self, after: int, raw: bytes) -> "Reply":
        """Put raw bytes between two events."""
        return replace(self, events=(*self.events[:after], raw, *self.events[after:]))


_STALL = b"\0stall"


def sse(event: str, data: Mapping[str, Any]) -> bytes:
    """One server-sent event as the API writes it."""
    return f"event: {event}\ndata: {json.dumps({'type': event, **data})}\n\n".encode()


def http_error(status: int, kind: str = "api_error", message: str = "no", **headers: str) -> Reply:
    """An HTTP error with the API's JSON body. ``retry_after="2"`` becomes the header Retry-After."""
    body = json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status=status, headers={"content-type": "application/json", **named}, body=body)


def pieces(text: str, size: int) -> list[str]:
    """Cut a text as a stream does."""
    return [text[at : at + size] for at in range(0, len(text), size)]


def text_block(index: int, text: str, size: int = 4) -> list[bytes]:
    """The events of one text block."""
    return _block(index, {"type": "text", "text": ""}, [{"type": "text_delta", "text": p} for p in pieces(text, size)])


def thinking_block(index: int, thinking: str, signature: str) -> list[bytes]:
    """The events of one thinking block; the signature comes last, in two pieces."""
    deltas: list[dict[str, Any]] = [{"type": "thinking_delta", "thinking": p} for p in pieces(thinking, 5)]
    deltas += [{"type": "signature_delta", "signature": p} for p in pieces(signature, -(-len(signature) // 2) or 1)]
    return _block(index, {"type": "thinking", "thinking": "", "signature": ""}, deltas)


def tool_block(index: int, name: str, arguments: object, call_id: str) -> list[bytes]:
    """The events of one tool call. A string is sent as it is, so it may be wrong; anything else as its JSON."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    cut = pieces(raw, max(3, len(raw) // 50))
    start: dict[str, Any] = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
    return _block(index, start, [{"type": "input_json_delta", "partial_json": p} for p in ["", *cut]])


def _block(index: int, start: Mapping[str, Any], deltas: Sequence[Mapping[str, Any]]) -> list[bytes]:
    events = [sse("content_block_start", {"index": index, "content_block": start})]
    events += [sse("content_block_delta", {"index": index, "delta": delta}) for delta in deltas]
    return [*events, sse("content_block_stop", {"index": index})]


def message(blocks: Sequence[bytes], stop: str, usage: Mapping[str, Any], **delta: object) -> Reply:
    """A whole answer around the events of its blocks. ``usage`` has both what comes first and what comes last."""
    first = {"input_tokens": 0, "output_tokens": 1} | {k: v for k, v in usage.items() if k != "output_tokens"}
    last = {"output_tokens": usage.get("output_tokens", 7)}
    start: dict[str, Any] = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "stub",
        "content": [],
        "usage": first,
    }
    start |= {"stop_reason": None, "stop_sequence": None}
    end = {"delta": {"stop_reason": stop, "stop_sequence": None, **delta}, "usage": last}
    head = [sse("message_start", {"message": start}), sse("ping", {})]
    return Reply(events=(*head, *blocks, sse("message_delta", end), sse("message_stop", {})))


def turn(
    text: str = "",
    tools: Sequence[tuple[str, object]] = (),
    *,
    thinking: tuple[str, str] | None = None,
    stop: str | None = None,
    usage: Mapping[str, Any] | None = None,
    first_id: int = 1,
    **delta: object,
) -> Reply:
    """One turn: thinking (text, signature), then text, then calls ``toolu_1``, ``toolu_2``... from ``first_id``."""
    blocks: list[bytes] = []
    index = 0
    if thinking:
        blocks += thinking_block(index, *thinking)
        index += 1
    if text:
        blocks += text_block(index, text)
        index += 1
    for number, (name, arguments) in enumerate(tools):
        blocks += tool_block(index + number, name, arguments, f"toolu_{first_id + number}")
    return message(blocks, stop or ("tool_use" if tools else "end_turn"), usage or {"input_tokens": 10}, **delta)


@dataclass(frozen=True)
class Received:
    """One request as it arrived. Header names are lower-case."""

    method: str
    path: str
    headers: Mapping[str, str]
    raw: bytes
    body: dict[str, Any]


class AnthropicStub:
    """The server, on 127.0.0.1 and a free port, as an async context manager."""

    def __init__(self, *replies: Reply, context_bytes: int | None = None) -> None:
        """Play the replies in order. A request body above ``context_bytes`` gets the 400 of a full context."""
        self.requests: list[Received] = []
        self.sent = 0  # events of all streams that went out
        self.connections = 0
        self._replies = list(replies)
        self._context_bytes = context_bytes
        self._released = asyncio.Event()
        self._changed = asyncio.Condition()
        self._broken_off = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, *replies: Reply) -> None:
        """Queue more replies."""
        self._replies += replies

    def release(self) -> None:
        """Let every stalled stream go on."""
        self._released.set()

    async def wait_for_request(self, count: int = 1) -> None:
        """Wait until that many requests have arrived."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.requests) >= count)

    async def wait_for_broken_off(self, count: int = 1) -> None:
        """Wait until that many clients have closed a connection in the middle of an answer."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._broken_off >= count)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The JSON bodies of all requests."""
        return [request.body for request in self.requests]

    @property
    def base_url(self) -> str:
        """What ANTHROPIC_BASE_URL must be."""
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening and close every connection."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _request(reader)) is not None:
                async with self._changed:
                    self.requests.append(request)
                    self._changed.notify_all()
                if not await self._answer(self._choose(request), reader, writer):
                    return
        except ConnectionError:
            await self._count_broken_off()
        finally:
            writer.transport.abort()

    async def _count_broken_off(self) -> None:
        async with self._changed:
            self._broken_off += 1
            self._changed.notify_all()

    def _choose(self, request: Received) -> Reply:
        if request.headers.get("authorization") != f"Bearer {KEY}" and request.headers.get("x-api-key") != KEY:
            given = request.headers.get("authorization", "")
            return http_error(401, "authentication_error", f"invalid bearer token {given}")
        problem = complaint(request.body)
        if problem:
            return http_error(400, "invalid_request_error", problem)
        if self._context_bytes is not None and len(request.raw) > self._context_bytes:
            size = f"{len(request.raw)} tokens > {self._context_bytes} maximum"
            return http_error(400, "invalid_request_error", f"prompt is too long: {size}")
        if not self._replies:
            return http_error(400, "invalid_request_error", "the stub has no more replies")
        return self._replies.pop(0)

    async def _answer(self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Send one reply; True if the connection can take the next request."""
        headers = {"content-type": "text/event-stream", **reply.headers, "request-id": f"req_{len(self.requests)}"}
        if reply.status != 200:
            headers["content-length"] = str(len(reply.body))
            writer.write(_head(reply.status, headers) + reply.body)
            await writer.drain()
            return True
        writer.write(_head(200, headers | {"transfer-encoding": "chunked"}))
        for event in reply.events:
            if event == _STALL:
                await self._stall(reader)
                continue
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
            self.sent += 1
            await asyncio.sleep(0)  # one event, one packet: nothing but the loop's turn lies between them
        if reply.end == "reset":  # linger 0: the kernel sends RST
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if reply.end != "whole":
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _stall(self, reader: asyncio.StreamReader) -> None:
        """Wait for release() or for the client to go away, whichever is first."""
        released = asyncio.create_task(self._released.wait())
        gone = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({released, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not self._released.is_set():
                raise ConnectionResetError
        finally:
            released.cancel()
            gone.cancel()
            await asyncio.gather(released, gone, return_exceptions=True)


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Stub", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _request(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.split("\r\n")
    method, path, _ = first.split(" ")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
    }
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, path, headers, raw, json.loads(raw) if raw else {})


def complaint(body: Mapping[str, Any]) -> str:
    """Say what the real API would refuse in a request body; empty if nothing."""
    open_ids: list[str] = []
    for number, item in enumerate(body["messages"]):
        place = f"messages.{number}"
        blocks: list[dict[str, Any]] = item["content"]
        if not blocks:
            return f"{place}: content is empty"
        for block in blocks:
            kind = block["type"]
            if kind == "text" and not block["text"].strip():
                return f"{place}: text content blocks must contain non-whitespace text"
            if kind == "thinking" and not block.get("signature"):
                return f"{place}: thinking block without a signature"
            if kind == "tool_use" and not isinstance(block["input"], dict):
                return f"{place}: tool_use.input: Input should be a valid dictionary"
        kinds = [block["type"] for block in blocks]
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if kinds[: len(results)] != ["tool_result"] * len(results):
            return f"{place}: tool_result blocks must come first"
        if results != open_ids:
            return f"{place}: tool_use ids {open_ids} need exactly these tool_result blocks, found {results}"
        open_ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
    if open_ids:
        return f"tool_use ids were found without tool_result blocks immediately after: {open_ids}"
    if "system" in body and not body["system"]:
        return "system: text content blocks must be non-empty"
    return ""
