"""Going on with a run: from every line that its record can end with, nothing runs twice and nothing is orphaned."""

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from agent_parts import call, calls, play_script, write_script
from test_agent_cli import Ended, contract, run, started  # noqa: F401 - contract is a fixture

from asp import contract as contracts
from asp.errors import UsageError
from asp.testing import InProcessSandbox
from asp_agent import resume, runs
from asp_agent.history import History
from asp_agent.messages import AssistantTurn, Turn, UserTurn
from asp_agent.run import load_history, verify

DIGEST = "d" * 64


def valid(turns: tuple[Turn, ...]) -> None:
    History(turns).for_request()
    assert not any(type(one) is type(two) for one, two in itertools.pairwise(turns))


def sandbox_of(path: Path, digest: str = DIGEST) -> contracts.Contract:
    from pathlib import PurePosixPath

    return contracts.Contract(path=path, digest=digest, host="h", port=1, workspace=PurePosixPath("/w"))


async def recorded(root: Path) -> Path:
    played = await play_script(
        root,
        calls(call("bash", command="echo one"), call("read", path="none"), call("bash", command="echo three"), text="I look."),
        calls(call("bash", command="echo four")),
        {"text": "Done."},
    )
    path = played.folder / "run.json"
    frozen = {"contract": {"digest": DIGEST, "path": "/p", "workspace": "/w"}, "model": {"name": "scripted/x", "scripted": True}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **frozen}))
    return played.folder


async def test_from_every_line_and_every_half_line(tmp_path: Path) -> None:
    folder = await recorded(tmp_path)
    path = folder / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    seen: set[str] = set()
    for kept in range(len(lines) + 1):
        for half in (b"", lines[kept][:7] if kept < len(lines) else b"{"):
            path.write_bytes(b"".join(lines[:kept]) + half)
            for task in ("", "and now this"):
                if kept == 0 and not task:
                    continue
                resumed = resume.resume(folder, sandbox_of(tmp_path / ".asp.json"), task)
                valid(resumed.turns)
                last = resumed.turns[-1]
                assert isinstance(last, UserTurn)
                assert last.text.endswith(task)
                texts = [result.content for turn in resumed.turns if isinstance(turn, UserTurn) for result in turn.results]
                seen.update(text for text in texts if "the run ended" in text.lower())
                begun = [json.loads(line)["tool_call_id"] for line in lines[:kept] if json.loads(line)["type"] == "tool_started"]
                unknown = [text for text in texts if text.startswith("The run ended while this ran")]
                assert len(unknown) <= 1 + len(begun)
    assert len(seen) == 2, "both endings of a call were met: not run, and begun with an outcome that nobody knows"


async def test_what_cannot_be_gone_on_with_is_named(tmp_path: Path) -> None:
    folder = await recorded(tmp_path)
    with pytest.raises(UsageError, match="worked in another sandbox"):
        resume.resume(folder, sandbox_of(tmp_path / ".asp.json", "e" * 64), "x")
    with pytest.raises(UsageError, match="no run in the sandbox"):
        resume.latest(sandbox_of(tmp_path / ".asp.json", "e" * 64))
    assert resume.latest(sandbox_of(tmp_path / ".asp.json")) == folder


async def go_on(contract: Path, *options: str, turns: list[dict[str, Any]]) -> Ended:  # noqa: F811
    script = write_script(contract.parent, *turns)
    return await run(
        "run", *options, "--model", f"scripted/{script}", "--contract", str(contract), "--allow-same-host", cwd=contract.parent
    )


