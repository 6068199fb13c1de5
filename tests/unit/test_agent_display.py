"""What a person sees: lines that fit the terminal, nothing obeyed, plain text in a pipe."""

import asyncio
import io
import json
from pathlib import Path

import jsonschema
import pytest

from asp_agent.display import Header, JsonDisplay, Outcome, reason_of, summarise
from asp_agent.errors import ModelUnavailable
from asp_agent.messages import ToolResult, Usage
from asp_agent.run import RunFolderFailed
from asp_agent.text_display import TextDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(5, "Input/output error")


def play(out: io.StringIO, err: io.StringIO) -> None:
    display = TextDisplay(out, err)
    display.start(Header("m/x", False, "/p/.asp.json", "/w", 5, 1.5, "/r"))
    display.text("I lo")
    display.text("ok\x1b[2J\u202e.")
    display.message("I look\x1b[2J\u202e.", final=False)
    display.tool_call("c", "bash", "{}", "x" * 300 + "\x07")
    display.tool_result(ToolResult("c", "bash", "1\n\x1b]0;t\x07\n3\n4\n", is_error=True), 0.04)
    display.tool_result(ToolResult("c", "bash", "1\n"), 0.04)
    display.retrying("overloaded\n", 8, 2)
    display.result(Outcome(0, "done", text="answer\x1b\n", turns=2, usage=Usage(1234, None, None, 5)), "/r", 3.21)


def test_a_pipe_gets_plain_whole_lines() -> None:
    out, err = io.StringIO(), io.StringIO()
    play(out, err)
    assert out.getvalue() == "answer^[\n"
    assert err.getvalue().splitlines() == [
        "m/x in /w (/p/.asp.json), at most 5 turns, 1.5 s",
        "record: /r",
        "I look^[[2J<U+202E>.",
        "> bash  " + "x" * 300 + "^G",
        "  ^[]0;t^G",
        "  3",
        "  4",
        "  error, 0.0 s",
        "  ok, 1 line, 0.0 s",
        "  try 2 failed (overloaded^J); again in 8 s",
        "done: 2 turns, 1.2k in, 5 out, 3.2 s",
    ]


