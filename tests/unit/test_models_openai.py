"""OpenAI's two APIs over a real local server: what arrives, what is sent back, and what a broken answer never becomes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asp_agent.errors import ContextFull, ModelRefused, ModelSetupError, ModelUnavailable
from asp_agent.messages import (
    AssistantTurn,
    Request,
    Retrying,
    Stop,
    TextDelta,
    ToolCall,
    ToolResult,
    ToolSchema,
    TurnDone,
    Usage,
    UserTurn,
)
from asp_agent.models import open_model
from asp_agent.models.retry import RetryPolicy

KEY = "sk-test-MARKER-0123456789"
TOOL = ToolSchema("bash", "runs", {"type": "object", "properties": {"command": {"type": "string"}}})
ASK = Request("be good", [UserTurn("hello")], [TOOL])


class Server:
    """Plays answers in order and keeps every request: a body of events, or (status, headers, body)."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def aclose(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.requests.append((head[0].split()[1], headers, json.loads(body)))
            answer = self.answers.pop(0)
            status, more, content = answer if isinstance(answer, tuple) else (200, {}, answer)
            kind = "text/event-stream" if status == 200 else "application/json"
            lines = [
                f"HTTP/1.1 {status} X",
                f"Content-Type: {kind}",
                "Connection: close",
                *(f"{k}: {v}" for k, v in more.items()),
            ]
            writer.write("\r\n".join([*lines, "", ""]).encode() + content)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    made = Server()
    await made.start()
    yield made
    await made.aclose()


def chat(*chunks: dict[str, Any], done: bool = True) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + (b"data: [DONE]\n\n" if done else b"")


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def fragment(index: int | None, call_id: str | None = None, name: str | None = None, arguments: Any = None) -> dict[str, Any]:
    function = {**({"name": name} if name else {}), **({"arguments": arguments} if arguments is not None else {})}
    return {**({"index": index} if index is not None else {}), **({"id": call_id} if call_id else {}), "function": function}


USAGE = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}}


def responses(*events: dict[str, Any]) -> bytes:
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)


def item(place: int, **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_item.done", "output_index": place, "item": fields}


def completed(status: str = "completed", **fields: Any) -> dict[str, Any]:
    usage = {"input_tokens": 10, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}}
    return {"type": f"response.{status}", "response": {"status": status, "usage": usage, **fields}}


SAID = item(1, type="message", role="assistant", id="m", content=[{"type": "output_text", "text": "Hi."}])
CALLED = item(2, type="function_call", call_id="c1", name="bash", arguments='{"command": "ls"}', id="f")
REASONED = item(0, type="reasoning", id="r", summary=[], encrypted_content="opaque")


async def ask(server: Server, provider: str, *answers: Any, request: Request = ASK) -> tuple[AssistantTurn, list[Any]]:
    server.answers += answers

    async def no_wait(_: float) -> None:
        return

    model = open_model(f"{provider}/m", base_url=server.url, retry=RetryPolicy(sleep=no_wait))
    try:
        events = [event async for event in model.stream(request)]
    finally:
        await model.aclose()
    assert isinstance(events[-1], TurnDone)
    return events[-1].turn, events[:-1]