async def test_the_command_goes_on(contract: Path, sandbox: InProcessSandbox) -> None:  # noqa: F811
    first = await go_on(contract, "do it", turns=[calls(call("bash", command="echo 1 >> log")), {"text": "First."}])
    assert first.code == 0, first.err
    second = await go_on(contract, "-c", "and more", turns=[calls(call("bash", command="echo 2 >> log")), {"text": "Second."}])
    assert (second.code, second.out) == (0, "Second.\n"), second.err
    assert (sandbox.workspace / "log").read_text() == "1\n2\n"
    newest = runs.find("last")
    assert verify(newest).complete
    texts = [turn.text for turn in load_history(newest).turns if turn.text]
    assert texts == ["do it", "First.", "and more", "Second."]
    assert json.loads((newest / "run.json").read_text())["resumed"] == runs.listed()[1].run
    by_name = await go_on(contract, "-r", runs.listed()[1].run, turns=[{"text": "Third."}])
    assert (by_name.code, by_name.out) == (0, "Third.\n"), by_name.err
    unknown = await go_on(contract, "-r", "nothing-like-it", turns=[{"text": "x"}])
    assert (unknown.code, unknown.out) == (2, "")
    listing = await run("runs", cwd=contract.parent)
    assert [line.split()[1] for line in listing.out.splitlines()] == ["done"] * 3
    shown = await run("show", "last", cwd=contract.parent)
    assert "Third." in shown.out
    exported = await run("show", "last", "--export-atif", str(contract.parent / "t.json"), cwd=contract.parent)
    assert exported.code == 0
    assert json.loads((contract.parent / "t.json").read_text())["schema_version"] == "ATIF-v1.8"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_a_run_that_was_ended_goes_on(contract: Path, sandbox: InProcessSandbox, number: signal.Signals) -> None:  # noqa: F811
    script = write_script(contract.parent, calls(call("bash", command="echo started >> log; exec sleep 1000")), {"text": "never"})
    words = ("run", "do it", "--model", f"scripted/{script}", "--contract", str(contract), "--allow-same-host")
    async with started(*words, cwd=contract.parent) as process:
        while not (sandbox.workspace / "log").exists():
            assert process.returncode is None
            await asyncio_sleep()
        still = await go_on(contract, "-c", turns=[{"text": "x"}])
        assert (still.code, "is still running" in still.err) == (2, True)
        os.kill(process.pid, number)
        await process.communicate()
        assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    again = await go_on(contract, "-c", turns=[{"text": "I know."}])
    assert (again.code, again.out) == (0, "I know.\n"), again.err
    assert (sandbox.workspace / "log").read_text() == "started\n", "nothing was run again"
    turns = load_history(runs.find("last")).turns
    (result,) = [result for turn in turns if isinstance(turn, UserTurn) for result in turn.results]
    assert "its outcome is unknown" in result.content
    assert isinstance(turns[-1], AssistantTurn)


async def asyncio_sleep() -> None:
    import asyncio

    await asyncio.sleep(0.01)


async def test_options_of_the_command(contract: Path, sandbox: InProcessSandbox) -> None:  # noqa: F811
    answer, policy = contract.parent / "answer.txt", contract.parent / "policy.json"
    policy.write_text(
        '{"version": "asp-policy/1", "default": "allow", "exec": [{"rule_key": "RM", "argv": ["rm", "..."], "action": "block"}]}'
    )
    (sandbox.workspace / "f").write_text("")
    done = await go_on(
        contract, "do it", "-q", "-o", str(answer), "--policy", str(policy), "--export-atif", str(contract.parent / "t.json"),
        "--price", "1,2", "--max-budget-usd", "5", "--json",
        turns=[calls(call("bash", command="rm f"), usage={"input_tokens": 10, "output_tokens": 5}),
               {"text": "Kept.", "usage": {"input_tokens": 10, "output_tokens": 5}}],
    )  # fmt: skip
    assert done.code == 0, done.err
    assert answer.read_text() == "Kept.\n"
    assert (sandbox.workspace / "f").exists()
    assert done.lines[-1]["cost_usd"] == pytest.approx(4e-5)
    assert json.loads((contract.parent / "t.json").read_text())["final_metrics"]["total_prompt_tokens"] == 20
    for words, complaint in (
        (("--max-budget-usd", "1"), "needs a price"), (("-o", "/nonexistent/x"), "-o "), (("--policy", "none"), "the policy"),
        (("--price", "free"), "--price is"), (("--max-budget-usd", "0"), "greater than 0"),
    ):  # fmt: skip
        refused = await go_on(contract, "do it", *words, turns=[{"text": "x"}])
        assert (refused.code, refused.out) == (2, "")
        assert complaint in refused.err
        assert refused.err.count("\n") == 1
