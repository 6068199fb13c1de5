"""Show a run (L7): for people, progress on stderr and the answer on stdout; with ``--json``, only JSON lines on stdout.

Text comes here redacted, and what is foreign goes through ``asp.terminal.printable`` (L8). Without a terminal there is
no colour and no line that is rewritten.
"""

import contextlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TextIO, cast

from asp.errors import AspError
from asp.terminal import printable
from asp_agent.errors import OutputClosed
from asp_agent.messages import ToolResult, Usage

SCRIPTED = "scripted model: no LLM is called"
ERASE = "\r\x1b[K"
"""Back to the start of the terminal's line, and nothing on it."""

_MIN_WIDTH = 20
_ERROR_LINES = 3


@dataclass(frozen=True, slots=True)
class Header:
    """What a run is started with."""

    model: str
    scripted: bool
    contract: str
    workspace: str
    max_turns: int
    timeout_s: float | None
    run: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. ``reason`` is a word for programs, ``message`` a line for people, ``text`` the last answer."""

    exit_code: int
    reason: str
    message: str = ""
    text: str = ""
    turns: int = 0
    usage: Usage = field(default_factory=Usage)


def reason_of(error: AspError) -> str:
    """Return one word for programs: the class of the error, ConnectionLost as ``connection_lost``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()


class Display(Protocol):
    """What the loop tells about itself. Text is redacted before it comes here. Raises OutputClosed."""

    def start(self, header: Header) -> None:
        """Show what the run is started with."""
        ...

    def streaming(self, characters: int) -> None:
        """Show that the model is writing; ``characters`` so far, 0 when it is done."""
        ...

    def message(self, text: str, *, final: bool) -> None:
        """Show what the model says; ``final`` if it calls no tool with it."""
        ...

    def tool_call(self, call_id: str, name: str, raw_arguments: str, summary: str) -> None:
        """Show a call before it runs."""
        ...

    def tool_result(self, result: ToolResult, seconds: float) -> None:
        """Show what came of it."""
        ...

    def retrying(self, reason: str, wait_s: float, attempt: int) -> None:
        """Show that the model is asked again."""
        ...

    def usage(self, usage: Usage) -> None:
        """Show the tokens of one turn."""
        ...

    def note(self, text: str) -> None:
        """Show a line about the run itself."""
        ...

    def result(self, outcome: Outcome, run: str | None, duration_s: float) -> None:
        """Show the end. Always the last call."""
        ...


