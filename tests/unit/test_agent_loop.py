"""The loop over a real bash and scripts that are real files: every way a run can go, and a valid history in each."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from agent_parts import Played, TurnsModel, call, calls, play, play_script, raw, write_script
from conftest import trusted

from asp.errors import ConnectionLost, HostKeyMismatch, Unreachable
from asp.ssh import open_transport
from asp.testing import InProcessSandbox, LocalTwin
from asp.transport import ExecResult, OnOutput, Stream
from asp_agent.agent import Agent
from asp_agent.decide import Action, Decision, Verdict
from asp_agent.limits import Cause, Limits
from asp_agent.messages import AssistantTurn, Stop, ToolCall, Usage, UserTurn
from asp_agent.models import open_model
from asp_agent.redact import MARK, Redactor


def contents(played: Played) -> list[str]:
    return [result.content for result in played.results]


def ending(played: Played) -> tuple[int, str]:
    return played.outcome.exit_code, played.outcome.reason


async def test_a_task_is_done(tmp_path: Path) -> None:
    played = await play_script(
        tmp_path,
        calls(call("write", path="a", content="one\n"), text="I write.", usage={"input_tokens": 10, "output_tokens": 2}),
        calls(call("edit", path="a", edits=[{"oldText": "one", "newText": "two"}]), call("bash", command="cat a")),
        {"text": "Done.", "usage": {"input_tokens": 5}},
    )
    assert ending(played) == (0, "done")
    assert (played.outcome.text, played.outcome.turns, played.outcome.usage.input_tokens) == ("Done.", 3, 15)
    assert contents(played) == ["Wrote 4 bytes to a.", "Made 1 replacement in a.", "two\n"]
    kinds = {event["type"] for event in played.events}
    assert kinds == {
        "turn", "message_delta", "usage", "tool_started", "security_decision", "tool_call", "tool_result", "final",
    }  # fmt: skip
    shown = [line["type"] for line in played.shown]
    assert shown == [
        "usage",
        "message",
        "tool_call",
        "tool_result",
        "usage",
        *["tool_call", "tool_result"] * 2,
        "usage",
        "message",
    ]
    tool_call = next(event for event in played.events if event["type"] == "tool_call")
    assert tool_call["input_digest"].startswith("sha256:")
    assert tool_call["latency_ms"] >= 0


async def test_p68_siblings_of_a_failing_call(tmp_path: Path) -> None:
    played = await play_script(
        tmp_path,
        calls(
            call("bash", command="false"),
            call("bash", command="sleep 0.2; echo b"),
            call("read", path="none"),
            call("bash", command="echo d"),
        ),
        {"text": "ok"},
    )
    assert contents(played) == [
        "(no output)\n\nCommand exited with code 1",
        "b\n",
        "none: no such file or directory",
        "d\n",
    ]
    assert [result.tool_call_id for result in played.results] == ["call_1", "call_2", "call_3", "call_4"]
    assert [result.is_error for result in played.results] == [True, False, True, False]


async def test_p69_cut_arguments_never_run(tmp_path: Path) -> None:
    played = await play_script(
        tmp_path,
        calls(raw("write", '{"path": "a", "content": "x'), call("bash", command="touch ran"), stop="length"),
        calls(call("write", path="a", content="x")),
        {"text": "ok"},
    )
    assert ending(played) == (0, "done")
    assert "the arguments may be incomplete" in contents(played)[0]
    assert all(result.is_error for result in played.results[:2])
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["a"]


async def test_cut_text_is_continued_and_bounded(tmp_path: Path) -> None:
    played = await play_script(tmp_path, {"text": "half", "stop": "length"}, {"text": "whole"})
    assert ending(played) == (0, "done")
    asked = [turn.text for turn in played.history.turns if isinstance(turn, UserTurn)]
    assert asked[1].startswith("Your answer was cut off")
    played = await play_script(tmp_path, *[{"text": "half", "stop": "length"}] * 5)
    assert ending(played) == (1, "cut")
    assert played.outcome.turns == 3


@pytest.mark.parametrize(
    "arguments", ['{"command": ls}', "[]", "null", '"ls"', '{"command": null}', '{"command": "touch ran", "x": 1}']
)
async def test_p70_bad_arguments_are_told_and_not_run(tmp_path: Path, arguments: str) -> None:
    played = await play_script(tmp_path, calls(raw("bash", arguments)), {"text": "ok"})
    assert ending(played) == (0, "done")
    assert played.results[0].is_error
    assert contents(played)[0].endswith("Nothing was run.")
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize("name", ["Bash", "str_replace_editor", ""])
async def test_p71_unknown_tools(tmp_path: Path, name: str) -> None:
    played = await play_script(tmp_path, calls(call(name, command="touch ran")), {"text": "ok"})
    assert contents(played) == [f"There is no tool named {name!r}. The tools are: read, write, edit, bash."]
    assert ending(played) == (0, "done")


async def test_p72_nothing_said_is_asked_again_once(tmp_path: Path) -> None:
    played = await play_script(tmp_path, {"text": ""}, {"text": "ok"})
    assert ending(played) == (0, "done")
    assert [event["type"] for event in played.events].count("turn_dropped") == 1
    played = await play_script(tmp_path, {"text": ""}, {"text": " \n"}, {"text": "never asked"})
    assert ending(played) == (1, "empty")
    assert len(played.history.turns) == 1
    played = await play_script(tmp_path, calls(call("bash", command="true")), {"text": "ok"})
    assert contents(played) == ["(no output)"]


@pytest.mark.parametrize(("stop", "reason"), [("refusal", "refused"), ("context_full", "context_full")])
async def test_a_turn_that_cannot_go_on(tmp_path: Path, stop: str, reason: str) -> None:
    played = await play_script(tmp_path, calls(call("bash", command="touch ran"), stop=stop), {"text": "never asked"})
    assert ending(played) == (1, reason)
    assert contents(played)[0].startswith("This was not run:")
    assert not list((tmp_path / "work").iterdir())
    assert ending(await play_script(tmp_path, {"text": "", "stop": stop})) == (1, reason)


async def test_a_paused_turn_goes_back_unchanged(tmp_path: Path) -> None:
    paused = AssistantTurn("", (), Stop.PAUSED, Usage(), ("p", "a", "m"), ({"type": "server_tool_use"},))
    model = TurnsModel(paused, AssistantTurn("ok", (), Stop.DONE, Usage(), ("p", "a", "m")))
    async with LocalTwin(tmp_path) as twin:
        played = await play(twin, model)
    assert ending(played) == (0, "done")
    assert model.requests[1].history[-1] is paused


async def test_duplicate_ids_run_once_and_replay_validly(tmp_path: Path) -> None:
    twice = tuple(ToolCall("same", "bash", json.dumps({"command": "echo x >> ran"})) for _ in range(2))
    turn = AssistantTurn("", twice, Stop.TOOL_CALLS, Usage(), ("p", "a", "m"), ({"type": "tool_use", "id": "same"},) * 2)
    model = TurnsModel(turn, AssistantTurn("ok", (), Stop.DONE, Usage(), ("p", "a", "m")))
    async with LocalTwin(tmp_path) as twin:
        played = await play(twin, model)
    assert (tmp_path / "ran").read_text() == "x\n"
    assert "repeats" in contents(played)[1]
    replayed = model.requests[1].history[1]
    assert isinstance(replayed, AssistantTurn)
    assert replayed.native == ()
    assert len({one.id for one in replayed.tool_calls}) == 2


async def test_the_same_id_in_two_turns_is_fine(tmp_path: Path) -> None:
    one = {"id": "x", "name": "bash", "arguments": {"command": "echo 1"}}
    played = await play_script(tmp_path, {"tool_calls": [one]}, {"tool_calls": [one]}, {"text": "ok"})
    assert contents(played) == ["1\n", "1\n"]


async def test_the_turn_limit(tmp_path: Path) -> None:
    played = await play_script(tmp_path, *[calls(call("bash", command="echo x >> n"))] * 5, limits=Limits(max_turns=3))
    assert ending(played) == (3, "max_turns")
    assert (tmp_path / "work/n").read_text() == "x\n" * 3
    assert played.history.for_request()


async def test_the_time_limit_stops_a_running_command(tmp_path: Path) -> None:
    def arrange(agent: Agent) -> None:
        # What Watch.listening does with call_later; here at once when the command runs.
        asyncio.get_running_loop().call_later(0.3, agent.watch._stop, Cause.TIME)

    played = await play_script(
        tmp_path,
        calls(call("bash", command="echo a > began; exec sleep 60"), call("bash", command="touch ran")),
        arrange=arrange,
    )
    assert ending(played) == (3, "timeout")
    assert contents(played)[0].startswith("The time for the task ended while this ran")
    assert contents(played)[1] == "This was not run: the time for the task is over."
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["began"]


@pytest.mark.parametrize("where", ["twin", "ssh"])
async def test_e6_an_interrupted_command_keeps_its_output(tmp_path: Path, sandbox: InProcessSandbox, where: str) -> None:
    """Redacted, cut as any output is, and the same text over both transports."""
    agents: list[Agent] = []
    over_ssh = open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True)
    async with over_ssh if where == "ssh" else LocalTwin(sandbox.workspace) as transport:
        run, seen = transport.exec, bytearray()

        async def watched(script: str | bytes, *, on_output: OnOutput, **options: Any) -> ExecResult:
            async def notice(stream: Stream, data: bytes) -> None:
                await on_output(stream, data)
                seen.extend(data)
                if seen.endswith(b"s3cret-value\n"):
                    agents[0].watch.interrupt()

            return await run(script, on_output=notice, **options)

        transport.exec = watched  # type: ignore[method-assign]
        script = write_script(tmp_path, calls(call("bash", command="(seq 1 3000; echo s3cret-value) | cat; exec sleep 60")))
        played = await play(transport, open_model(f"scripted/{script}"), redact=Redactor(["s3cret-value"]), arrange=agents.append)
    assert ending(played) == (130, "interrupted")
    lines = contents(played)[0].split("\n")
    assert (lines[0], lines[1998:2001]) == ("1002", ["3000", MARK, ""])
    assert lines[2001:] == [
        "[Of 13,906 bytes of output you see the last 2,000 lines; what came before was dropped. To see all, send it to a file.]",
        "",
        "Interrupted by the user while this ran; its outcome is unknown and it may have taken effect.",
    ]
    assert played.results[0].is_error


async def test_giving_up_pays_what_is_owed_at_once(tmp_path: Path) -> None:
    """The second Ctrl-C while the kill is still waited for: ``abandon`` is synchronous and leaves a valid history."""
    given_up: list[tuple[list[str], tuple[int, str], bool]] = []
    agents: list[Agent] = []

    def give_up() -> None:
        running = agents[0].calls.running
        outcome = agents[0].abandon()
        given_up.append((running, (outcome.exit_code, outcome.reason), bool(agents[0].history.pending)))
        raise SystemExit  # what os._exit is in the command

    class Told(LocalTwin):
        async def exec(self, script: str | bytes, **options: Any) -> ExecResult:
            asyncio.get_running_loop().call_soon(agents[0].watch.interrupt)
            try:
                return await super().exec(script, **options)
            except asyncio.CancelledError:
                agents[0].watch._give_up = give_up
                with pytest.raises(SystemExit):
                    agents[0].watch.interrupt()
                raise

    (tmp_path / "work").mkdir()
    await play_script(  # goes on, since nothing exits here, and finds its results paid
        tmp_path, calls(call("bash", command="exec sleep 60"), call("bash", command="touch ran")),
        transport=Told(tmp_path / "work"), arrange=agents.append,
    )  # fmt: skip
    assert given_up == [(["bash exec sleep 60"], (130, "interrupted"), False)]
    last = agents[0].history.turns[-1]
    assert isinstance(last, UserTurn)
    assert [result.content for result in last.results][1] == "Interrupted by the user before this ran."


async def test_model_failures_end_the_run(tmp_path: Path) -> None:
    assert ending(await play_script(tmp_path, {"fault": "unavailable"})) == (4, "model_unavailable")
    assert ending(await play_script(tmp_path, {"fault": "refused"})) == (1, "model_refused")
    played = await play_script(tmp_path, calls(call("bash", command="true")))
    assert ending(played) == (1, "model_refused")
    assert "no more turns" in played.outcome.message


# L4: decisions


async def test_decisions(tmp_path: Path) -> None:
    verdicts = iter([Verdict.BLOCK, Verdict.REQUIRE_APPROVAL, Verdict.WARN])
    asked: list[Action] = []

    async def decide(action: Action) -> Decision:
        asked.append(action)
        return Decision(next(verdicts), "since I say so")

    three = [call("bash", command=f"touch {name}") for name in "abc"]
    played = await play_script(tmp_path, calls(*three, raw("bash", "{")), {"text": "ok"}, decide=decide)
    assert contents(played)[:3] == [
        "This was not run: it is not allowed. Reason: since I say so",
        "This was not run: it needs an approval that nobody can give during this run. Reason: since I say so",
        "(no output)",
    ]
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["c"]
    assert [action.arguments for action in asked] == [{"command": f"touch {name}"} for name in "abc"]
    decisions = [event["verdict"] for event in played.events if event["type"] == "security_decision"]
    assert decisions == ["block", "require_approval", "warn"]
    assert [event["type"] for event in played.events].count("approval_requested") == 1


# the sandbox fails


class Lossy(LocalTwin):
    """Loses the connection when a command says so; ``after`` is what every later verb raises."""

    after: Exception | None = None
    lost = False

    async def exec(self, script: str | bytes, **options: Any) -> ExecResult:
        if self.lost and self.after is not None:
            raise self.after
        result = await super().exec(script, **options)
        if "LOSE" in str(script):
            self.lost = True
            msg = "the ssh connection was lost"
            raise ConnectionLost(msg, stdout=result.stdout)
        return result


async def lose(root: Path, after: Exception | None) -> Played:
    (root / "work").mkdir()
    transport = Lossy(root / "work")
    transport.after = after
    return await play_script(
        root,
        calls(call("bash", command="echo run >> log; echo part; : LOSE"), call("bash", command="touch next")),
        {"text": "ok"},
        transport=transport,
    )


async def test_p48_a_lost_connection_is_an_error_result_and_is_not_run_again(tmp_path: Path) -> None:
    played = await lose(tmp_path, None)
    assert ending(played) == (0, "done")
    assert contents(played)[0].startswith("part\n\nThe environment stopped responding while this ran; its outcome is unknown")
    assert played.results[0].is_error
    assert (tmp_path / "work/log").read_text() == "run\n"
    assert (tmp_path / "work/next").exists()


@pytest.mark.parametrize(
    ("after", "end"),
    [
        (Unreachable("127.0.0.1: refused"), (4, "unreachable")),
        (ConnectionLost("again"), (4, "connection_lost")),
        (HostKeyMismatch("another one"), (2, "host_key_mismatch")),
    ],
)
async def test_a_sandbox_that_is_gone_ends_the_run(tmp_path: Path, after: Exception, end: tuple[int, str]) -> None:
    played = await lose(tmp_path, after)
    assert ending(played) == end
    assert "ssh" not in contents(played)[0]
    assert contents(played)[1] == "This was not run: the environment cannot be used any more."
    assert not (tmp_path / "work/next").exists()


async def test_p35_the_workspace_was_deleted(tmp_path: Path) -> None:
    played = await play_script(
        tmp_path,
        calls(call("bash", command='rm -rf "$PWD"'), call("bash", command="echo hi"), call("write", path="a", content="x")),
        calls(call("bash", command="cat a")),
        {"text": "ok"},
    )
    assert "does not exist any more" in contents(played)[1]
    assert contents(played)[2:] == ["Wrote 1 bytes to a.", "x"]
    assert ending(played) == (0, "done")


# bugs


async def test_a_bug_in_a_tool_leaves_a_valid_history(tmp_path: Path) -> None:
    class Broken(LocalTwin):
        async def exec(self, script: str | bytes, **options: Any) -> ExecResult:
            raise ZeroDivisionError(script, options)

    agents: list[Agent] = []
    (tmp_path / "work").mkdir()
    with pytest.raises(ZeroDivisionError):
        await play_script(
            tmp_path, calls(call("bash", command="a"), call("bash", command="b")),
            transport=Broken(tmp_path / "work"), arrange=agents.append,
        )  # fmt: skip
    assert agents[0].history.for_request()
    last = agents[0].history.turns[-1]
    assert isinstance(last, UserTurn)
    assert [result.content.partition(",")[0].partition(";")[0] for result in last.results] == [
        "This ended by an internal error", "This was not run",
    ]  # fmt: skip


# L5: secrets


async def test_p62_secrets_are_in_no_text_that_leaves_the_loop(tmp_path: Path) -> None:
    secret = "sk-" + "m4rk3r" * 5
    played = await play_script(
        tmp_path,
        calls(
            call("bash", command=f"echo {secret}; exit 1"), call("read", path=secret), call("bash", timeout=secret),
            text=f"I say {secret}",
        ),
        {"text": f"It is {secret}"},
        task=f"find {secret}",
        redact=Redactor([secret]),
    )  # fmt: skip
    assert contents(played)[0] == f"{MARK}\n\nCommand exited with code 1"
    everything = json.dumps([played.shown, played.outcome.text, contents(played)])
    everything += "".join(file.read_text() for file in played.folder.iterdir())
    assert "m4rk3r" not in everything
