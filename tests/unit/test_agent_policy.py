"""Policies: what a file may say, what is decided of paths and commands, who is asked, and what the record keeps."""

import asyncio
import contextlib
import json
import os
import pty
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from agent_parts import call, calls, play_script

from asp.errors import ConnectionLost, UsageError
from asp.testing import LocalTwin
from asp_agent import approvals, policy
from asp_agent.approvals import TerminalApproval, approver
from asp_agent.decide import Action, Decision, Verdict, nobody_approves
from asp_agent.display import JsonDisplay
from asp_agent.policy import Judge, normal, resolve_in, simple_words
from asp_agent.text_display import TextDisplay

WORK = PurePosixPath("/w")


def write(folder: Path, **rules: Any) -> Path:
    path = folder / "policy.json"
    path.write_text(json.dumps({"version": "asp-policy/1", **rules}))
    return path


async def itself(path: PurePosixPath) -> PurePosixPath | None:
    return normal(path)


async def decided(folder: Path, tool: str, argument: str, resolve: policy.Resolve = itself, **rules: Any) -> Decision:
    judge = Judge(policy.load(write(folder, **rules)), WORK, resolve)
    return await judge(Action(tool, "c", {"command" if tool == "bash" else "path": argument}))


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("", "not JSON"), ("[]", "not of type 'object'"), ("{}", "'version' is a required property"),
        ('{"version": "asp-policy/2"}', "'asp-policy/1' was expected"),
        ('{"version": "asp-policy/1", "defualt": "allow"}', "defualt"),
        ('{"version": "asp-policy/1", "default": "block", "default": "allow"}', "a key is there twice"),
        ('{"version": "asp-policy/1", "capabilities": {"exec": "maybe"}}', "capabilities.exec: 'maybe' is not one of"),
        ('{"version": "asp-policy/1", "exec": [{"rule_key": "x", "argv": ["a"], "action": "allow"}]}', "exec.0.rule_key"),
        ("[" * 100_000, "not JSON"), (" " * (1 << 20) + "{}", "larger than 1 MiB"),
    ],
)  # fmt: skip
def test_a_policy_that_is_wrong_says_where(tmp_path: Path, document: str, complaint: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(document)
    with pytest.raises(UsageError) as refused:
        policy.load(path)
    assert complaint in str(refused.value)
    assert str(refused.value).startswith(f'the policy "{path}" cannot be used: ')
    assert "\n" not in str(refused.value)


def test_a_policy_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        policy.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("npm test", ("npm", "test")), ("  git  commit -m 'a b' ", ("git", "commit", "-m", "a b")), ("ls", ("ls",)),
        ("A=1 ls", None), ("ls | wc", None), ("ls; rm x", None), ("echo $HOME", None), ("echo `id`", None), ("a\nb", None),
        ("ls *", None), ("ls > x", None), ("echo 'a", None), ("", None), ("   ", None), ("ls ~", None), ("a & b", None),
        ("(ls)", None), ("ls\\ x", None), ("# x", None), ("a\0b", None), ("FOO+=1 ls", None), ("x {a,b}", None),
    ],
)  # fmt: skip
def test_simple_or_opaque(command: str, words: tuple[str, ...] | None) -> None:
    assert simple_words(command) == words


RULES: dict[str, Any] = {
    "capabilities": {"fs.read": "allow", "fs.write": "allow", "exec.opaque": "require_approval"},
    "protected_paths": [".env", "secrets/**", "**/*.pem", "/etc/shadow"],
    "exec": [
        {"rule_key": "NPM_TEST", "argv": ["npm", "test"], "action": "allow"},
        {"rule_key": "GIT", "argv": ["git", "..."], "action": "warn"},
        {"rule_key": "PUSH", "argv": ["git", "push", "..."], "action": "block"},
        {"rule_key": "CAT", "argv": ["cat", "..."], "action": "allow"},
    ],
}


@pytest.mark.parametrize(
    ("tool", "argument", "verdict"),
    [
        ("read", "a.txt", "allow"), ("write", "sub/a.txt", "allow"), ("edit", "/w/a", "allow"), ("ls", ".", "allow"),
        ("read", ".env", "block"), ("read", "x/../.ENV", "block"), ("write", "/w/secrets/a/b", "block"),
        ("ls", "secrets/", "block"), ("read", "k.pemx", "allow"),
        ("read", "deep/er/k.pem", "block"), ("read", "k.pem", "block"), ("read", "k.pem/below", "block"),
        ("read", "../x", "block"), ("read", "/etc/passwd", "block"), ("write", "/wx/a", "block"), ("read", "a\nb", "block"),
        ("bash", "npm test", "allow"), ("bash", "npm test -- x", "block"), ("bash", "git status", "warn"),
        ("bash", "git push", "block"),
        ("bash", "git push origin", "block"), ("bash", "ls | wc", "require_approval"), ("bash", "cat .env", "block"),
        ("bash", "cat //w/secrets/x", "block"), ("bash", "cat --file=.env", "block"), ("bash", "cat a", "allow"),
        ("bash", "make", "block"), ("unheard", "x", "block"),
    ],
)  # fmt: skip
async def test_the_strictest_rule_wins(tmp_path: Path, tool: str, argument: str, verdict: str) -> None:
    assert (await decided(tmp_path, tool, argument, **RULES)).verdict is Verdict(verdict)


