"""The Anthropic SDK through the whole loop, the command and a real SSH server; broken streams never run a tool (L2)."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_parts import play
from anthropic_stub import KEY, AnthropicStub, http_error, turn
from conftest import trusted

from asp.ssh import open_transport
from asp.testing import InProcessSandbox
from asp_agent.messages import UserTurn
from asp_agent.models import open_model
from asp_agent.models.retry import RetryPolicy

COMMAND = str(Path(sys.executable).with_name("asp-agent"))


async def no_wait(seconds: float) -> None:
    """Wait for nothing: the policy's figures have tests of their own."""
    await asyncio.sleep(0)


async def command(folder: Path, stub_url: str, *options: str, **env: str) -> tuple[int, str, str]:
    """Run asp-agent as a user does, with the API at ``stub_url``."""
    process = await asyncio.create_subprocess_exec(
        COMMAND, "run", "make a file named done", "--model", "anthropic/test-model", "--contract", str(folder / ".asp.json"),
        "--allow-same-host", *options, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"],
             "ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": stub_url, **env},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 50)
    return process.returncode or 0, out.decode(), err.decode()


def contract(sandbox: InProcessSandbox, folder: Path) -> None:
    folder.mkdir()
    (folder / ".asp.json").write_text(json.dumps(sandbox.document()))
    (folder / ".asp.json").chmod(0o600)


async def test_a_whole_task_over_the_sdk(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """Text, two calls, results, the answer: streamed in many pieces, and the request bodies are what they must be."""
    contract(sandbox, tmp_path / "project")
    async with AnthropicStub(
        turn("I look first.", [("bash", {"command": "ls; echo $((6 * 7))"}), ("write", {"path": "done", "content": "yes\n"})]),
        turn(" ".join(f"word{number}" for number in range(60))),
    ) as stub:
        code, out, err = await command(tmp_path / "project", stub.base_url)
    assert (code, out.strip()) == (0, " ".join(f"word{number}" for number in range(60))), err
    assert (sandbox.workspace / "done").read_text() == "yes\n"
    first, second = stub.bodies
    assert first["stream"] is True
    assert [tool["name"] for tool in first["tools"]] == ["read", "write", "edit", "bash"]
    assert first["messages"] == [{"role": "user", "content": [{"type": "text", "text": "make a file named done"}]}] or (
        first["messages"][0]["content"] == "make a file named done"
    )
    answer, results = second["messages"][1:]
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use", "tool_use"]
    assert [block["type"] for block in results["content"]] == ["tool_result", "tool_result"]
    assert [block["tool_use_id"] for block in results["content"]] == [
        block["id"] for block in answer["content"] if block["type"] == "tool_use"
    ]
    assert "42" in json.dumps(results["content"][0])
    assert KEY not in json.dumps(stub.bodies) + out + err


async def test_it_really_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop sees pieces while the answer is still being written, and one whole turn at the end."""
    from asp_agent.messages import Request, TextDelta, TurnDone

    text = " ".join(f"word{number}" for number in range(60))
    async with AnthropicStub(turn(text)) as stub:
        monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
        model = open_model("anthropic/test-model", base_url=stub.base_url)
        events = [event async for event in model.stream(Request("system", [UserTurn("hi")], []))]
        await model.aclose()
    pieces = [event for event in events if isinstance(event, TextDelta)]
    assert len(pieces) > 5
    assert "".join(piece.text for piece in pieces) == text
    assert [type(event) for event in events].count(TurnDone) == 1


CALL = [("bash", {"command": "touch MARKER"})]

BROKEN: list[tuple[str, list[Any]]] = [
    ("cut by the server", [turn("x", CALL).cut(4)]),
    ("reset", [turn("x", CALL).reset(4)]),
    ("clean end before the end", [turn("x", CALL).eof(6)]),
    ("clean end before message_stop", [turn("x", CALL).eof(8)]),
    ("error in a 200 stream", [turn("x", CALL).error(5, "overloaded_error", "Overloaded")]),
    ("rate limit in a 200 stream", [turn("x", CALL).error(7, "rate_limit_error", "slow")]),
    ("529", [http_error(529, "overloaded_error", "Overloaded")]),
    ("529 again and again", [http_error(529, "overloaded_error", "Overloaded")] * 5),
    ("500", [http_error(500, "api_error", "no")]),
    ("429", [http_error(429, "rate_limit_error", "slow", retry_after="1")]),
]


@pytest.mark.parametrize(("name", "faults"), BROKEN, ids=[name for name, _ in BROKEN])
async def test_a_broken_stream_runs_nothing_and_is_asked_again(
    sandbox: InProcessSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, faults: list[Any],
) -> None:
    """models.md 1.4: whatever came of the turn before it broke does not count."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    async with AnthropicStub(*faults, turn("Nothing to do.")) as stub, open_transport(
        trusted(sandbox.document(), tmp_path), allow_same_host=True,
    ) as transport:
        model = open_model("anthropic/test-model", base_url=stub.base_url, retry=RetryPolicy(sleep=no_wait))
        played = await play(transport, model)
        await model.aclose()
    assert (played.outcome.exit_code, played.outcome.text) == (0, "Nothing to do.")
    assert len(stub.bodies) == len(faults) + 1
    assert not (sandbox.workspace / "MARKER").exists()
    assert sum(event["type"] == "retrying" for event in played.events) == len(faults)
    assert not any(event["type"] == "tool_started" for event in played.events)


