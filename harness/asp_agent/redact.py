"""Take values that the harness holds out of text (L5): API keys, the identity's key text, a token used as user name.

One Redactor a run. It is applied to a tool's whole text before that is cut and before it enters the history, so model,
log and resume see the same; and to all that is logged or shown. It is a net, not a wall: it knows the exact value, its
URL-quoted, JSON-quoted and base64 form, and nothing else that a command can make of a value.
"""

import base64
import json
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar
from urllib.parse import quote

MARK = "[redacted]"
MIN_CHARACTERS = 8
"""Shorter values are not taken out: they occur by chance, and text full of marks tells more than it hides."""

_KEY_LINE_CHARACTERS = 32
T = TypeVar("T")


class Redactor:
    """Replaces the given values by ``[redacted]``. Line breaks inside a value stay, so lines keep their numbers."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        """Keep the values that are long enough, in every form; a longer one wins over what it contains."""
        forms = sorted({form for value in values for form in _forms(value)}, key=lambda form: (-len(form), form))
        self.forms = tuple(forms)
        self._pattern = re.compile("|".join(map(re.escape, forms))) if forms else None

    def __call__(self, text: str) -> str:
        """Return ``text`` without the values."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: MARK + "\n" * match.group().count("\n"), text)

    def outside(self, text: str, place: int) -> int:
        """Return ``place``, or where a value begins that ``place`` would cut in two."""
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            if match.start() < place < match.end():
                return match.start()
        return place

    def tree(self, value: T) -> T:
        """Return a JSON value with every string in it redacted, keys too."""
        if isinstance(value, str):
            return self(value)  # type: ignore[return-value]
        if isinstance(value, dict):
            return {self.tree(key): self.tree(item) for key, item in value.items()}  # type: ignore[return-value]
        if isinstance(value, list | tuple):
            return [self.tree(item) for item in value]  # type: ignore[return-value]
        return value


class StreamRedactor:
    """Redacts text that comes in pieces: what may be the beginning of a value is held back until it is known."""

    def __init__(self, redact: Redactor) -> None:
        """One for each text."""
        self._redact = redact
        self._held = ""

    def __call__(self, piece: str) -> str:
        """Return what can be shown now, redacted; it may be nothing."""
        text = self._held + piece
        known = len(text) - max((_overlap(text, form) for form in self._redact.forms), default=0)
        known = self._redact.outside(text, known)
        self._held = text[known:]
        return self._redact(text[:known])

    def rest(self) -> str:
        """Return what was held back, when the text is over."""
        held, self._held = self._held, ""
        return self._redact(held)


def _overlap(text: str, form: str) -> int:
    """Return how many characters at the end of ``text`` are a beginning of ``form``, and not the whole of it."""
    place = max(0, len(text) - len(form) + 1)
    while (place := text.find(form[0], place)) >= 0:
        if form.startswith(text[place:]):
            return len(text) - place
        place += 1
    return 0


def _forms(value: str) -> Iterator[str]:
    value = value.strip()
    if len(value) < MIN_CHARACTERS:
        return
    yield value
    yield quote(value, safe="")
    yield json.dumps(value)[1:-1]
    yield base64.b64encode(value.encode("utf-8", "surrogateescape")).decode().rstrip("=")
    if "\n" in value:  # key text: any of its lines is worth as much; CRLF and indentation must not hide it
        for line in value.splitlines():
            body = line.strip()
            if len(body) >= _KEY_LINE_CHARACTERS and not body.startswith("-----"):
                yield body
