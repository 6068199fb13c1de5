"""The Messages API driver on a real local server: whole answers, every broken one, and no key anywhere (L2, P62)."""

import asyncio
import json
import logging
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from anthropic_stub import (
    KEY,
    AnthropicStub,
    Reply,
    http_error,
    message,
    sse,
    text_block,
    thinking_block,
    tool_block,
    turn,
)
from llmock.pytest_plugin import LLMock

from asp_agent.errors import ModelError, ModelRefused, ModelSetupError, ModelUnavailable
from asp_agent.messages import (
    AssistantTurn,
    Model,
    ModelEvent,
    Request,
    Retrying,
    Stop,
    TextDelta,
    ToolCall,
    ToolResult,
    ToolSchema,
    Turn,
    TurnDone,
    Usage,
    UserTurn,
)
from asp_agent.models import open_model
from asp_agent.models.anthropic import AnthropicModel
from asp_agent.models.retry import RetryPolicy

SOURCE = ("anthropic", "messages", "claude-test")
BASH = ToolSchema("bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
HELLO = UserTurn("Hello.")
ENVIRONMENT = ("API_KEY", "AUTH_TOKEN", "BASE_URL", "CUSTOM_HEADERS", "PROFILE", "CONFIG_DIR", "LOG")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real environment, its keys, its proxies and the profiles on its disk play no part."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"ANTHROPIC_{name}", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)


class Naps:
    """A sleep that takes no time and remembers."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    async def __call__(self, wait_s: float) -> None:
        self.waits_s.append(wait_s)


@asynccontextmanager
async def served(
    *replies: Reply, name: str = "claude-test", read_timeout_s: float = 30.0, tries: int = 6, **stub: int
) -> AsyncGenerator[tuple[AnthropicModel, AnthropicStub], None]:
    async with AnthropicStub(*replies, **stub) as server:
        retry = RetryPolicy(tries=tries, sleep=Naps(), jitter=lambda: 0.0)
        model = AnthropicModel(name, base_url=server.base_url, read_timeout_s=read_timeout_s, retry=retry)
        try:
            yield model, server
        finally:
            await model.aclose()


async def events_of(
    model: Model, *history: Turn, system: str = "", tools: Sequence[ToolSchema] = ()
) -> list[ModelEvent]:
    return [event async for event in model.stream(Request(system, history or (HELLO,), tools))]


async def collect(model: Model, shown: list[ModelEvent]) -> None:
    async for event in model.stream(Request("", (HELLO,), ())):
        shown.append(event)  # noqa: PERF401 - kept also when the stream fails


def only_turn(events: Sequence[ModelEvent]) -> AssistantTurn:
    turns = [event.turn for event in events if isinstance(event, TurnDone)]
    assert len(turns) == 1
    assert isinstance(events[-1], TurnDone)
    return turns[0]


async def turn_of(model: Model, *history: Turn) -> AssistantTurn:
    return only_turn(await events_of(model, *history))


def results(*calls: ToolCall) -> tuple[ToolResult, ...]:
    return tuple(ToolResult(call.id, call.name, f"result of {call.id}") for call in calls)


# What is sent


async def test_the_request_as_it_arrives() -> None:
    async with served(turn("Hi.")) as (model, stub):
        await events_of(model, HELLO, system="Be brief.", tools=[BASH])
    (request,) = stub.requests
    assert (request.method, request.path) == ("POST", "/v1/messages")
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.body == {
        "model": "claude-test",
        "max_tokens": 16_000,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}],
        "tools": [{"name": "bash", "description": "Run a command.", "input_schema": BASH.parameters}],
        "cache_control": {"type": "ephemeral"},
        "stream": True,
    }


async def test_what_is_empty_is_not_sent() -> None:
    history: list[Turn] = [
        HELLO,
        AssistantTurn(" \n", (ToolCall("a", "bash", "{}"),), Stop.TOOL_CALLS, Usage(), ("x", "y", "z")),
        UserTurn("", (ToolResult("a", "bash", ""),)),
        AssistantTurn("", (), Stop.DONE, Usage(), ("x", "y", "z")),
        UserTurn("\n"),
        UserTurn("Go on."),
    ]
    async with served(turn("ok")) as (model, stub):
        await events_of(model, *history, system=" ")
    (body,) = stub.bodies
    assert "system" not in body
    assert "tools" not in body
    assert body["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "bash", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "is_error": False}]},
        {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
    ]


async def test_all_results_go_in_one_message_first_and_in_call_order_then_text() -> None:
    tools: list[tuple[str, object]] = [("bash", {"command": c}) for c in ("false", "echo b", "echo c")]
    async with served(turn("Three.", tools), turn("Done.")) as (model, stub):
        first = await turn_of(model)
        given = results(*first.tool_calls)
        failed = ToolResult(given[0].tool_call_id, "bash", "no", is_error=True)
        await turn_of(model, HELLO, first, UserTurn("Also this.", (failed, *given[1:])))
    last = stub.bodies[1]["messages"][-1]
    assert last == {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no", "is_error": True},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "result of toolu_2", "is_error": False},
            {"type": "tool_result", "tool_use_id": "toolu_3", "content": "result of toolu_3", "is_error": False},
            {"type": "text", "text": "Also this."},
        ],
    }


async def test_the_base_url_of_the_environment_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AnthropicStub(turn("Hi.")) as stub:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", stub.base_url)
        model = open_model("anthropic/claude-test")
        assert (model.name, model.scripted) == ("anthropic/claude-test", False)
        assert (await turn_of(model)).text == "Hi."
        await model.aclose()


async def test_text_that_is_not_unicode_can_be_sent() -> None:
    """A lone surrogate in any string would make every later request of the run unsendable."""
    call = ToolCall("a", "bash", '{"command": "\\ud800"}')
    history: list[Turn] = [
        UserTurn("bytes \udcff"),
        AssistantTurn("", (call,), Stop.TOOL_CALLS, Usage(), ("x", "y", "z")),
        UserTurn("", (ToolResult("a", "bash", "pair \ud83d\ude00 lone \ud800"),)),
    ]
    async with served(turn("ok"), name="claude-\udcfe") as (model, stub):
        await events_of(model, *history, system="\udcfd")
    sent = json.dumps(stub.bodies, ensure_ascii=False)
    assert "bytes \ufffd" in sent
    assert "pair \N{GRINNING FACE} lone \ufffd" in sent


# Whole answers


async def test_text_arrives_while_the_answer_is_still_being_written() -> None:
    text = "One two three four five."
    async with served(turn(text).stall(7)) as (model, stub):
        stream = model.stream(Request("", (HELLO,), ()))
        first = [await anext(stream) for _ in range(4)]  # the stub holds the rest back until it is released
        assert first == [TextDelta("One "), TextDelta("two "), TextDelta("thre"), TextDelta("e fo")]
        stub.release()
        rest = [event async for event in stream]
    assert [event.text for event in rest[:-1] if isinstance(event, TextDelta)] == ["ur f", "ive."]
    assert only_turn(rest).text == text


async def test_a_turn_with_calls_keeps_their_exact_text() -> None:
    raw = '{"command":  "ls\\t-la",\n "n": 1.0, "n": 2}'
    async with served(turn("Look.", [("bash", raw), ("read", "")])) as (model, _):
        got = await turn_of(model)
    assert got.tool_calls == (ToolCall("toolu_1", "bash", raw), ToolCall("toolu_2", "read", "{}"))
    assert (got.text, got.stop, got.source, got.stop_detail) == ("Look.", Stop.TOOL_CALLS, SOURCE, "")


async def test_arguments_that_come_whole_with_the_start_of_their_block() -> None:
    block = {"type": "tool_use", "id": "t", "name": "bash", "input": {"command": "ls é"}}
    start = sse("content_block_start", {"index": 0, "content_block": block})
    async with served(message([start], "tool_use", {})) as (model, _):
        got = await turn_of(model)
    assert got.tool_calls == (ToolCall("t", "bash", '{"command": "ls é"}'),)
    assert got.native == (block,)


async def test_blocks_that_stream_side_by_side_are_kept_apart() -> None:
    one, two = tool_block(0, "bash", {"command": "a"}, "t1"), tool_block(1, "bash", {"command": "b"}, "t2")
    mixed = [event for pair in zip(one, two, strict=True) for event in pair]
    async with served(message(mixed, "tool_use", {})) as (model, _):
        got = await turn_of(model)
    assert [(call.id, json.loads(call.raw_arguments)) for call in got.tool_calls] == [
        ("t1", {"command": "a"}),
        ("t2", {"command": "b"}),
    ]


@pytest.mark.parametrize(
    ("reason", "stop"),
    [
        ("end_turn", Stop.DONE),
        ("stop_sequence", Stop.DONE),
        ("max_tokens", Stop.LENGTH),
        ("model_context_window_exceeded", Stop.CONTEXT_FULL),
        ("pause_turn", Stop.PAUSED),
        ("refusal", Stop.REFUSAL),
    ],
)
async def test_stop_reasons(reason: str, stop: Stop) -> None:
    async with served(turn("x", stop=reason)) as (model, _):
        got = await turn_of(model)
    assert (got.stop, got.stop_detail) == (stop, "")


async def test_only_tool_use_lets_tools_run() -> None:
    """Calls under any other stop reason are there to be answered, never to be run (L2, P69)."""
    for reason in (
        "end_turn",
        "stop_sequence",
        "max_tokens",
        "refusal",
        "pause_turn",
        "compaction",
        "brand_new\x1b[2J",
    ):
        async with served(turn("", [("bash", {"command": "rm"})], stop=reason)) as (model, _):
            got = await turn_of(model)
        assert got.stop not in {Stop.TOOL_CALLS, Stop.DONE}
        assert len(got.tool_calls) == 1
        if reason in {"end_turn", "stop_sequence"}:
            assert (got.stop, got.stop_detail) == (
                Stop.REFUSAL,
                f'the turn ended with "{reason}" although it holds tool calls',
            )


async def test_an_unknown_stop_reason_is_not_taken_for_done() -> None:
    async with served(turn("x", stop="brand_new\x1b[2J")) as (model, _):
        got = await turn_of(model)
    assert (got.stop, got.stop_detail) == (Stop.REFUSAL, 'unknown stop reason "brand_new^[[2J"')


async def test_a_refusal_says_why() -> None:
    details = {"type": "refusal", "category": "cyber", "explanation": "Not this.\n" + "x" * 500}
    async with served(turn("I can", stop="refusal", stop_details=details)) as (model, _):
        got = await turn_of(model)
    assert got.stop is Stop.REFUSAL
    assert got.stop_detail.startswith('"cyber": "Not this.^Jxxx')
    assert len(got.stop_detail) < 220


async def test_usage_counts_the_cache_and_the_last_word_wins() -> None:
    usage = {"input_tokens": 10, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 7, "output_tokens": 42}
    late = sse("message_delta", {"delta": {"stop_reason": None}, "usage": {"output_tokens": 3, "input_tokens": 11}})
    reply = turn("x", usage=usage)
    async with served(reply.insert(3, late), turn("y", usage={"cache_read_input_tokens": None})) as (model, _):
        assert (await turn_of(model)).usage == Usage(23, 5, 7, 42)
        assert (await turn_of(model)).usage == Usage(0, None, None, 7)


async def test_usage_that_is_not_told_is_unknown_and_not_zero() -> None:
    start = sse("message_start", {"message": {"content": []}})
    end = [sse("message_delta", {"delta": {"stop_reason": "end_turn"}}), sse("message_stop", {})]
    async with served(Reply((start, *text_block(0, "Hi."), *end))) as (model, _):
        assert (await turn_of(model)).usage == Usage(None, None, None, None)


async def test_unknown_events_and_blocks_do_no_harm() -> None:
    new = {"type": "brand_new", "data": {"deep": [1, None]}}
    odd = {"type": "odd", "value": ""}
    blocks = [
        sse("content_block_start", {"index": 0, "content_block": new}),
        sse("content_block_stop", {"index": 0}),
        sse("content_block_start", {"index": 1, "content_block": odd}),
        sse("content_block_delta", {"index": 1, "delta": {"type": "odd_delta", "value": "x"}}),
        sse("brand_new_event", {"anything": True}),
        b": a comment\n\n",
        *text_block(2, "Hi."),
    ]
    async with served(message(blocks, "end_turn", {})) as (model, _):
        events = await events_of(model)
    got = only_turn(events)
    assert got.text == "Hi."
    assert got.native == (new, {"type": "text", "text": "Hi."})  # the half-understood block cannot go back


async def test_an_empty_answer_is_a_turn() -> None:
    async with served(turn(), turn("More.")) as (model, stub):
        got = await turn_of(model)
        assert (got.text, got.tool_calls, got.stop) == ("", (), Stop.DONE)
        await turn_of(model, HELLO, got, UserTurn("And?"))
    assert [item["role"] for item in stub.bodies[1]["messages"]] == ["user", "user"]


async def test_one_connection_serves_a_whole_run() -> None:
    async with served(*[turn("x")] * 5) as (model, stub):
        for _ in range(5):
            await turn_of(model)
        assert stub.connections == 1


async def test_what_comes_after_the_end_of_a_turn_does_not_matter() -> None:
    reply = turn("whole")
    last = reply.events[-1] + sse("error", {"error": {"type": "api_error"}}) + b"data: [DONE]\n\n"
    async with served(Reply((*reply.events[:-1], last)), turn("next")) as (model, stub):
        assert (await turn_of(model)).text == "whole"
        assert (await turn_of(model)).text == "next"
        assert len(stub.requests) == 2


@pytest.mark.parametrize("end", [b"\r\n", b"\r", b"\n"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_events_may_be_cut_anywhere_and_lines_end_in_any_way(end: bytes, size: int) -> None:
    whole = turn("Héllo wörld.", [("bash", {"command": "ls"})])
    raw = b"".join(whole.events).replace(b"\n", end) + b": a comment"
    chunks = tuple(raw[at : at + size] for at in range(0, len(raw), size))
    async with served(Reply(chunks)) as (model, _):
        got = await turn_of(model)
    assert (got.text, got.tool_calls) == ("Héllo wörld.", (ToolCall("toolu_1", "bash", '{"command": "ls"}'),))


async def test_a_turn_counts_although_the_stream_does_not_end() -> None:
    reply = turn("whole")
    async with served(reply.stall(len(reply.events)), turn("next")) as (model, _):
        assert (await turn_of(model)).text == "whole"
        assert (await turn_of(model)).text == "next"


# Replay


async def test_native_items_go_back_unchanged_and_in_order() -> None:
    signature = "EqQB/+==é\\u00e9\"'" * 9
    redacted = {"type": "redacted_thinking", "data": "opaque=="}
    blocks = [
        *thinking_block(0, "Hm, let me\nsee… ", signature),
        sse("content_block_start", {"index": 1, "content_block": redacted}),
        *text_block(2, "I look."),
        *tool_block(3, "bash", '{"z": 1, "a":  {"b": []}}', "toolu_1"),
    ]
    async with served(message(blocks, "tool_use", {}), turn("Done.")) as (model, stub):
        first = await turn_of(model)
        stored = json.loads(json.dumps(first.native))  # as a resumed run has it
        resumed = AssistantTurn(
            first.text, first.tool_calls, first.stop, first.usage, first.source, tuple(stored), first.stop_detail
        )
        await turn_of(model, HELLO, resumed, UserTurn("", results(*first.tool_calls)))
    assert stub.bodies[1]["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "Hm, let me\nsee… ", "signature": signature},
        redacted,
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"z": 1, "a": {"b": []}}},
    ]
    assert json.dumps(signature, ensure_ascii=False).encode() in stub.requests[1].raw


@pytest.mark.parametrize(
    "source",
    [
        ("anthropic", "messages", "claude-other"),
        ("anthropic", "other", "claude-test"),
        ("openai", "messages", "claude-test"),
    ],
)
async def test_thinking_of_another_source_is_left_out(source: tuple[str, str, str]) -> None:
    native = (
        {"type": "thinking", "thinking": "secret thoughts", "signature": "foreign"},
        {"type": "text", "text": "?"},
    )
    calls = (ToolCall("call:1|é", "bash tool", '{"command": "ls"}'), ToolCall("", "", "nonsense"))
    other = AssistantTurn("I look.", calls, Stop.TOOL_CALLS, Usage(), source, native)
    async with served(turn("ok")) as (model, stub):
        await turn_of(model, HELLO, other, UserTurn("", results(*calls)))
    assert b"foreign" not in stub.requests[0].raw
    _, assistant, user = stub.bodies[0]["messages"]
    assert assistant["content"] == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_1__", "name": "bash_tool", "input": {"command": "ls"}},
        {"type": "tool_use", "id": "_", "name": "_", "input": {}},
    ]
    assert [block["tool_use_id"] for block in user["content"]] == ["call_1__", "_"]


BAD_ARGUMENTS = [
    '{"command": "ls"',  # cut
    '{"command": ls}',
    "[]",
    "null",
    '"ls"',
    "7",
    '{"n": NaN}',
    '{"n": 1e999}',
    '{"n": -Infinity}',
    "[" * 100_000,
    '{"a":' * 95 + "1" + "}" * 95,
    '{"n": ' + "1" * 5000 + "}",
]


@pytest.mark.parametrize("raw", BAD_ARGUMENTS, ids=lambda raw: raw[:20])
async def test_wrong_arguments_are_kept_for_the_tools_and_go_back_as_an_object(raw: str) -> None:
    async with served(turn("", [("bash", raw)]), turn("", [("bash", raw)]), turn("Sorry.")) as (model, stub):
        first = await turn_of(model)
        assert first.tool_calls == (ToolCall("toolu_1", "bash", raw),)
        # Once from native items and once rebuilt: the strict stub takes both.
        foreign = AssistantTurn("", first.tool_calls, first.stop, first.usage, ("x", "y", "z"))
        for replayed in (first, foreign):
            await turn_of(model, HELLO, replayed, UserTurn("", results(*first.tool_calls)))
    for body in stub.bodies[1:]:
        assert [block["input"] for block in body["messages"][1]["content"]] == [{}]


async def test_a_cut_turn_can_be_replayed() -> None:
    """max_tokens may strike inside thinking, before its signature, or inside a call."""
    cut_thinking = thinking_block(0, "half a thought", "")[:-1]
    cut_call = [*text_block(0, " "), *tool_block(1, "write", '{"path": "a", "content": "half', "t")]
    async with served(message(cut_thinking, "max_tokens", {}), message(cut_call, "max_tokens", {}), turn("ok")) as (
        model,
        stub,
    ):
        one, two = await turn_of(model), await turn_of(model)
        assert (one.stop, two.stop) == (Stop.LENGTH, Stop.LENGTH)
        await turn_of(model, HELLO, one, HELLO, two, UserTurn("", results(*two.tool_calls)))
    _, _, assistant, _ = stub.bodies[2]["messages"]
    assert assistant["content"] == [{"type": "tool_use", "id": "t", "name": "write", "input": {}}]


async def test_a_paused_turn_goes_back_as_the_last_message() -> None:
    async with served(turn("Searching.", stop="pause_turn"), turn("Found.")) as (model, stub):
        paused = await turn_of(model)
        assert (await turn_of(model, HELLO, paused)).text == "Found."
    assert stub.bodies[1]["messages"][-1] == {"role": "assistant", "content": [{"type": "text", "text": "Searching."}]}


async def test_a_pair_of_surrogates_in_two_pieces_is_one_character() -> None:
    pieces: list[dict[str, Any]] = [{"type": "text_delta", "text": half} for half in ("\ud83d", "\ude00", "\udfff")]
    blocks = [sse("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})]
    blocks += [sse("content_block_delta", {"index": 0, "delta": piece}) for piece in pieces]
    async with served(message(blocks, "end_turn", {}), turn("ok")) as (model, _):
        got = await turn_of(model)
        assert got.text == "\N{GRINNING FACE}\ufffd"
        await turn_of(model, HELLO, got, HELLO)


# Broken answers


WHOLE = turn("Working on it.", [("bash", {"command": "rm -rf build"})])
LAST = len(WHOLE.events)
NO_INDEX = sse("content_block_delta", {"delta": {"type": "text_delta", "text": "x"}})
TWICE = sse("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
NEVER_BEGAN = sse("content_block_delta", {"index": 9, "delta": {"type": "text_delta", "text": "x"}})
NO_TEXT = sse("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": None}})
DEEP = sse(
    "content_block_start", {"index": 0, "content_block": {"type": "new", "x": json.loads("[" * 120 + "]" * 120)}}
)
BROKEN = {
    "cut": (WHOLE.cut(9), "failed: "),
    "cut after a whole call": (WHOLE.cut(LAST - 2), "failed: "),
    "reset": (WHOLE.reset(9), "failed: "),
    "early end": (WHOLE.eof(9), "the stream was cut before the end of the turn"),
    "no message_stop": (WHOLE.eof(LAST - 1), "the stream was cut before the end of the turn"),
    "no stop reason": (message(text_block(0, "x"), "", {}), "the stream was cut before the end of the turn"),
    "nothing": (WHOLE.eof(0), "no answer came"),
    "a web page": (Reply((b"<html>log in</html>\n\n",), headers={"content-type": "text/html"}), "no answer came"),
    "overloaded event": (WHOLE.error(9), 'overloaded (529): "Overloaded"'),
    "rate limit event": (WHOLE.error(9, "rate_limit_error", "slow"), 'rate limited (429): "slow"'),
    "api error event": (WHOLE.error(1, "api_error", "oops"), 'the API failed (500): "oops"'),
    "unknown error event": (WHOLE.error(9, "new_error", "hm"), 'the API failed (500): "hm"'),
    "error event of no form": (WHOLE.insert(9, sse("error", {"error": "x"})), "the API failed (500)"),
    "not JSON": (WHOLE.insert(9, b"event: message_delta\ndata: {\n\n"), "an event that is not JSON"),
    "NaN": (WHOLE.insert(9, b'event: message_delta\ndata: {"a": NaN}\n\n'), "an event that is not JSON"),
    "not UTF-8": (WHOLE.insert(9, b"event: message_delta\ndata: \xff\n\n"), "an event that is not UTF-8"),
    "not an object": (WHOLE.insert(9, b"event: message_delta\ndata: [1]\n\n"), "an event of an unknown form"),
    "no index": (WHOLE.insert(9, NO_INDEX), "a content block without a number"),
    "began twice": (WHOLE.insert(9, TWICE), "a content block began twice"),
    "never began": (WHOLE.insert(9, NEVER_BEGAN), "a content block goes on that never began"),
    "no text": (WHOLE.insert(4, NO_TEXT), "a content block of an unknown form"),
    "too deep": (message([DEEP], "end_turn", {}), "an item nested too deeply"),
    "no call": (turn("x", stop="tool_use"), "the turn announced tool calls and holds none"),
    "call without id": (
        message(tool_block(0, "bash", {}, ""), "tool_use", {}),
        "tool calls without an id of their own",
    ),
    "one id twice": (
        message([*tool_block(0, "bash", {}, "t"), *tool_block(1, "bash", {}, "t")], "tool_use", {}),
        "tool calls without an id of their own",
    ),
    "529": (http_error(529, "overloaded_error", "Overloaded"), 'overloaded (529): "Overloaded"'),
    "503": (http_error(503), 'the API failed (503): "no"'),
    "500 without a body": (Reply(status=500), "the API failed (500)"),
    "502 of a proxy": (Reply(status=502, body=b"<h1>Bad\nGateway\x1b[2J</h1>"), '(502): "<h1>Bad^JGateway^[[2J</h1>"'),
    "408": (http_error(408), 'timed out (408): "no"'),
    "409": (http_error(409), 'the API failed (409): "no"'),
    "429": (http_error(429, "rate_limit_error", "slow"), 'rate limited (429): "slow"'),
}


@pytest.mark.parametrize("fault", BROKEN)
async def test_a_broken_answer_is_no_turn_and_is_asked_again(fault: str) -> None:
    reply, reason = BROKEN[fault]
    async with served(reply, reply, turn("Whole.")) as (model, stub):
        events = await events_of(model)
        assert len(stub.requests) == 3
        assert stub.requests[0].raw == stub.requests[1].raw == stub.requests[2].raw
    retries = [event for event in events if isinstance(event, Retrying)]
    assert [(retry.attempt, retry.wait_s) for retry in retries] == [(2, 1.0), (3, 3.0)]
    assert all(reason in retry.reason and "\n" not in retry.reason for retry in retries)
    got = only_turn(events)
    assert (got.text, got.tool_calls, got.stop) == ("Whole.", (), Stop.DONE)


async def test_a_silent_stream_is_given_up() -> None:
    async with served(turn("Slow").stall(3), turn("Whole."), read_timeout_s=0.2) as (model, stub):
        events = await events_of(model)
        await stub.wait_for_broken_off()
    assert [event.reason for event in events if isinstance(event, Retrying)] == [
        "nothing came from 127.0.0.1 for 0.2 s"
    ]
    assert only_turn(events).text == "Whole."


async def test_a_server_that_is_not_there_is_named_after_the_last_try() -> None:
    async with AnthropicStub() as gone:
        base_url = gone.base_url
    naps = Naps()
    model = AnthropicModel("claude-test", base_url=base_url, retry=RetryPolicy(sleep=naps, jitter=lambda: 0.0))
    with pytest.raises(
        ModelUnavailable, match=r"after 6 tries; the last one: the connection to 127\.0\.0\.1 failed"
    ) as caught:
        await events_of(model)
    await model.aclose()
    assert caught.value.exit_code == 4
    assert naps.waits_s == [1.0, 3.0, 9.0, 27.0, 60.0]
    assert_unchained(caught.value)


async def test_an_api_that_stays_down_is_asked_six_times() -> None:
    async with served(*[http_error(529, "overloaded_error", "Overloaded")] * 9) as (model, stub):
        with pytest.raises(ModelUnavailable, match=r"no whole answer after 6 tries; the last one: overloaded"):
            await events_of(model)
        assert len(stub.requests) == 6


@pytest.mark.parametrize(
    ("retry_after", "wait_s"),
    [("2", 2.0), ("abc", 1.0), ("-5", 1.0), ("3600", 60.0), ("Fri, 31 Dec 2100 23:59:59 GMT", 60.0)],
)
async def test_retry_after_is_obeyed_within_bounds(retry_after: str, wait_s: float) -> None:
    async with served(http_error(429, "rate_limit_error", "slow", retry_after=retry_after), turn("ok")) as (model, _):
        events = await events_of(model)
    assert [event.wait_s for event in events if isinstance(event, Retrying)] == [wait_s]
    only_turn(events)


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (http_error(400, "invalid_request_error", "bad"), ModelRefused, 'the request was refused (400): "bad"'),
        (http_error(401, "authentication_error", "bad key"), ModelSetupError, "export ANTHROPIC_API_KEY=..."),
        (http_error(402, "billing_error", "pay"), ModelRefused, 'payment is required (402): "pay"'),
        (http_error(403, "permission_error", "no"), ModelRefused, 'not permitted (403): "no"'),
        (
            http_error(404, "not_found_error", "model: x"),
            ModelSetupError,
            'no such model, or a wrong --base-url (404): "mo',
        ),
        (http_error(413, "request_too_large", "big"), ModelRefused, 'the request is too large (413): "big"'),
        (http_error(422, "invalid_request_error", "?"), ModelRefused, 'the request was refused (422): "?"'),
        (Reply(status=404, body=b"<html>nothing here"), ModelSetupError, '(404): "<html>nothing here"'),
        (turn("x").error(3, "invalid_request_error", "bad"), ModelRefused, 'the request was refused (400): "bad"'),
        (turn("x").error(3, "authentication_error", "bad"), ModelSetupError, "export ANTHROPIC_API_KEY=..."),
        (turn("x").error(3, "billing_error", "pay"), ModelRefused, 'payment is required (402): "pay"'),
    ],
)
async def test_a_refusal_of_the_api_is_one_line_and_final(reply: Reply, error: type[ModelError], text: str) -> None:
    async with served(reply, turn("never")) as (model, stub):
        with pytest.raises(error) as caught:
            await events_of(model)
        assert len(stub.requests) == 1
    assert str(caught.value).startswith("anthropic/claude-test: ")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_unchained(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        "prompt is too long: 210000 tokens > 200000 maximum",
        "input length and `max_tokens` exceed context limit: 199000 + 16000 > 200000",
        "request (6033 tokens) exceeds the available context size (4096 tokens), try increasing it",
        "This model's maximum context length was exceeded.",
        "Your input exceeds the context window of this model.",
    ],
)
async def test_a_full_context_is_called_so(said: str) -> None:
    async with served(http_error(400, "invalid_request_error", said)) as (model, _):
        with pytest.raises(ModelRefused, match="the context is full"):
            await events_of(model)


async def test_the_stub_fills_up_as_the_api_does() -> None:
    async with served(turn("ok"), context_bytes=500) as (model, _):
        with pytest.raises(ModelRefused, match="the context is full"):
            await events_of(model, UserTurn("x" * 500))
        await turn_of(model)


# Cancel


async def test_a_cancelled_answer_leaves_the_model_usable() -> None:
    async with served(turn("A long answer.").stall(4), turn("Next.")) as (model, stub):
        got: list[ModelEvent] = []
        begun = asyncio.Event()

        async def consume() -> None:
            async for event in model.stream(Request("", (HELLO,), ())):
                got.append(event)
                begun.set()

        task = asyncio.create_task(consume())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stub.wait_for_broken_off()  # the API is told: it stops writing, and billing
        assert not any(isinstance(event, TurnDone) for event in got)
        assert (await turn_of(model)).text == "Next."


async def test_closing_the_stream_breaks_the_answer_off() -> None:
    async with served(turn("A long answer.").stall(4), turn("Next.")) as (model, stub):
        stream = model.stream(Request("", (HELLO,), ()))
        assert isinstance(await anext(stream), TextDelta)
        await stream.aclose()
        await stub.wait_for_broken_off()
        assert (await turn_of(model)).text == "Next."


async def test_a_wait_for_the_first_byte_can_be_cancelled() -> None:
    async with served(turn("x").stall(0), turn("Next.")) as (model, stub):
        task = asyncio.create_task(events_of(model))
        await stub.wait_for_request()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stub.wait_for_broken_off()
        assert (await turn_of(model)).text == "Next."


# Keys


def assert_unchained(error: BaseException) -> None:
    """No exception of the SDK, which holds the request and its key, is reachable from ours."""
    assert error.__cause__ is None
    assert error.__context__ is None


def assert_no_key(error: BaseException, key: str = KEY) -> None:
    assert_unchained(error)
    for text in (str(error), repr(error), "".join(traceback.format_exception(error))):
        assert key.strip() not in text


def test_the_secrets_are_the_key_and_what_else_authorizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", "X-Gateway-Token: gate-secret\nX-Team: blue")
    model = AnthropicModel("claude-test", base_url="http://user:pass-secret@127.0.0.1:9")
    assert set(model.secrets()) == {KEY, "gate-secret", "pass-secret"}
    assert KEY not in repr(model)
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "token-secret")
    assert "token-secret" in AnthropicModel("claude-test").secrets()


@pytest.mark.parametrize(
    "reply",
    [
        http_error(401, "authentication_error", f"invalid x-api-key {KEY}"),
        http_error(400, "invalid_request_error", f"{KEY} {KEY}"),
        http_error(404, "not_found_error", f"Bearer {KEY}"),
        Reply(status=403, body=f"<html>{KEY}</html>".encode()),
        http_error(503, "api_error", f"proxy saw {KEY}"),
        turn("x").error(3, "overloaded_error", KEY),
        turn("x").cut(4),
        turn("x").insert(4, f"event: a\ndata: {KEY}\n\n".encode()),
    ],
)
async def test_no_key_is_in_any_failure(reply: Reply, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with served(reply, reply, tries=2) as (model, _):
        shown: list[ModelEvent] = []
        with pytest.raises(ModelError) as caught:
            await collect(model, shown)
    assert_no_key(caught.value)
    assert KEY not in repr(shown)
    assert KEY not in caplog.text


@pytest.mark.parametrize("key", [f"{KEY}\n", f" {KEY}", f"{KEY}\r\nx: y", f"{KEY}é", "\t"])
def test_a_key_that_cannot_be_in_a_header_is_refused_unseen(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """httpx2 would print the whole header."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", key)
    with pytest.raises(ModelSetupError, match=r"^ANTHROPIC_API_KEY holds a space, a line break") as caught:
        open_model("anthropic/claude-test")
    assert_no_key(caught.value)