@pytest.mark.parametrize("columns", [20, 40])
def test_a_narrow_terminal_gets_cut_lines(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    err = Terminal()
    play(io.StringIO(), err)
    call = next(line for line in shown_lines(err) if line.startswith("> bash"))
    assert len(call) == columns
    assert call.endswith("…")
    assert {piece[:2] for piece in err.getvalue().split("\x1b")[1:]} == {"[K"}, "without colour lines are only erased"


def shown_lines(err: io.StringIO) -> list[str]:
    """Return what is left on each line of a terminal."""
    return [line.rpartition("\r\x1b[K")[2] for line in err.getvalue().split("\n")]


def test_a_narrow_terminal_gets_the_whole_path_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    err, run = Terminal(), "/home/somebody/.local/state/asp/runs/20260101T000000-0123456789abcdef"
    TextDisplay(io.StringIO(), err).start(Header("m/x", False, "/p/.asp.json", "/w", 5, 1.5, run))
    assert f"record: {run}" in shown_lines(err)


@pytest.mark.parametrize("text", ["", "I think"])
def test_after_ctrl_c_the_next_line_is_clean(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    err = Terminal()
    display = TextDisplay(io.StringIO(), err)
    display.text(text)
    err.write("^C")  # as the terminal does
    display.result(Outcome(130, "interrupted", "interrupted by the user"), None, 1)
    assert shown_lines(err)[-2:] == ["asp-agent: interrupted by the user", ""]


def test_text_streams_on_a_terminal_and_is_not_shown_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    out, err = io.StringIO(), Terminal()
    play(out, err)
    assert [line for line in shown_lines(err) if "I look" in line] == ["I look^[[2J<U+202E>."]
    assert out.getvalue() == "answer^[\n", "stdout is another place: it gets the answer"


async def test_the_status_line_says_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("asp_agent.text_display.TICK_S", 0.01)
    err = Terminal()
    display = TextDisplay(io.StringIO(), err)
    display.start(Header("m/x", False, "/p/.asp.json", "/w", 5, None, "/r"))
    assert status(err).endswith(" · thinking")
    display.usage(Usage(), Usage(12_345, 6_000, None, 900), 0.021)
    display.tool_call("1", "read", "{}", "a.txt")
    display.tool_call("2", "read", "{}", "b.txt")
    assert status(err).endswith("12.3k in (49% cached), 900 out · $0.02 · read  a.txt; read  b.txt")
    display.tool_result(ToolResult("1", "read", "x"), 1)
    assert status(err).endswith(" · read  b.txt")
    assert "  ok, 1 line, 1.0 s  read  a.txt" in shown_lines(err), "which one of several has ended"
    with display.asking():
        assert status(err) == ""
        before = err.getvalue()
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert err.getvalue() == before, "nobody writes over a question"
    display.tool_result(ToolResult("2", "read", "x"), 1)
    display.message("the answer", final=True)
    display.result(Outcome(0, "done", text="the answer", turns=1), "/r", 1)
    assert status(err) == ""


def status(err: io.StringIO) -> str:
    """Return the last line of the terminal, where the status line is."""
    return shown_lines(err)[-1]


def test_a_half_answer_that_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    err = Terminal()
    display = TextDisplay(io.StringIO(), err)
    display.text("half an ans")
    display.retrying("overloaded", 1, 1)
    display.text("\n\nwhole")
    display.message("whole", final=False)
    display.message("not streamed", final=False)
    assert shown_lines(err) == ["half an ans", "  try 1 failed (overloaded); again in 1 s", "whole", "not streamed", ""]


def test_quiet_is_the_answer_and_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out, err = io.StringIO(), Terminal()
    display = TextDisplay(out, err, quiet=True)
    display.start(Header("m/x", False, "/p/.asp.json", "/w", 5, 1.5, "/r"))
    display.text("I think")
    display.tool_call("c", "bash", "{}", "x")
    display.note("a warning")
    display.tool_result(ToolResult("c", "bash", "1", is_error=True), 0)
    display.result(Outcome(0, "done", text="answer", turns=2), "/r", 1)
    assert (out.getvalue(), shown_lines(err)) == ("answer\n", ["a warning", ""])


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    err = Terminal()
    play(io.StringIO(), err)
    assert "\x1b[1m> bash" in err.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    err = Terminal()
    play(io.StringIO(), err)
    assert "\x1b" not in err.getvalue()


def test_a_failure_says_why_and_leaves_stdout_empty() -> None:
    out, err = io.StringIO(), io.StringIO()
    TextDisplay(out, err).result(Outcome(4, "unreachable", "no route\x1b", text="half"), None, 1)
    assert (out.getvalue(), err.getvalue()) == ("", "asp-agent: no route^[\n")


def test_a_stderr_that_is_gone_does_not_end_the_run() -> None:
    out = io.StringIO()
    play(out, Gone())
    assert out.getvalue() == "answer^[\n"


def test_small_parts() -> None:
    assert summarise('{"command": "a\\n  b"}', "command") == "a b"
    assert [summarise(text, "command") for text in ("{", "[]", "{}", "[" * 10**5)] == [""] * 4
    assert reason_of(ModelUnavailable("x")) == "model_unavailable"
    assert reason_of(RunFolderFailed("x")) == "run_folder_failed"


SCHEMA = json.loads((Path(__file__).parents[2] / "schema/asp-agent-events.schema.json").read_text())


def test_every_json_line_is_in_the_schema() -> None:
    out = io.StringIO()
    display = JsonDisplay(out)
    display.start(Header("m/x", True, "/p/.asp.json", "/w", 5, 1.5, "/r"))
    display.start(Header("m/x", False, "/p/.asp.json", "/w", 5, None, "/r"))
    display.text("not shown")
    display.message("a\u2028\x1b", final=False)
    display.tool_call("c", "bash", "{", "")
    display.tool_result(ToolResult("c", "bash", "1", is_error=True), 0.5)
    display.retrying("overloaded", 1.5, 2)
    display.usage(Usage(1, None, None, 2), Usage(3), 0.5)
    display.note("n")
    display.result(Outcome(0, "done", text="x", turns=1), None, 1)
    check = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker())
    lines = out.getvalue().splitlines()
    assert len(lines) == 9
    assert out.getvalue().isascii()
    for line in lines:
        event = json.loads(line)
        check.validate(event)
        assert not check.is_valid({**event, "surprise": 1})
        for key in event:
            assert not check.is_valid({name: value for name, value in event.items() if name != key}) or key == "note"