class TextDisplay:
    """For people."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        """Write the answer to ``out`` and all else to ``err``."""
        self._out, self._err = out, err
        self._live = err.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = self._live and not os.environ.get("NO_COLOR")

    def start(self, header: Header) -> None:
        """Two lines: model and sandbox, limits and record."""
        if header.scripted:
            self._line(SCRIPTED, "1")
        time = f", {header.timeout_s:g} s" if header.timeout_s is not None else ""
        self._line(f"{header.model} in {header.workspace} ({header.contract}), at most {header.max_turns} turns{time}")
        self._line(f"record: {header.run}", "2", wrap=True)  # whole, so that it can be copied

    def streaming(self, characters: int) -> None:
        """Rewrite a status line, on a terminal only."""
        if self._live:
            self._write(f"\r… {characters:,} characters\x1b[K" if characters else ERASE)

    def message(self, text: str, *, final: bool) -> None:
        """Show the whole text. The final one is the answer and goes to stdout at the end."""
        for line in printable(text.strip()).split("\n") if not final else []:
            self._line(line, wrap=True)

    def tool_call(self, call_id: str, name: str, raw_arguments: str, summary: str) -> None:  # noqa: ARG002
        """One line: the tool and the argument that says most."""
        self._line(f"> {printable(name, newlines=False)}  {printable(summary, newlines=False)}", "1")

    def tool_result(self, result: ToolResult, seconds: float) -> None:
        """One line: ok and how much text, or the end of the error."""
        lines = [printable(line, newlines=False) for line in result.content.split("\n") if line.strip()]
        if not result.is_error:
            self._line(f"  ok, {len(lines)} line{'s' if len(lines) != 1 else ''}, {seconds:.1f} s", "2")
            return
        for line in lines[-_ERROR_LINES:]:
            self._line(f"  {line}", "2")
        self._line(f"  error, {seconds:.1f} s", "31")

    def retrying(self, reason: str, wait_s: float, attempt: int) -> None:
        """One line."""
        self._line(f"  try {attempt} failed ({printable(reason, newlines=False)}); again in {wait_s:.0f} s", "33")

    def usage(self, usage: Usage) -> None:
        """Nothing: the sum is in the last line."""

    def note(self, text: str) -> None:
        """One line."""
        self._line(printable(text, newlines=False), "33", wrap=True)

    def result(self, outcome: Outcome, run: str | None, duration_s: float) -> None:
        """Write the answer to stdout if the run is done; how it ended to stderr."""
        if outcome.message:
            self._line(f"asp-agent: {printable(outcome.message)}", wrap=True)
        if run is not None and outcome.turns:
            self._line(f"{outcome.reason}: {outcome.turns} turns, {_tokens(outcome.usage)}, {duration_s:.1f} s", "2")
        if outcome.exit_code == 0:
            _put(self._out, printable(outcome.text.strip()) + "\n")

    def _line(self, text: str, style: str = "", *, wrap: bool = False) -> None:
        width = max(_MIN_WIDTH, shutil.get_terminal_size().columns) if self._live else 0
        if width and not wrap and len(text) > width:
            text = text[: width - 1] + "…"
        fresh = ERASE if self._live else ""  # the status line, or the ^C that the terminal has shown
        self._write(fresh + (f"\x1b[{style}m{text}\x1b[0m" if style and self._colour else text) + "\n")

    def _write(self, text: str) -> None:
        # stderr can be gone (SIGHUP, a closed pipe); that must not end the run, whose record is in the run folder.
        with contextlib.suppress(OSError, ValueError):
            self._err.write(text)
            self._err.flush()


class JsonDisplay:
    """For programs: one JSON object a line, the last one always ``{"type": "result", ...}``."""

    def __init__(self, out: TextIO) -> None:
        """Write to ``out`` only."""
        self._out = out

    def start(self, header: Header) -> None:
        """Emit ``start``."""
        note = {"note": SCRIPTED} if header.scripted else {}
        self._emit("start", **asdict(header), **note)

    def streaming(self, characters: int) -> None:
        """Nothing: a program is given whole messages."""

    def message(self, text: str, *, final: bool) -> None:  # noqa: ARG002
        """Emit ``message``."""
        self._emit("message", text=text)

    def tool_call(self, call_id: str, name: str, raw_arguments: str, summary: str) -> None:  # noqa: ARG002
        """Emit ``tool_call`` with the arguments as the model wrote them."""
        self._emit("tool_call", tool_call_id=call_id, name=name, raw_arguments=raw_arguments)

    def tool_result(self, result: ToolResult, seconds: float) -> None:
        """Emit ``tool_result`` with the exact text that the model is given."""
        self._emit("tool_result", **asdict(result), duration_s=round(seconds, 3))

    def retrying(self, reason: str, wait_s: float, attempt: int) -> None:
        """Emit ``retrying``."""
        self._emit("retrying", reason=reason, wait_s=wait_s, attempt=attempt)

    def usage(self, usage: Usage) -> None:
        """Emit ``usage``."""
        self._emit("usage", **asdict(usage))

    def note(self, text: str) -> None:
        """Emit ``note``."""
        self._emit("note", text=text)

    def result(self, outcome: Outcome, run: str | None, duration_s: float) -> None:
        """Emit ``result``."""
        self._emit("result", **asdict(outcome), run=run, duration_s=round(duration_s, 3))

    def _emit(self, kind: str, **fields: object) -> None:
        # ASCII only: no control or bidi character reaches a terminal as itself, and no locale matters.
        _put(self._out, json.dumps({"type": kind, **fields}) + "\n")


def _put(out: TextIO, text: str) -> None:
    """Write to stdout, now. Raises OutputClosed."""
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError as error:
        msg = "nobody reads the output any more"
        raise OutputClosed(msg) from error
    except OSError as error:
        msg = f"cannot write the answer ({error.strerror})"
        raise OutputClosed(msg) from error


def summarise(raw_arguments: str, argument: str) -> str:
    """Return the one argument that says most about a call, as one line; nothing if the arguments cannot be read."""
    try:
        arguments: Any = json.loads(raw_arguments)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(arguments, dict):
        return ""
    return " ".join(str(cast("dict[str, Any]", arguments).get(argument, "")).split())


def add_usage(total: Usage, more: Usage) -> Usage:
    """Add tokens; what one side does not know counts as nothing, and stays unknown only if neither knows it."""

    def add(one: int | None, two: int | None) -> int | None:
        return None if one is None and two is None else (one or 0) + (two or 0)

    return Usage(
        add(total.input_tokens, more.input_tokens),
        add(total.cache_read_tokens, more.cache_read_tokens),
        add(total.cache_write_tokens, more.cache_write_tokens),
        add(total.output_tokens, more.output_tokens),
    )


def _tokens(usage: Usage) -> str:
    if usage.input_tokens is None and usage.output_tokens is None:
        return "tokens unknown"
    return f"{usage.input_tokens or 0:,} tokens in, {usage.output_tokens or 0:,} out"