@pytest.mark.parametrize("value", ["se\rcret-value", "se\udcffcret-value"])
async def test_a_header_that_cannot_be_sent_is_not_shown(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", f"X-Api-Key: {value}")
    async with served() as (model, stub):
        with pytest.raises(ModelSetupError, match="ANTHROPIC_CUSTOM_HEADERS") as caught:
            await events_of(model)
        assert stub.requests == []
    assert_no_key(caught.value, "cret-value")


def test_no_key_at_all_is_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    with pytest.raises(ModelSetupError) as caught:
        open_model("anthropic/claude-test")
    assert str(caught.value) == "no API key for anthropic/claude-test; set one: export ANTHROPIC_API_KEY=..."
    assert caught.value.exit_code == 2


async def test_no_key_that_only_the_sdk_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", "Authorization:")
    async with served() as (model, stub):
        with pytest.raises(ModelSetupError, match=r"^no API key for anthropic/claude-test; set one: export") as caught:
            await events_of(model)
        assert stub.requests == []
    assert_unchained(caught.value)


async def test_a_gateway_that_takes_its_key_from_a_custom_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", f"X-Api-Key: {KEY}")
    async with served(turn("Hi.")) as (model, _):
        assert (await turn_of(model)).text == "Hi."
        assert KEY in model.secrets()


@pytest.mark.parametrize("base_url", ["", "127.0.0.1:80", "ftp://127.0.0.1", "http://", "http://[::1", "file:///x"])
def test_an_address_that_is_none(base_url: str) -> None:
    with pytest.raises(ModelSetupError) as caught:
        open_model("anthropic/claude-test", base_url=base_url)
    assert_unchained(caught.value)


def test_a_proxy_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "gopher://user:pass-secret@127.0.0.1:9")
    with pytest.raises(ModelSetupError, match="the anthropic SDK cannot be set up") as caught:
        open_model("anthropic/claude-test")
    assert_no_key(caught.value, "pass-secret")


