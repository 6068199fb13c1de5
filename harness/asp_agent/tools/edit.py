"""The ``edit`` tool: replace exact pieces of a file and touch nothing else. It works on bytes (T2).

So invalid UTF-8, mixed line endings, a byte order mark and a missing final newline outside the match stay as they are.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from asp.transport import Transport
from asp_agent.messages import ToolSchema
from asp_agent.tools.tool import Arguments, Produced, Redact, Tool

COUNT_LIMIT = 1000
_BOM = b"\xef\xbb\xbf"
_BARE_LF = re.compile(rb"(?<!\r)\n")

SCHEMA = ToolSchema(
    name="edit",
    description=(
        "Replace exact pieces of text in a file. Each `oldText` must occur exactly once in the file as it is now, "
        "whitespace included; several edits of one call must not overlap and are all made, or none."
    ),
    parameters={
        "type": "object",
        "properties": {
            "path": {
                "type": "string",
                "minLength": 1,
                "description": "File to change, absolute or relative to the working directory",
            },
            "edits": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {
                        "oldText": {
                            "type": "string",
                            "minLength": 1,
                            "description": "The text to replace, exactly as it is in the file",
                        },
                        "newText": {"type": "string", "description": "The text to put there, taken literally"},
                    },
                    "required": ["oldText", "newText"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["path", "edits"],
        "additionalProperties": False,
    },
)


class EditRefused(Exception):
    """The edits cannot be made; the text tells the model why. The file is as it was."""


@dataclass(frozen=True, slots=True)
class _Span:
    number: int
    start: int
    end: int
    new: bytes


async def edit(arguments: Arguments, transport: Transport, _: Redact) -> Produced:
    """Make all edits or none. Raises what ``Transport.read`` and ``Transport.write`` raise."""
    path: str = arguments["path"]
    if "\0" in path:
        return Produced("The path holds a NUL character, which no file name can have.", is_error=True)
    pairs = [(str(one["oldText"]), str(one["newText"])) for one in arguments["edits"]]
    try:
        data = replace(await transport.read(path), pairs)
    except EditRefused as refusal:
        return Produced(f"{path} was not changed: {refusal}", is_error=True)
    await transport.write(path, data)
    return Produced(f"Made {len(pairs)} replacement{'s' if len(pairs) > 1 else ''} in {path}.")


def replace(original: bytes, edits: Sequence[tuple[str, str]]) -> bytes:
    """Return ``original`` with every (old, new) replaced, each matched against the original.

    Old text matches exactly; if it does not, an LF in it also matches CRLF. New lines get the ending of the lines that
    they stand among. Raises EditRefused: not found, not unique (with the count, overlapping ones too), no change...
    """
    mark = _BOM if original.startswith(_BOM) else b""
    body = original[len(mark) :]
    spans = sorted((_locate(body, number, old, new) for number, (old, new) in enumerate(edits, 1)), key=lambda span: span.start)
    for before, after in pairwise(spans):
        if after.start < before.end:
            first, second = sorted((before.number, after.number))
            msg = f"edits {first} and {second} overlap. Make one edit of them."
            raise EditRefused(msg)
    pieces, position = [mark], 0
    for span in spans:
        pieces += [body[position : span.start], span.new]
        position = span.end
    changed = b"".join([*pieces, body[position:]])
    if changed == original:
        msg = "the new text equals the old text."
        raise EditRefused(msg)
    return changed


def _locate(body: bytes, number: int, old_text: str, new_text: str) -> _Span:
    # A byte order mark belongs to the file, not to its first line: a model that saw it may copy it or not (P81).
    old, new = old_text.removeprefix("\ufeff").encode(), new_text.removeprefix("\ufeff").encode()
    if not old:
        msg = f"oldText of edit {number} is empty."
        raise EditRefused(msg)
    matches = list(_occurrences(body, re.compile(re.escape(old))))
    if not matches and b"\n" in old and b"\r" not in old:
        matches = list(_occurrences(body, re.compile(rb"\r?\n".join(re.escape(line) for line in old.split(b"\n")))))
    if not matches:
        hint = " The file holds bytes that are not UTF-8; they cannot be matched." if "\ufffd" in old_text else ""
        msg = f"oldText of edit {number} was not found. It must match exactly, with all whitespace and line breaks.{hint}"
        raise EditRefused(msg)
    if len(matches) > 1:
        count = str(len(matches)) if len(matches) <= COUNT_LIMIT else f"more than {COUNT_LIMIT}"
        msg = f"oldText of edit {number} occurs {count} times. Add lines around it so that it occurs once."
        raise EditRefused(msg)
    start, end = matches[0]
    return _Span(number, start, end, _BARE_LF.sub(b"\r\n", new) if _uses_crlf(body, start, end) else new)


def _occurrences(body: bytes, pattern: re.Pattern[bytes]) -> Iterator[tuple[int, int]]:
    """Yield every match, overlapping ones too (``aa`` is twice in ``aaa``), up to one more than the count limit."""
    found, position = 0, 0
    while found <= COUNT_LIMIT and (match := pattern.search(body, position)):
        yield match.span()
        found, position = found + 1, match.start() + 1


def _uses_crlf(body: bytes, start: int, end: int) -> bool:
    """Whether the first line that the match touches ends in CRLF; the last line of a file goes by the one before it."""
    newline = body.find(b"\n", start)
    if newline < 0:
        newline = body.rfind(b"\n", 0, end)
    return newline > 0 and body[newline - 1 : newline] == b"\r"


EDIT = Tool(SCHEMA, summary="path", run=edit)
