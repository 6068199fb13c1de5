"""``--export-atif FILE``: a run's record as an ATIF-v1.8 trajectory, for tools that compare agents.

ATIF is the Agent Trajectory Interchange Format of Harbor 0.26 (facts/harbor.md 4): unknown keys are refused, a tool's
result stands in the step that called it, prompt tokens include cached ones. What is ours goes into ``extra``.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from asp_agent.run import RunFolderFailed

SCHEMA_VERSION = "ATIF-v1.8"


def trajectory(run: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the trajectory of the run that ``run`` (run.json) and ``events`` (events.jsonl, in order) describe."""
    steps: list[dict[str, Any]] = []
    results: dict[str, Mapping[str, Any]] = {}
    end: Mapping[str, Any] = {}

    def step(event: Mapping[str, Any], source: str, message: str) -> dict[str, Any]:
        made = {"step_id": len(steps) + 1, "timestamp": event["time"], "source": source, "message": message}
        steps.append(made)
        return made

    for event in events:
        match event["type"], event.get("role"):
            case "start", _ if not steps and event.get("system"):
                step(event, "system", event["system"])
            case "tool_result", _:
                results[event["tool_call_id"]] = event
            case "turn", "assistant":
                _agent_step(step(event, "agent", event["text"]), event)
            case "turn", "user":
                _observe(steps, [results.pop(call_id) for call_id in event["results"] if call_id in results])
                if event["text"]:
                    step(event, "user", event["text"])
            case "final", _:
                end = event
            case _:
                pass
    _observe(steps, list(results.values()))
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": run["run"],
        "trajectory_id": run["run"],
        "agent": _agent(run),
        "steps": steps,
        "final_metrics": _final(steps, end),
        "extra": {key: end[key] for key in ("exit_code", "reason", "message") if key in end},
    }


def read(folder: Path) -> dict[str, Any]:
    """Return the trajectory of a run folder. A half-written last line is left out. Raises RunFolderFailed."""
    try:
        run = json.loads((folder / "run.json").read_bytes())
        lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return trajectory(run, events)
    except OSError as error:
        msg = f"{folder}: cannot read the run folder ({error.strerror})"
        raise RunFolderFailed(msg) from error
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{folder}: this is not the record of a run"
        raise RunFolderFailed(msg) from error


def _agent(run: Mapping[str, Any]) -> dict[str, Any]:
    functions = [{"type": "function", "function": {key: tool[key] for key in ("name", "description", "parameters")}}
                 for tool in run.get("tools", ())]  # fmt: skip
    return {
        "name": "asp-agent",
        "version": run["versions"]["asp-agent"],
        "model_name": run["model"]["name"],
        "tool_definitions": functions,
        "extra": {"scripted": run["model"]["scripted"]},
    }


def _agent_step(made: dict[str, Any], turn: Mapping[str, Any]) -> None:
    made["model_name"] = "/".join(turn["source"][::2])
    usage = turn["usage"]
    metrics = {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
        "cached_tokens": usage.get("cache_read_tokens"),
        "cost_usd": turn.get("cost_usd"),
    }
    if metrics := {name: value for name, value in metrics.items() if value is not None}:
        made["metrics"] = metrics
    if turn["tool_calls"]:
        made["tool_calls"] = [_call(call) for call in turn["tool_calls"]]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"tool_call_id": call["id"], "function_name": call["name"]}
    try:
        arguments: Any = json.loads(call["raw_arguments"])
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        return {**made, "arguments": cast("dict[str, Any]", arguments)}
    return {**made, "arguments": {}, "extra": {"raw_arguments": call["raw_arguments"]}}


def _observe(steps: list[dict[str, Any]], results: list[Mapping[str, Any]]) -> None:
    """Put results into the step whose calls they answer: the last one of the agent."""
    called = next((made for made in reversed(steps) if made.get("tool_calls")), None)
    if called is None or not results:
        return
    known = {call["tool_call_id"] for call in called["tool_calls"]}
    observed = [
        {"source_call_id": result["tool_call_id"], "content": result["content"], "extra": {"is_error": result["is_error"]}}
        for result in results
        if result["tool_call_id"] in known
    ]
    if observed:
        called["observation"] = {"results": observed}


def _final(steps: list[dict[str, Any]], end: Mapping[str, Any]) -> dict[str, Any]:
    def total(name: str) -> int | None:
        known = [made["metrics"][name] for made in steps if name in made.get("metrics", ())]
        return sum(known) if known else None

    final = {
        "total_prompt_tokens": total("prompt_tokens"),
        "total_completion_tokens": total("completion_tokens"),
        "total_cached_tokens": total("cached_tokens"),
        "total_cost_usd": end.get("cost_usd"),
        "total_steps": len(steps),
    }
    return {name: value for name, value in final.items() if value is not None}
