"""The scripted model, and opening models by name."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asp_agent.errors import ModelRefused, ModelSetupError, ModelUnavailable
from asp_agent.messages import (
    AssistantTurn,
    Model,
    ModelEvent,
    Request,
    Retrying,
    Stop,
    TextDelta,
    ToolCall,
    TurnDone,
    Usage,
)
from asp_agent.models import DEFAULT_MODEL, open_model
from asp_agent.models.retry import RetryPolicy
from asp_agent.models.scripted import MAX_SCRIPT_BYTES, ScriptedModel

REQUEST = Request("", (), ())


async def no_sleep(_: float) -> None:
    """Take no time."""


def script(tmp_path: Path, content: Any) -> str:
    file = tmp_path / "play.json"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def opened(tmp_path: Path, *turns: object) -> ScriptedModel:
    return ScriptedModel(script(tmp_path, {"turns": turns}), retry=RetryPolicy(sleep=no_sleep))


async def events_of(model: Model) -> list[ModelEvent]:
    return [event async for event in model.stream(REQUEST)]


async def turn_of(model: Model) -> AssistantTurn:
    last = (await events_of(model))[-1]
    assert isinstance(last, TurnDone)
    return last.turn


async def test_turns_are_played_in_order_and_text_streams_in_pieces(tmp_path: Path) -> None:
    text = "I look at the files first."
    calls = [{"name": "bash", "arguments": {"command": "ls é"}}, {"name": "read", "raw_arguments": '{"path": '}]
    usage = {"input_tokens": 10, "cache_read_tokens": 3, "cache_write_tokens": 0, "output_tokens": 2}
    model = opened(tmp_path, {"text": text, "tool_calls": calls, "usage": usage}, {"text": "Done."})

    *deltas, last = await events_of(model)
    assert len(deltas) == 4
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == text
    expected = AssistantTurn(
        text,
        (ToolCall("call_1", "bash", '{"command": "ls é"}'), ToolCall("call_2", "read", '{"path": ')),
        Stop.TOOL_CALLS,
        Usage(10, 3, 0, 2),
        ("scripted", "scripted", "play.json"),
    )
    assert last == TurnDone(expected)
    assert await turn_of(model) == AssistantTurn("Done.", (), Stop.DONE, Usage(), expected.source)
    await model.aclose()


async def test_it_says_that_it_is_scripted_and_has_no_secret(tmp_path: Path) -> None:
    file = script(tmp_path, {"turns": []})
    model = open_model(f"scripted/{file}")
    assert model.name == f"scripted/{file}"
    assert model.scripted is True
    assert list(model.secrets()) == []


async def test_a_relative_file_is_found_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, {"turns": [{"text": "x"}]})
    monkeypatch.chdir(tmp_path)
    model = open_model("scripted/play.json")
    assert model.name == "scripted/play.json"
    assert (await turn_of(model)).text == "x"


async def test_a_script_that_is_over_is_a_refusal_that_counts(tmp_path: Path) -> None:
    model = opened(tmp_path, {"text": "only"})
    await turn_of(model)
    for _ in range(2):
        with pytest.raises(ModelRefused, match=r"^the script .*play\.json has no more turns \(1 played\)$") as caught:
            await events_of(model)
        assert caught.value.exit_code == 1


async def test_made_up_ids_never_meet_given_ones(tmp_path: Path) -> None:
    call: dict[str, Any] = {"name": "bash", "arguments": {}}
    model = opened(
        tmp_path, {"tool_calls": [call, {**call, "id": "mine"}, call]}, {"tool_calls": [{**call, "id": "call_2"}, call]}
    )
    assert [c.id for c in (await turn_of(model)).tool_calls] == ["call_1", "mine", "call_3"]
    assert [c.id for c in (await turn_of(model)).tool_calls] == ["call_2", "call_4"]


@pytest.mark.parametrize("stop", list(Stop))
async def test_every_stop_can_be_scripted(tmp_path: Path, stop: Stop) -> None:
    model = opened(tmp_path, {"text": "x", "stop": stop.value, "tool_calls": [{"name": "", "raw_arguments": "{"}]})
    assert (await turn_of(model)).stop is stop


async def test_an_interrupted_turn_does_not_count_and_the_next_try_plays_the_next(tmp_path: Path) -> None:
    call = {"name": "bash", "arguments": {"command": "rm x"}}
    model = opened(tmp_path, {"text": "half", "tool_calls": [call], "fault": "interrupted"}, {"text": "whole"})
    events = await events_of(model)
    turns = [event.turn for event in events if isinstance(event, TurnDone)]
    assert [(turn.text, turn.tool_calls) for turn in turns] == [("whole", ())]
    retries = [event for event in events if isinstance(event, Retrying)]
    assert [retry.attempt for retry in retries] == [2]
    assert "interrupted" in retries[0].reason


async def test_six_interrupted_turns_are_an_outage(tmp_path: Path) -> None:
    model = opened(tmp_path, *[{"fault": "interrupted"}] * 6, {"text": "never"})
    with pytest.raises(ModelUnavailable, match=r"no whole answer after 6 tries; the last one: turn 6 of the script"):
        await events_of(model)


@pytest.mark.parametrize(("fault", "error"), [("unavailable", ModelUnavailable), ("refused", ModelRefused)])
async def test_a_fault_takes_its_turn(tmp_path: Path, fault: str, error: type[Exception]) -> None:
    model = opened(tmp_path, {"fault": fault}, {"text": "after"})
    with pytest.raises(error, match=r"^turn 1 of the script"):
        await events_of(model)
    assert (await turn_of(model)).text == "after"


async def test_a_stream_can_be_cancelled_between_two_pieces(tmp_path: Path) -> None:
    model = opened(tmp_path, {"text": "a long answer"}, {"text": "next"})
    first = asyncio.Event()

    async def consume() -> None:
        async for _ in model.stream(REQUEST):
            first.set()

    task = asyncio.create_task(consume())
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await turn_of(model)).text == "next"


CALL: dict[str, Any] = {"name": "bash", "arguments": {}}


WRONG: list[tuple[Any, str]] = [
    ('{"turns": [}', "is not JSON: Expecting value at line 1, column 12"),
    (b"\xff{}", "is not UTF-8 (byte 0)"),
    ("[" * 100_000, "is nested too deeply"),
    ('{"turns": [], "turns": []}', 'the key "turns" stands twice in one object'),
    ('{"turns": [{"usage": {"input_tokens": NaN}}]}', "is not JSON: NaN"),
    ([], "must be an object, not an array"),
    ({}, 'the key "turns" is missing'),
    ({"turns": None}, "turns: must be an array, not null"),
    ({"turns": [], "tuns": 1}, 'unknown key "tuns"; known: turns'),
    ({"turns": [7]}, "turns[0]: must be an object, not a number"),
    ({"turns": [{"txt": ""}]}, 'turns[0]: unknown key "txt"; known: text, tool_calls, usage, stop, fault'),
    ({"turns": [{}, {"text": 1}]}, "turns[1].text: must be a string, not a number"),
    ({"turns": [{"text": None}]}, "turns[0].text: must be a string, not null"),
    ({"turns": [{"stop": "end"}]}, 'turns[0].stop: unknown value "end"; known: done, tool_calls'),
    ({"turns": [{"fault": "boom"}]}, 'turns[0].fault: unknown value "boom"; known: interrupted, unavailable'),
    ({"turns": [{"fault": "refused", "text": "x"}]}, 'turns[0]: "fault": "refused" stands alone'),
    ({"turns": [{"usage": {"tokens": 1}}]}, 'turns[0].usage: unknown key "tokens"'),
    ({"turns": [{"usage": {"input_tokens": True}}]}, "turns[0].usage.input_tokens: must be an integer, 0 or more"),
    ({"turns": [{"usage": {"input_tokens": -1}}]}, "turns[0].usage.input_tokens: must be an integer, 0 or more"),
    ({"turns": [{"tool_calls": {}}]}, "turns[0].tool_calls: must be an array, not an object"),
    ({"turns": [{"tool_calls": ["ls"]}]}, "turns[0].tool_calls[0]: must be an object, not a string"),
    ({"turns": [{"tool_calls": [{"arguments": {}}]}]}, 'turns[0].tool_calls[0]: the key "name" is missing'),
    ({"turns": [{"tool_calls": [CALL, {"name": "x"}]}]}, 'turns[0].tool_calls[1]: give either "arguments"'),
    ({"turns": [{"tool_calls": [{**CALL, "raw_arguments": ""}]}]}, 'turns[0].tool_calls[0]: give either "arg'),
    ({"turns": [{"tool_calls": [{**CALL, "arguments": []}]}]}, "arguments: must be an object, not an array"),
    ({"turns": [{"tool_calls": [{**CALL, "name": True}]}]}, "name: must be a string, not a boolean"),
    ({"turns": [{"tool_calls": [{**CALL, "id": ""}]}]}, "id: must not be empty, nor used twice in a turn"),
    ({"turns": [{"tool_calls": [{**CALL, "id": "a"}] * 2}]}, "tool_calls[1].id: must not be empty, nor used twice"),
]


@pytest.mark.parametrize(("content", "problem"), WRONG)
def test_a_wrong_script_is_one_line_that_names_file_and_place(tmp_path: Path, content: Any, problem: str) -> None:
    file = script(tmp_path, content)
    with pytest.raises(ModelSetupError) as caught:
        open_model(f"scripted/{file}")
    line = str(caught.value)
    assert line.startswith(f"{file}: ")
    assert problem in line
    assert "\n" not in line
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("name", "problem"), [("no.json", "No such file"), (".", "directory"), ("a\0b", "null byte")])
def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelSetupError, match=problem):
        open_model(f"scripted/{name}")


def test_only_a_regular_file_of_a_sane_size_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in (str(tmp_path), str(tmp_path / "fifo"), "/dev/zero"):
        with pytest.raises(ModelSetupError, match=r"^[^\n]*: is not a regular file"):
            open_model(f"scripted/{name}")
    file = tmp_path / "play.json"
    file.write_text('{"turns": []}')
    os.truncate(file, MAX_SCRIPT_BYTES + 1)
    with pytest.raises(ModelSetupError, match=r"^[^\n]*: is larger than 16 MiB$"):
        open_model(f"scripted/{file}")
    file.write_text('{"turns": []}'.ljust(MAX_SCRIPT_BYTES))
    open_model(f"scripted/{file}")


@pytest.mark.parametrize("spec", ["", "claude", "/x", "anthropic", "anthropic/", "openapi/gpt-6", "mock/x\x1b[2J"])
def test_an_unknown_model_names_the_known_ones(spec: str) -> None:
    with pytest.raises(ModelSetupError, match=r"known: anthropic/NAME, openai/NAME, .* scripted/FILE\.json$") as caught:
        open_model(spec)
    assert str(caught.value).isprintable()


def test_a_script_has_no_base_url(tmp_path: Path) -> None:
    file = script(tmp_path, {"turns": []})
    with pytest.raises(ModelSetupError, match="--base-url"):
        open_model(f"scripted/{file}", base_url="http://127.0.0.1:1")


def test_the_sdk_is_not_imported_before_it_is_used() -> None:
    code = "import sys, asp_agent.models; sys.exit('anthropic' in sys.modules or 'httpx2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", ["anthropic", "httpx2"])
def test_a_missing_sdk_is_the_line_to_type(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in list(sys.modules):
        if name.startswith("asp_agent.models.anthropic"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModelSetupError, match=r"pip install 'asp-agent\[agent\]'"):
        open_model(DEFAULT_MODEL)
