"""Cut text to what a model is given (T1): the head of a file, the tail of an output. Pure; sizes in bytes of UTF-8.

No cut falls inside a character, and none inside a line unless that one line is over the limit by itself (P15, P20).
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_LINES = 2000
MAX_BYTES = 51_200
"""Equal to pi's and opencode's limits (facts/policy.md 3.2): prompts that were tuned with them keep their meaning."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A piece of a text: ``lines`` counts what is in it, ``cut`` is false when it is the whole.

    ``inside_line``: one line alone was over the limit, so ``text`` is a piece of that line.
    """

    text: str
    lines: int
    cut: bool
    inside_line: bool = False


def size(text: str) -> int:
    """Return the bytes of ``text`` in UTF-8."""
    return len(text.encode("utf-8", "surrogatepass"))


def split_lines(text: str) -> list[str]:
    """Return the lines of ``text``, each with its LF; a final LF ends the last line and starts none."""
    lines = text.split("\n")
    last = lines.pop()
    return [line + "\n" for line in lines] + ([last] if last else [])


def lines_from(text: str, first: int, most: int) -> list[str]:
    """Return at most ``most`` lines of ``text``, each with its LF, from line ``first`` (1 is the first)."""
    start = 0
    for _ in range(first - 1):
        start = text.find("\n", start) + 1
        if not start:
            return []
    lines: list[str] = []
    while len(lines) < most and start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        lines.append(text[start:end])
        start = end
    return lines


def head(lines: Sequence[str], *, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> Cut:
    """Return the first whole lines that fit. A first line that alone is too long gives no text and ``inside_line``."""
    taken, used = 0, 0
    for line in lines[:max_lines]:
        used += size(line)
        if used > max_bytes:
            break
        taken += 1
    whole = taken == len(lines)
    return Cut("".join(lines[:taken]), taken, cut=not whole, inside_line=not taken and not whole and max_lines > 0)


def tail(text: str, *, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> Cut:
    """Return the last whole lines that fit. A last line that alone is too long gives its last characters that fit."""
    lines = split_lines(text)
    taken, used = 0, 0
    for line in reversed(lines[-max_lines:]):
        used += size(line)
        if used > max_bytes:
            break
        taken += 1
    if taken == len(lines):
        return Cut(text, taken, cut=False)
    if taken:
        return Cut("".join(lines[-taken:]), taken, cut=True)
    return Cut(last_bytes(lines[-1], max_bytes), 1, cut=True, inside_line=True)


def last_bytes(text: str, max_bytes: int) -> str:
    """Return the longest end of ``text`` that is at most ``max_bytes`` long and starts with a whole character."""
    data = text.encode("utf-8", "surrogatepass")
    start = max(0, len(data) - max_bytes)
    while start < len(data) and data[start] & 0xC0 == 0x80:  # noqa: PLR2004 - 10xxxxxx continues a character
        start += 1
    return data[start:].decode("utf-8", "surrogatepass")