# llmock: a second opinion on the wire format, and a judge of our retries


@pytest.fixture
def quick(llmock: LLMock) -> Callable[[], Model]:
    """A model on llmock, with waits short enough to be really waited: its verdict measures them."""
    del llmock  # it sets the variables that lead there
    return lambda: open_model("anthropic/claude-sonnet-5-5", retry=RetryPolicy(first_wait_s=0.06, factor=2.0))


async def test_a_whole_exchange_with_llmock(llmock: LLMock, quick: Callable[[], Model]) -> None:
    llmock.call_tool("bash", {"command": "ls"}, text="I look.").reply("There are two files in it.")
    model = quick()
    first = only_turn(await events_of(model, HELLO, tools=[BASH]))
    assert first.stop is Stop.TOOL_CALLS
    (call,) = first.tool_calls
    assert (call.name, json.loads(call.raw_arguments)) == ("bash", {"command": "ls"})
    events = await events_of(model, HELLO, first, UserTurn("", results(call)), tools=[BASH])
    await model.aclose()
    last = only_turn(events)
    assert (last.text, last.stop) == ("There are two files in it.", Stop.DONE)
    assert len([event for event in events if isinstance(event, TextDelta)]) > 1
    body = llmock.last_request.body
    assert isinstance(body, dict)
    assert body["messages"][-1]["content"][0]["tool_use_id"] == call.id
    llmock.assert_resilient(strict=True)


