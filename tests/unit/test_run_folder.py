"""L3: the record of a run can be checked and played back, and holds no secret."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from asp.errors import UsageError
from asp_agent.messages import AssistantTurn, Stop, ToolCall, ToolResult, Usage, UserTurn
from asp_agent.redact import Redactor
from asp_agent.run import MAX_STRING_CHARACTERS, RunFolder, RunFolderFailed, load_history, verify

SECRET = "sk-" + "m4rk3r" * 5
TURNS = (
    UserTurn("do it"),
    AssistantTurn(
        "looking", (ToolCall("c1", "bash", '{"command": "ls"}'), ToolCall("c2", "read", "{")), Stop.TOOL_CALLS,
        Usage(10, 1, None, 5), ("scripted", "scripted", "x"), ({"type": "thinking", "signature": "abc"},), "detail",
    ),
    UserTurn("", (ToolResult("c1", "bash", "a\n"), ToolResult("c2", "read", "bad", is_error=True))),
    AssistantTurn("done", (), Stop.DONE, Usage(), ("scripted", "scripted", "x")),
)  # fmt: skip


def record(*, final: bool = True) -> Path:
    folder = RunFolder.create({"task": f"use {SECRET}"}, Redactor([SECRET]))
    for turn in TURNS:
        folder.turn(turn)
    folder.event("usage", input_tokens=3)
    if final:
        folder.final(exit_code=0)
    return folder.path


def test_a_record_verifies_and_plays_back() -> None:
    path = record()
    chain = verify(path)
    assert (chain.events, chain.complete) == (8, True)
    assert load_history(path).turns == TURNS
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    first = json.loads((path / "events.jsonl").read_bytes().splitlines()[0])
    assert (first["seq"], first["prev"]) == (0, "0" * 64)


@pytest.mark.parametrize("line", range(8))
def test_any_changed_line_is_found(line: int) -> None:
    path = record()
    file = path / "events.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    changed = [*lines]
    changed[line] = lines[line].replace(b'"type": "', b'"type": "x', 1)
    for damaged in (changed, lines[:line] + lines[line + 1 :], [*lines[:line], lines[line], *lines[line:]]):
        file.write_bytes(b"".join(damaged))
        if line == 7 and len(damaged) <= len(lines):
            assert not verify(path).complete, "the last line: nothing follows that would tell, but the end is missing"
        else:
            with pytest.raises(RunFolderFailed, match="line"):
                verify(path)


@pytest.mark.parametrize("cut", [1, 10, 200])
def test_a_cut_line_is_found(cut: int) -> None:
    path = record(final=False)
    assert not verify(path).complete
    file = path / "events.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(RunFolderFailed, match=r"whole event|does not follow"):
        verify(path)


def test_nothing_after_the_end() -> None:
    path = record()
    with (path / "events.jsonl").open("ab") as file:
        chain = verify(path)
        file.write(json.dumps({"seq": chain.events, "prev": chain.head, "type": "usage"}).encode() + b"\n")
    with pytest.raises(RunFolderFailed, match="after the end"):
        verify(path)


def test_no_secret_is_recorded() -> None:
    redact = Redactor([SECRET])
    folder = RunFolder.create({"task": SECRET, "nested": [{"k": SECRET}]}, redact)
    call = ToolCall("c1", "bash", json.dumps({"command": f"echo {SECRET}"}))
    folder.turn(UserTurn(SECRET))
    folder.turn(replace(TURNS[1], text=SECRET, tool_calls=(call,), native=({"text": f"x{SECRET}x"},)))
    folder.turn(UserTurn("", (ToolResult("c1", "bash", f"<{SECRET}>"),)))
    folder.final(message=SECRET)
    for file in folder.path.iterdir():
        assert b"m4rk3r" not in file.read_bytes()
    verify(folder.path)


def test_texts_are_bounded() -> None:
    folder = RunFolder.create({}, Redactor())
    folder.event("message_delta", text="x" * (5 * MAX_STRING_CHARACTERS))
    folder.final()
    data = (folder.path / "events.jsonl").read_bytes()
    assert len(data) < MAX_STRING_CHARACTERS + 1000
    assert json.loads(data.splitlines()[0])["cut"] is True
    verify(folder.path)


def test_a_place_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    with pytest.raises(UsageError, match="XDG_STATE_HOME"):
        RunFolder.create({}, Redactor())


def test_a_full_disk_is_an_error_not_a_silent_gap(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with full.open("wb", buffering=0) as file:
        folder = RunFolder("id", tmp_path, file.fileno(), Redactor())
        with pytest.raises(RunFolderFailed, match="cannot write"):
            folder.event("usage")