async def test_a_chat_turn(server: Server) -> None:
    turn, events = await ask(
        server,
        "openai-chat",
        chat(
            delta(role="assistant", content=""),
            delta(content="I "),
            delta(content="look."),
            delta(tool_calls=[fragment(0, "c1", "bash", "")]),
            delta(tool_calls=[fragment(0, None, None, '{"comm')]),
            delta(tool_calls=[fragment(0, None, None, 'and": "ls"}'), fragment(1, "c2", "bash", "{}")]),
            delta("tool_calls"),
            USAGE,
        ),
    )
    assert turn == AssistantTurn(
        "I look.",
        (ToolCall("c1", "bash", '{"command": "ls"}'), ToolCall("c2", "bash", "{}")),
        Stop.TOOL_CALLS,
        Usage(10, 4, None, 3),
        ("openai", "chat", "m"),
    )
    assert events == [TextDelta("I "), TextDelta("look.")]
    path, headers, body = server.requests[0]
    assert (path, headers["authorization"]) == ("/v1/chat/completions", f"bearer {KEY.lower()}")
    assert body["messages"] == [{"role": "system", "content": "be good"}, {"role": "user", "content": "hello"}]
    assert body["tools"][0]["function"] == {"name": "bash", "description": "runs", "parameters": TOOL.parameters}
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("chunks", "calls", "stop"),
    [
        ([delta(tool_calls=[fragment(None, "a", "bash", "{}")]), delta("stop")], [("a", "{}")], Stop.TOOL_CALLS),
        (
            [
                delta(tool_calls=[fragment(0, "a", "bash", "{}")]),
                delta(tool_calls=[fragment(0, "b", "bash", "{}")]),
                delta("tool_calls"),
            ],
            [("a", "{}"), ("b", "{}")],
            Stop.TOOL_CALLS,
        ),
        (
            [
                delta(tool_calls=[fragment(0, None, "bash", '{"a":')]),
                delta(tool_calls=[fragment(0, None, None, "1}")]),
                delta("tool_calls"),
            ],
            [("call_1", '{"a":1}')],
            Stop.TOOL_CALLS,
        ),
        ([delta(tool_calls=[fragment(0, "a", "bash", {"x": 1})]), delta("tool_calls")], [("a", '{"x": 1}')], Stop.TOOL_CALLS),
        ([delta(content="x"), delta("stop")], [], Stop.DONE),
        ([delta(content="x")], [], Stop.DONE),
        ([delta(content="x"), delta("length")], [], Stop.LENGTH),
        ([delta(content="x"), delta("content_filter")], [], Stop.REFUSAL),
        ([delta(content="x"), delta("brand_new")], [], Stop.REFUSAL),
        ([delta(refusal="no"), delta("stop")], [], Stop.REFUSAL),
        ([delta(tool_calls=[fragment(0, "a", "bash", '{"comma')]), delta("length")], [("a", '{"comma')], Stop.LENGTH),
    ],
)
async def test_chat_quirks(server: Server, chunks: list[dict[str, Any]], calls: list[tuple[str, str]], stop: Stop) -> None:
    turn, _ = await ask(server, "openai-chat", chat(*chunks))
    assert [(call.id, call.raw_arguments) for call in turn.tool_calls] == calls
    assert turn.stop is stop
    assert turn.usage == Usage()


async def test_a_responses_turn_and_what_goes_back(server: Server) -> None:
    turn, events = await ask(
        server, "openai", responses({"type": "response.output_text.delta", "delta": "Hi."}, REASONED, SAID, CALLED, completed())
    )
    assert (turn.text, turn.stop, turn.usage) == ("Hi.", Stop.TOOL_CALLS, Usage(10, 4, None, 3))
    assert turn.tool_calls == (ToolCall("c1", "bash", '{"command": "ls"}'),)
    assert events == [TextDelta("Hi.")]
    body = server.requests[0][2]
    assert (body["store"], body["include"], body["instructions"]) == (False, ["reasoning.encrypted_content"], "be good")
    history = [UserTurn("hello"), turn, UserTurn(results=(ToolResult("c1", "bash", "files"),))]
    answer = responses(item(0, type="message", content=[{"type": "output_text", "text": "x"}]), completed())
    await ask(server, "openai", answer, request=Request("", history, []))
    sent = server.requests[1][2]["input"]
    assert sent[1:4] == [REASONED["item"], SAID["item"], CALLED["item"]], "its own items, untouched"
    assert sent[4] == {"type": "function_call_output", "call_id": "c1", "output": "files"}
    await ask(server, "openai-chat", chat(delta(content="x"), delta("stop")), request=Request("", history, []))
    assert server.requests[2][2]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "Hi.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "files"},
    ], "another API gets text and calls only"


@pytest.mark.parametrize(
    ("events", "stop"),
    [
        ([SAID, completed()], Stop.DONE),
        ([SAID, completed("incomplete", incomplete_details={"reason": "max_output_tokens"})], Stop.LENGTH),
        ([CALLED, completed("incomplete", incomplete_details={"reason": "content_filter"})], Stop.REFUSAL),
        ([item(0, type="message", content=[{"type": "refusal", "refusal": "no"}]), completed()], Stop.REFUSAL),
    ],
)
async def test_how_a_responses_turn_ends(server: Server, events: list[dict[str, Any]], stop: Stop) -> None:
    assert (await ask(server, "openai", responses(*events)))[0].stop is stop


