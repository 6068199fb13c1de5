"""What the record of a run becomes: a trajectory for others (ATIF), and lists and pages for people."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
from agent_parts import Played, call, calls, play_script, raw

from asp.errors import UsageError
from asp.state import state_dir
from asp_agent import atif, runs
from asp_agent.run import RunFolderFailed


class Strict(pydantic.BaseModel):
    """The published model (Harbor 0.26) as facts/harbor.md 4 describes it: unknown keys are refused."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class ToolCall(Strict):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: dict[str, Any] | None = None


class ObservationResult(Strict):
    source_call_id: str | None = None
    content: str | None = None
    extra: dict[str, Any] | None = None


class Observation(Strict):
    results: list[ObservationResult]


class Metrics(Strict):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None


class Step(Strict):
    step_id: int
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    message: str
    model_name: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    extra: dict[str, Any] | None = None


class FinalMetrics(Strict):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = None


class Agent(Strict):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None


class Trajectory(Strict):
    schema_version: Literal["ATIF-v1.8"]
    session_id: str
    trajectory_id: str
    agent: Agent
    steps: list[Step] = pydantic.Field(min_length=1)
    final_metrics: FinalMetrics | None = None
    extra: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _whole(self) -> "Trajectory":
        assert [step.step_id for step in self.steps] == list(range(1, len(self.steps) + 1))
        for step in self.steps:
            if step.source != "agent":
                assert step.model_name is None
                assert step.tool_calls is None
                assert step.metrics is None
            called = [one.tool_call_id for one in step.tool_calls or ()]
            answered = [one.source_call_id for one in step.observation.results] if step.observation else []
            assert sorted(map(str, answered)) == sorted(called), "stricter than Harbor: each call has one result"
        return self


RUN = {
    "task": "do\x1b it", "model": {"name": "scripted/x", "scripted": True}, "versions": {"asp-agent": "1"},
    "contract": {"path": "/p/.asp.json", "digest": "d", "workspace": "/w"},
    "tools": [{"name": "bash", "description": "runs", "parameters": {"type": "object"}}],
}  # fmt: skip


async def played(root: Path) -> Played:
    """A run with everything in it, its run.json as the command writes it."""
    done = await play_script(
        root,
        calls(call("bash", command="printf 'a\\033[8mb\\n'"), raw("bash", "{"), text="I look.",
              usage={"input_tokens": 9, "output_tokens": 3}),
        calls(call("read", path="none"), usage={"input_tokens": 20, "cache_read_tokens": 9, "output_tokens": 1}),
        {"text": "Done.\x1b]0;t\x07", "usage": {"input_tokens": 30, "output_tokens": 2}},
    )  # fmt: skip
    path = done.folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **RUN}))
    return done


async def test_the_trajectory_is_as_published(tmp_path: Path) -> None:
    done = await played(tmp_path)
    made = atif.read(done.folder)
    checked = Trajectory.model_validate_json(json.dumps(made))
    assert [step.source for step in checked.steps] == ["user", "agent", "agent", "agent"]
    first = checked.steps[1]
    assert first.message == "I look."
    assert first.tool_calls is not None
    assert [one.extra for one in first.tool_calls] == [None, {"raw_arguments": "{"}]
    assert first.observation is not None
    assert [one.content for one in first.observation.results] == [result.content for result in done.results[:2]]
    assert checked.final_metrics == FinalMetrics(
        total_prompt_tokens=59, total_completion_tokens=6, total_cached_tokens=9, total_steps=4
    )
    assert checked.agent.tool_definitions == [{"type": "function", "function": RUN["tools"][0]}]  # type: ignore[index]


async def test_a_run_that_was_killed_has_a_trajectory(tmp_path: Path) -> None:
    done = await played(tmp_path)
    path = done.folder / "events.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for kept in range(2, len(lines)):
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:10])
        made = atif.read(done.folder)
        for step in made["steps"]:  # calls whose results were never written
            step.pop("tool_calls", None)
            step.pop("observation", None)
        Trajectory.model_validate_json(json.dumps(made))


def test_what_is_no_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderFailed, match="cannot read"):
        atif.read(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "events.jsonl").write_text('{"type": "turn"}\n')
    with pytest.raises(RunFolderFailed, match="not the record"):
        atif.read(tmp_path)


async def test_show_says_what_happened_and_obeys_nothing(tmp_path: Path) -> None:
    done = await played(tmp_path)
    lines = list(runs.shown(done.folder))
    assert lines[0].endswith("scripted/x in /w (/p/.asp.json)")
    assert lines[1:3] == ["user: do it", "I look."]
    assert "> bash  printf 'a\\033[8mb\\n'" in lines
    assert "> read  none" in lines
    assert "Done.^[]0;t^G" in lines
    assert any(line.startswith("  error, ") for line in lines)
    assert "\x1b" not in "\n".join(lines)
    with (done.folder / "events.jsonl").open("ab") as opened:
        opened.write(b'{"type": "turn", "role": "assistant"}\n[]\n{"half')
    assert list(runs.shown(done.folder))[-3:] == [
        "(turn: not as it is written today)", "(a line that was not written whole)", "(a line that was not written whole)",
    ]  # fmt: skip


async def test_runs_are_listed_and_found(tmp_path: Path) -> None:
    done = await played(tmp_path)
    name = done.folder.name
    (state_dir("runs") / "not-a-run").mkdir()
    (one,) = runs.listed()
    assert (one.run, one.model, one.task) == (name, "scripted/x", "do\x1b it")
    (line,) = runs.table([one])
    assert line.endswith("scripted/x  do^[ it")
    assert runs.find("last") == runs.find(name) == runs.find(name[:8]) == done.folder
    for wrong in ("", "x", "/", "..", "not-a-run"):
        with pytest.raises(UsageError, match="no run has the name"):
            runs.find(wrong)
    twin = state_dir("runs") / f"{name}x"
    twin.mkdir()
    (twin / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="2 runs begin with"):
        runs.find(name[:8])
    assert runs.find(name) == done.folder


async def test_a_run_that_runs_is_told_from_one_that_was_lost(tmp_path: Path) -> None:
    done = await played(tmp_path)
    path = done.folder / "events.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert runs.listed()[0].state == "lost"
    with path.open("ab") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert runs.listed()[0].state == "running"
    assert runs.listed()[0].state == "lost"


WRITER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("locked", flush=True)
for line in sys.stdin:
    os.write(descriptor, line.encode())
"""


async def test_watch_follows_to_the_end(tmp_path: Path) -> None:
    done = await played(tmp_path)
    path = done.folder / "events.jsonl"
    expected = list(runs.shown(done.folder))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0])
    writer = subprocess.Popen([sys.executable, "-P", "-c", WRITER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdin is not None
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"locked\n"
    seen: list[str] = []
    watching = threading.Thread(target=lambda: seen.extend(runs.watched(done.folder)))
    watching.start()
    for line in lines[1:]:
        writer.stdin.write(line)
        writer.stdin.flush()
    assert watching.is_alive(), "a run that writes nothing for a while has not ended"
    writer.stdin.close()
    writer.wait(60)
    writer.stdout.close()
    watching.join(60)
    assert seen == expected
    os.truncate(path, 0)
    assert list(runs.watched(done.folder)) == expected[:1]
