"""What a person sees: lines that fit the terminal, nothing obeyed, plain text in a pipe."""

import io

import pytest

from asp_agent.display import Header, Outcome, TextDisplay, add_usage, reason_of, summarise
from asp_agent.errors import ModelUnavailable
from asp_agent.messages import ToolResult, Usage
from asp_agent.run import RunFolderFailed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(5, "Input/output error")


def play(out: io.StringIO, err: io.StringIO) -> None:
    display = TextDisplay(out, err)
    display.start(Header("m/x", False, "/p/.asp.json", "/w", 5, 1.5, "/r"))
    display.streaming(10)
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
        "done: 2 turns, 1,234 tokens in, 5 out, 3.2 s",
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


@pytest.mark.parametrize("characters", [0, 10])
def test_after_ctrl_c_the_next_line_is_clean(monkeypatch: pytest.MonkeyPatch, characters: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    err = Terminal()
    display = TextDisplay(io.StringIO(), err)
    display.streaming(characters)
    err.write("^C")  # as the terminal does
    display.result(Outcome(130, "interrupted", "interrupted by the user"), None, 1)
    assert shown_lines(err) == ["asp-agent: interrupted by the user", ""]


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
    assert add_usage(Usage(1, None, 2, None), Usage(3, None, None, 4)) == Usage(4, None, 2, 4)
