"""The terminal under a run: lines that stay, text that streams, and one status line that is rewritten below them.

Without a terminal (a pipe, ``TERM=dumb``) there is no colour, no status line and nothing is rewritten. What comes here
is safe to show (``asp.terminal.printable``): nothing is escaped again.
"""

import contextlib
import os
import shutil
import unicodedata
from typing import TextIO

ERASE = "\r\x1b[K"
"""Back to the start of the terminal's line, and nothing on it."""

MIN_WIDTH = 20


class Screen:
    """Writes to one stream, which may go away at any time: then what is written goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        """``live`` says whether lines can be rewritten."""
        self._stream = stream
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = self.live and not os.environ.get("NO_COLOR")
        self._status = ""  # what the status line says; nothing: there is none
        self._open = False  # streamed text stands at the cursor, and its line has no end yet

    def line(self, text: str, style: str = "", *, wrap: bool = False) -> None:
        """Write one line that stays, cut to the terminal's width unless it may ``wrap``. ``style`` is an SGR parameter."""
        self.end_of_text()
        shown = text if wrap or not self.live else cut(text, self.width)
        fresh = ERASE if self.live else ""  # the status line, or the ^C that the terminal has shown
        self._write(fresh + self._styled(shown, style) + "\n")
        self._draw()

    def text(self, piece: str) -> None:
        """Write on where the text that streams has come to."""
        if not piece:
            return
        fresh = ERASE if self.live and not self._open else ""
        self._write(fresh + piece)
        self._open = not piece.endswith("\n")
        if not self._open:
            self._draw()

    def end_of_text(self) -> None:
        """End the line of streamed text, if there is one."""
        if self._open:
            self._open = False
            self._write("\n")

    def status(self, text: str) -> None:
        """Show another status line; empty for none. Never while streamed text stands at the cursor."""
        if not self.live or text == self._status:
            return
        gone = bool(self._status) and not text
        self._status = text
        if gone and not self._open:
            self._write(ERASE)
        self._draw()

    @property
    def width(self) -> int:
        """Columns of the terminal, at least 20."""
        return max(MIN_WIDTH, shutil.get_terminal_size().columns)

    def _draw(self) -> None:
        if self._status and not self._open:
            # One column less: a full line would leave the cursor on the next one on some terminals.
            self._write(ERASE + self._styled(cut(self._status, self.width - 1), "2"))

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if style and self._colour else text

    def _write(self, text: str) -> None:
        # stderr can be gone (SIGHUP, a closed pipe); that must not end the run, whose record is in the run folder.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def cut(text: str, columns: int) -> str:
    """Return ``text`` if it fits into ``columns``, else as much as fits with a ``…``; wide characters take two columns."""
    if len(text) * 2 <= columns:
        return text
    taken = 0
    for place, character in enumerate(text):
        taken += _columns(character)
        if taken > columns:
            return _head(text[:place], columns - 1) + "…"
    return text


def _head(text: str, columns: int) -> str:
    taken = sum(map(_columns, text))
    while taken > columns:
        taken -= _columns(text[-1])
        text = text[:-1]
    return text


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