@pytest.mark.parametrize("arguments", [
    '{"command": "touch MARKER"', '{"command": "touch MARKER", "timeout": }', '["touch MARKER"]', '"touch MARKER"', "null",
    '{"command": ["touch", "MARKER"]}', '{"command": "touch MARKER", "extra": 1}', '{"cmd": "touch MARKER"}', "touch MARKER",
])
async def test_cut_or_wrong_arguments_run_nothing(
    sandbox: InProcessSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str,
) -> None:
    """P69, P70: an error result says so, the strict stub takes the replay, and the model goes on."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    async with AnthropicStub(turn("x", [("bash", arguments)]), turn("Sorry.")) as stub, open_transport(
        trusted(sandbox.document(), tmp_path), allow_same_host=True,
    ) as transport:
        model = open_model("anthropic/test-model", base_url=stub.base_url, retry=RetryPolicy(sleep=no_wait))
        played = await play(transport, model)
        await model.aclose()
    assert played.outcome.exit_code == 0
    assert [result.is_error for result in played.results] == [True]
    assert not (sandbox.workspace / "MARKER").exists()


async def test_a_turn_cut_at_the_output_limit_runs_nothing(
    sandbox: InProcessSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """stop_reason max_tokens, with a whole-looking call in it."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    async with AnthropicStub(turn("x", CALL, stop_reason="max_tokens"), turn("Shorter.")) as stub, open_transport(
        trusted(sandbox.document(), tmp_path), allow_same_host=True,
    ) as transport:
        model = open_model("anthropic/test-model", base_url=stub.base_url, retry=RetryPolicy(sleep=no_wait))
        played = await play(transport, model)
        await model.aclose()
    assert [result.is_error for result in played.results] == [True]
    assert not (sandbox.workspace / "MARKER").exists()


async def test_a_whole_task_over_llmock(
    llmock: Any, sandbox: InProcessSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody else's idea of the wire format (llmock 0.2.2), and its verdict on how we took a fault."""
    llmock.call_tool("bash", {"command": "echo made > made"})
    llmock.fail(529)
    llmock.reply("All done.")
    async with open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True) as transport:
        model = open_model("anthropic/claude-sonnet-5-5", retry=RetryPolicy(sleep=no_wait))
        played = await play(transport, model)
        await model.aclose()
    assert (played.outcome.exit_code, played.outcome.text) == (0, "All done.")
    assert (sandbox.workspace / "made").read_text() == "made\n"


async def test_api_errors_are_one_line_without_the_key(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """401 and 400 are not tried again."""
    contract(sandbox, tmp_path / "project")
    refused = http_error(401, "authentication_error", f"bad {KEY}")
    for error, code in ((refused, 2), (http_error(400, "invalid_request_error", "no"), 1)):
        async with AnthropicStub(error) as stub:
            status, out, err = await command(tmp_path / "project", stub.base_url, "--json", ASP_DEBUG="1")
        assert (status, len(stub.bodies)) == (code, 1), err
        assert KEY not in out + err
        assert json.loads(out.splitlines()[-1])["exit_code"] == code