BROKEN = {
    "openai-chat": [
        chat(delta(content="half"), done=False),
        b"",
        chat(delta(tool_calls=[fragment(0, "a", "bash", "{")]), done=False),
        chat(delta("tool_calls")),
        b"data: {\n\n",
        b"data: [1]\n\n",
        b"data: \xff\n\n",
        chat({"error": {"message": "overloaded", "code": 503}}),
        (500, {}, b"{}"),
        (429, {"Retry-After": "1"}, b'{"error": {"message": "slow"}}'),
    ],
    "openai": [
        responses(SAID),
        b"",
        responses(CALLED),
        responses(item(0, type="function_call", name="bash", arguments="{}"), completed()),
        responses({"type": "response.failed", "response": {"error": {"code": "server_error", "message": "x"}}}),
        responses({"type": "error", "code": "rate_limit_exceeded", "message": "x"}),
        (503, {}, b"down"),
        b"data: {\n\n",
        responses({"type": "response.completed", "response": 5}),
        responses({"type": "response.output_item.done", "item": 5}),
    ],
}


@pytest.mark.parametrize("provider", BROKEN)
async def test_a_broken_answer_is_asked_for_again_and_never_a_turn(server: Server, provider: str) -> None:
    good = chat(delta(content="ok"), delta("stop")) if provider == "openai-chat" else responses(SAID, completed())
    for answer in BROKEN[provider]:
        turn, events = await ask(server, provider, answer, good)
        assert turn.tool_calls == ()
        assert [type(event) for event in events if not isinstance(event, TextDelta)] == [Retrying], answer
        assert KEY not in str(events)
    with pytest.raises(ModelUnavailable, match="no whole answer after 6 tries"):
        await ask(server, provider, *[b""] * 6)


@pytest.mark.parametrize("provider", BROKEN)
@pytest.mark.parametrize(
    ("status", "body", "error", "says"),
    [
        (
            400,
            {"message": "This model's maximum context length is 5", "code": "context_length_exceeded"},
            ContextFull,
            "the context is full",
        ),
        (400, {"message": f"bad {KEY}"}, ModelRefused, "the request was refused"),
        (401, {"message": "Incorrect API key"}, ModelSetupError, "the API key was refused"),
        (402, {"message": "pay"}, ModelRefused, "payment is required"),
        (404, {"message": "no model"}, ModelSetupError, "no such model"),
        (
            429,
            {"message": "quota", "code": "insufficient_quota", "type": "insufficient_quota"},
            ModelRefused,
            "the quota is used up",
        ),
    ],
)
async def test_refusals_are_not_tried_again(
    server: Server, provider: str, status: int, body: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as refused:
        await ask(server, provider, (status, {}, json.dumps({"error": body}).encode()))
    assert len(server.requests) == 1
    assert KEY not in str(refused.value)
    assert refused.value.__context__ is None


async def test_setting_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    for provider in ("openai/m", "openai-chat/m"):
        with pytest.raises(ModelSetupError, match="OPENAI_API_KEY"):
            open_model(provider)
    turn, _ = await ask(server, "openai-chat", chat(delta(content="x"), delta("stop")))
    assert turn.text == "x", "a server of one's own asks for no key"
    monkeypatch.setenv("OPENAI_API_KEY", "two words")
    with pytest.raises(ModelSetupError, match="a space"):
        open_model("openai/m")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for url in ("ftp://x", "nothing", "http://"):
        with pytest.raises(ModelSetupError, match=r"address|set up"):
            open_model("openai-chat/m", base_url=url)
    with pytest.raises(ModelUnavailable, match=r"the connection to 127\.0\.0\.1 failed"):
        await server.aclose()
        await ask(server, "openai-chat")


async def test_arguments_that_are_no_object_go_back_as_one(server: Server) -> None:
    turn = AssistantTurn(
        "", (ToolCall("a", "bash", '{"comma'), ToolCall("b", "bash", "[1]")), Stop.TOOL_CALLS, Usage(), ("x", "y", "z")
    )
    history = [UserTurn("go"), turn, UserTurn(results=(ToolResult("a", "bash", "bad"), ToolResult("b", "bash", "bad")))]
    await ask(server, "openai", responses(SAID, completed()), request=Request("", history, []))
    sent = server.requests[0][2]["input"]
    assert [one.get("arguments") for one in sent[1:3]] == ["{}", "{}"]
    assert [one.get("call_id") for one in sent[3:]] == ["a", "b"]