async def test_the_default_is_block_and_only_used_when_nothing_applies(tmp_path: Path) -> None:
    assert (await decided(tmp_path, "bash", "make")).verdict is Verdict.BLOCK
    assert (await decided(tmp_path, "bash", "make", default="allow")).verdict is Verdict.ALLOW
    assert (await decided(tmp_path, "read", "/etc/x", outside_workspace="allow")).verdict is Verdict.BLOCK
    assert (await decided(tmp_path, "read", "/etc/x", outside_workspace="warn", default="allow")).verdict is Verdict.WARN
    assert (await decided(tmp_path, "read", ".env", protected_paths=[".env"], deny_operations=["write"], default="allow")).runs
    assert not (
        await decided(tmp_path, "write", ".env", protected_paths=[".env"], deny_operations=["write"], default="allow")
    ).runs


async def test_what_cannot_be_found_out_is_blocked(tmp_path: Path) -> None:
    async def nowhere(_: PurePosixPath) -> PurePosixPath | None:
        return None

    async def gone(_: PurePosixPath) -> PurePosixPath | None:
        msg = "gone"
        raise ConnectionLost(msg)

    assert (await decided(tmp_path, "read", "a", nowhere, default="allow")).verdict is Verdict.BLOCK
    with pytest.raises(ConnectionLost):
        await decided(tmp_path, "read", "a", gone, default="allow")


async def test_links_are_followed_where_they_are(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "secrets").mkdir(parents=True)
    (work / "link").symlink_to("secrets")
    (work / "out").symlink_to("/etc")
    (work / "dangling").symlink_to("secrets/new")
    (work / "loop").symlink_to("loop")
    (tmp_path / "door").symlink_to("work")
    rules = {"protected_paths": ["secrets"], "capabilities": {"fs.read": "allow", "fs.write": "allow"}}
    async with LocalTwin(work) as twin:
        for root in (work, tmp_path / "door"):  # the workspace may itself be reached by a link
            judge = Judge(policy.load(write(tmp_path, **rules)), PurePosixPath(root), resolve_in(twin))
            said = {
                path: (await judge(Action("write", "c", {"path": path}))).verdict.value
                for path in ("new/deep/er", "a b'c", "link/x", "out/passwd", "dangling", "loop", "link/../x", "secretsx")
            }
            assert said == {
                "new/deep/er": "allow", "a b'c": "allow", "link/x": "block", "out/passwd": "block", "dangling": "block",
                "loop": "block", "link/../x": "allow", "secretsx": "allow",
            }, root  # fmt: skip


async def test_in_a_run_what_is_refused_is_not_run_and_is_recorded(tmp_path: Path) -> None:
    judge = Judge(policy.load(write(tmp_path, **RULES)), PurePosixPath(tmp_path / "work"), itself)
    asked: list[str] = []

    async def approve(action: Action, decision: Decision) -> bool:
        asked.append(action.arguments["command"])
        return "yes" in action.arguments["command"]

    def arrange(agent: Any) -> None:
        agent.calls.approve = approve

    three = (call("bash", command="touch a; : yes"), call("bash", command="touch b; : no"), call("bash", command="touch c"))
    played = await play_script(tmp_path, calls(*three), {"text": "ok"}, decide=judge, arrange=arrange)
    assert played.outcome.exit_code == 0
    assert sorted(os.listdir(tmp_path / "work")) == ["a"]
    assert asked == ["touch a; : yes", "touch b; : no"]
    assert [result.is_error for result in played.results] == [False, True, True]
    assert "the user was asked and said no" in played.results[1].content
    assert "no rule of the policy applies" in played.results[2].content
    kinds = [event["type"] for event in played.events if event["type"].startswith(("security", "approval", "tool_started"))]
    assert kinds == [
        "security_decision", "approval_requested", "approval_answered", "tool_started",
        "security_decision", "approval_requested", "approval_answered", "security_decision",
    ]  # fmt: skip


async def test_without_a_terminal_nobody_is_asked(tmp_path: Path) -> None:
    judge = Judge(policy.load(write(tmp_path, **RULES)), PurePosixPath(tmp_path / "work"), itself)
    played = await play_script(tmp_path, calls(call("bash", command="touch a | cat")), {"text": "ok"}, decide=judge)
    assert "an approval that nobody can give" in played.results[0].content
    assert "approval_answered" not in {event["type"] for event in played.events}


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


async def test_the_terminal_is_asked(monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack) -> None:
    master, slave = pty.openpty()
    writing = stack.enter_context(os.fdopen(os.dup(slave), "w"))
    terminal = stack.enter_context(os.fdopen(slave))
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(sys, "stderr", writing)
    display = TextDisplay(sys.stdout, writing)
    assert approver(display, programs=True) is nobody_approves
    approve = approver(display, programs=False)
    assert isinstance(approve, TerminalApproval)
    action = Action("bash", "c", {"command": "rm -r x\x1b[8m | cat"})
    decision = Decision(Verdict.REQUIRE_APPROVAL, "because\x1b")

    async def answer(text: str) -> bool:
        os.write(master, text.encode())
        async with asyncio.timeout(30):
            return await approve(action, decision)

    assert [await answer(text) for text in ("n\n", "\n", "yes\n", "sure\n", "a\n")] == [False, False, True, False, True]
    async with asyncio.timeout(30):
        assert await approve(action, decision), "always: not asked again"
        waiting = asyncio.create_task(approve(Action("bash", "c", {"command": "other"}), decision))
        while not approvals.asyncio.get_running_loop()._selector.get_map():
            await asyncio.sleep(0)
        waiting.cancel()  # Ctrl-C
        with pytest.raises(asyncio.CancelledError):
            await waiting
    shown = b""
    os.set_blocking(master, False)
    while True:
        try:
            shown += os.read(master, 65536)
        except BlockingIOError:
            break
    assert b"approval needed: because^[" in shown
    assert b"command: rm -r x^[[8m | cat" in shown
    assert b"\x1b[8m" not in shown
    os.close(master)


def test_no_terminal_no_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert approver(JsonDisplay(sys.stdout), programs=False) is nobody_approves
