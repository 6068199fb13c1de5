"""A run for people (L7): progress on stderr, the answer on stdout.

On a terminal the model's text appears as it is written, and one status line says what is waited for, how long, for how
many tokens and for how much. In a pipe there are whole lines only. Foreign text is shown, never obeyed (L8).
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from typing import TextIO

from asp.terminal import printable
from asp_agent import figures
from asp_agent.display import SCRIPTED, Header, Outcome, put
from asp_agent.messages import ToolResult, Usage
from asp_agent.screen import Screen

TICK_S = 0.5
"""How often the status line is drawn again, in seconds."""

_ERROR_LINES = 3
_THINKING = "thinking"


class TextDisplay:
    """For people. ``quiet``: nothing but the answer, notes and why a run failed."""

    def __init__(self, out: TextIO, err: TextIO, *, quiet: bool = False) -> None:
        """Write the answer to ``out`` and all else to ``err``."""
        self._out, self._quiet = out, quiet
        self._screen = Screen(err)
        self._one_terminal = self._screen.live and not quiet and _same_terminal(out, err)
        self._running: dict[str, str] = {}  # calls that run, by id
        self._waiting_since = self._began = time.monotonic()
        self._waiting = self._asked = False  # for the model or a tool; somebody is asked something
        self._figures = ""
        self._pieces = False  # text of this turn was shown as it came
        self._answer_shown = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, header: Header) -> None:
        """Two lines: model and sandbox, limits and record."""
        if header.scripted:
            self._line(SCRIPTED, "1")
        limit = f", {header.timeout_s:g} s" if header.timeout_s is not None else ""
        where = f"{header.model} in {header.workspace} ({header.contract})"
        self._line(printable(f"{where}, at most {header.max_turns} turns{limit}", newlines=False), wrap=True)
        self._line(f"record: {header.run}", "2", wrap=True)  # whole, so that it can be copied
        self._began = time.monotonic()
        self._wait()

    def text(self, piece: str) -> None:
        """Show it on a terminal; a pipe gets whole messages."""
        if self._screen.live and not self._quiet and (piece.strip() or self._pieces):
            self._screen.text(printable(piece if self._pieces else piece.lstrip("\n")))
            self._pieces = True

    def message(self, text: str, *, final: bool) -> None:
        """Show the whole text, if it did not stream. The final one is the answer and goes to stdout at the end."""
        self._screen.end_of_text()
        if final:
            self._answer_shown = self._pieces and self._one_terminal
            self._rest()
        elif not self._pieces:
            for line in printable(text.strip()).split("\n"):
                self._line(line, wrap=True)
        self._pieces = False

    def tool_call(self, call_id: str, name: str, raw_arguments: str, summary: str) -> None:  # noqa: ARG002
        """One line: the tool and the argument that says most."""
        self._end_of_text()
        shown = f"{printable(name, newlines=False)}  {printable(summary, newlines=False)}"
        self._line(f"> {shown}", "1")
        self._running[call_id] = shown
        self._wait()

    def tool_result(self, result: ToolResult, seconds: float) -> None:
        """One line: ok and how much text, or the end of the error; which call, if others ran beside it."""
        call = self._running.pop(result.tool_call_id, "")
        which = f"  {call}" if self._running and call else ""
        lines = [printable(line, newlines=False) for line in result.content.split("\n") if line.strip()]
        self._wait()
        if not result.is_error:
            self._line(f"  ok, {len(lines)} line{'s' if len(lines) != 1 else ''}, {figures.seconds(seconds)}{which}", "2")
            return
        for line in lines[-_ERROR_LINES:]:
            self._line(f"  {line}", "2")
        self._line(f"  error, {figures.seconds(seconds)}{which}", "31")

    def retrying(self, reason: str, wait_s: float, attempt: int) -> None:
        """One line. What had streamed does not count."""
        self._end_of_text()
        self._line(f"  try {attempt} failed ({printable(reason, newlines=False)}); again in {wait_s:.0f} s", "33")

    def usage(self, usage: Usage, total: Usage | None = None, cost_usd: float | None = None) -> None:
        """Change what the status line says."""
        parts = [figures.usage(total or usage)]
        if cost_usd is not None:
            parts.append(figures.money(cost_usd))
        self._figures = " · ".join(parts)

    def note(self, text: str) -> None:
        """One line, also when quiet."""
        self._end_of_text()
        self._screen.line(printable(text, newlines=False), "33", wrap=True)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Take the status line away until the answer is there."""
        self._end_of_text()
        self._asked = True
        self._screen.status("")
        try:
            yield
        finally:
            self._asked = False
            self._draw()

    def result(self, outcome: Outcome, run: str | None, duration_s: float) -> None:
        """Write the answer to stdout if the run is done; how it ended to stderr."""
        self._rest()
        self._end_of_text()
        if outcome.message:
            self._screen.line(f"asp-agent: {printable(outcome.message)}", wrap=True)
        if run is not None and outcome.turns:
            cost = f", {figures.money(outcome.cost_usd)}" if outcome.cost_usd is not None else ""
            turns = f"{outcome.turns} turn{'s' if outcome.turns != 1 else ''}"
            self._line(f"{outcome.reason}: {turns}, {figures.usage(outcome.usage)}{cost}, {figures.seconds(duration_s)}", "2")
        if outcome.exit_code == 0 and not self._answer_shown:
            put(self._out, printable(outcome.text.strip()) + "\n")

    def _line(self, text: str, style: str = "", *, wrap: bool = False) -> None:
        if not self._quiet:
            self._screen.line(text, style, wrap=wrap)

    def _end_of_text(self) -> None:
        self._screen.end_of_text()
        self._pieces = False

    def _wait(self) -> None:
        """Begin to wait for something else: the calls that run, or the model."""
        self._waiting, self._waiting_since = True, time.monotonic()
        self._draw()
        if self._timer is None and self._screen.live and not self._quiet:
            self._tick()

    def _rest(self) -> None:
        self._waiting = False
        self._running.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._draw()

    def _tick(self) -> None:
        with contextlib.suppress(RuntimeError):  # no event loop: nothing ticks
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._draw()

    def _draw(self) -> None:
        if self._quiet or self._asked:
            return
        now = time.monotonic()
        what = "; ".join(self._running.values()) or _THINKING
        # The figures first: what is cut on a narrow terminal is the end.
        parts = [f"… {now - self._waiting_since:.0f} s", f"{figures.seconds(now - self._began)} in all", self._figures, what]
        self._screen.status(" · ".join(filter(None, parts)) if self._waiting else "")


def _same_terminal(one: TextIO, other: TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return one.isatty() and other.isatty() and os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
    return False