async def test_llmock_finds_no_fault_in_how_faults_are_met(llmock: LLMock, quick: Callable[[], Model]) -> None:
    model = quick()
    orders: list[Callable[[], object]] = [
        lambda: llmock.fail(529, times=2),
        lambda: llmock.rate_limit(retry_after=0.3),
        lambda: llmock.disconnect(after_chunks=2),
        lambda: llmock.truncate(after_chunks=2),
        lambda: llmock.corrupt(after_chunks=2),
    ]
    for order in orders:
        order()
        llmock.reply("The whole answer.")
        assert only_turn(await events_of(model)).text
    # Other questions: the same one again would look like a retry.
    llmock.context_overflow()
    with pytest.raises(ModelRefused, match="the context is full"):
        await events_of(model, UserTurn("Too long."))
    llmock.fail(401)
    with pytest.raises(ModelSetupError):
        await events_of(model, UserTurn("Let me in."))
    await model.aclose()
    llmock.assert_resilient()


async def test_a_broken_call_of_llmock_arrives_as_it_is(llmock: LLMock, quick: Callable[[], Model]) -> None:
    llmock.break_tool_call("malformed_arguments").call_tool("bash", {"command": "ls"})
    model = quick()
    (call,) = only_turn(await events_of(model, HELLO, tools=[BASH])).tool_calls
    await model.aclose()
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.raw_arguments)
