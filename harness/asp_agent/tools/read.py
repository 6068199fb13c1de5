"""The ``read`` tool: the head of a text file, or a page of it."""

import shlex

from asp.transport import Transport
from asp_agent.messages import ToolSchema
from asp_agent.tools.tool import Arguments, Produced, Redact, Tool
from asp_agent.tools.truncate import MAX_BYTES, MAX_LINES, head, lines_from, size

SCAN_BYTES = 16 << 20
"""How far into a file lines are found and counted: 16 MiB. Beyond it a file is for bash."""

SNIFF_BYTES = 8192
LONG_LINE_CHARACTERS = 2000

SCHEMA = ToolSchema(
    name="read",
    description=(
        f"Read a text file. Gives at most {MAX_LINES:,} lines or {MAX_BYTES:,} bytes from the start of the file, or "
        "from line `offset`; a note at the end says where to continue. Line numbers are not part of the text."
    ),
    parameters={
        "type": "object",
        "properties": {
            "path": {
                "type": "string",
                "minLength": 1,
                "description": "File to read, absolute or relative to the working directory",
            },
            "offset": {
                "type": "integer",
                "minimum": 1,
                "description": "First line to read; the first line of a file is 1",
            },
            "limit": {"type": "integer", "minimum": 1, "description": "How many lines to read at most"},
        },
        "required": ["path"],
        "additionalProperties": False,
    },
)


async def read(arguments: Arguments, transport: Transport, redact: Redact) -> Produced:
    """Return the lines asked for: at most 2000 and 51,200 bytes, whole lines, from ``offset`` (T1).

    Binary files (a NUL in the first 8 KiB) are named as such. Raises what ``Transport.read`` raises.
    """
    path: str = arguments["path"]
    offset, limit = int(arguments.get("offset", 1)), int(arguments.get("limit", MAX_LINES))
    if "\0" in path:
        return Produced("The path holds a NUL character, which no file name can have.", is_error=True)
    data = await transport.read(path, max_bytes=SCAN_BYTES + 1)
    partly = len(data) > SCAN_BYTES
    if b"\0" in data[:SNIFF_BYTES]:
        total = (await transport.stat(path)).size if partly else len(data)
        return Produced(
            f"{path} is a binary file ({total:,} bytes) and is not shown as text. Use bash to look into it.",
            is_error=True,
        )
    if not data:
        return (
            Produced("(empty file)") if offset == 1 else Produced(f"{path} is empty; there is no line {offset}.", is_error=True)
        )
    text = redact(data[:SCAN_BYTES].decode("utf-8", "replace"))
    if partly and "\n" in text:
        text = text[: text.rindex("\n") + 1]  # the last line may go on
    count = text.count("\n") + (not text.endswith("\n"))
    known = f"more than {count}" if partly else str(count)
    if offset > count:
        beyond = f" Only the first {SCAN_BYTES >> 20} MiB can be read here; use bash for the rest." if partly else ""
        return Produced(f"{path} has {known} lines; line {offset} is beyond its end.{beyond}", is_error=True)
    # Only the page is cut into lines: a million of them as texts of their own take 100 MB.
    lines = lines_from(text, offset, min(limit, MAX_LINES) + 1)
    return Produced(_page(path, lines, offset, limit, known))


def _page(path: str, lines: list[str], offset: int, limit: int, known: str) -> str:
    cut = head(lines, max_lines=min(limit, MAX_LINES))
    if cut.inside_line:
        return _long_line(path, lines[0], offset, known)
    end = offset - 1 + cut.lines
    notes: list[str] = []
    if cut.text.isspace():
        notes.append("Only whitespace.")
    if known != str(end):
        notes.append(f"Lines {offset}-{end} of {known}. Continue with offset={end + 1}.")
    return cut.text + (_gap(cut.text) + f"[{' '.join(notes)}]" if notes else "")


def _long_line(path: str, line: str, number: int, known: str) -> str:
    shown = line[:LONG_LINE_CHARACTERS].rstrip("\n")
    word = shlex.quote(path if not path.startswith("-") else f"./{path}")
    following = f" Lines after it: offset={number + 1}." if known != str(number) else ""
    return (
        f"{shown}\n\n[Line {number} of {known} is {size(line):,} bytes long; only its first {LONG_LINE_CHARACTERS:,} "
        f"characters are shown. For other parts use bash: sed -n '{number}p' {word} | "
        f"cut -c {LONG_LINE_CHARACTERS + 1}-{2 * LONG_LINE_CHARACTERS}.{following}]"
    )


def _gap(text: str) -> str:
    return "\n" if text.endswith("\n") else "\n\n"


READ = Tool(SCHEMA, summary="path", run=read, reads_only=True)
