"""The ``bash`` tool: one command, the end of its output, its exit status."""

import asyncio

from asp.errors import ConnectionLost
from asp.transport import ExecResult, Stream, Transport
from asp_agent.messages import ToolSchema
from asp_agent.tools import spill
from asp_agent.tools.terminal_text import clean, decode_tail
from asp_agent.tools.tool import LOST, Arguments, Interrupted, Produced, Redact, Tool
from asp_agent.tools.truncate import MAX_BYTES, MAX_LINES, tail

DEFAULT_TIMEOUT_S = 120
MAX_TIMEOUT_S = 600
KEEP_BYTES = 4 * MAX_BYTES
"""What is kept of the output before it is cleaned: cleaning makes it shorter, so more than the limit is needed."""

SCHEMA = ToolSchema(
    name="bash",
    description=(
        "Run a bash command in the working directory, in a fresh shell each time. Gives stdout and stderr together "
        f"(the last {MAX_LINES:,} lines or {MAX_BYTES:,} bytes) and the exit status if it is not 0. stdin is empty. "
        "The command is stopped after `timeout` seconds; to leave something running, start it with & and send its "
        "output to a file."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string", "minLength": 1, "description": "The command, or a script of many lines"},
            "timeout": {
                "type": "number",
                "exclusiveMinimum": 0,
                "maximum": MAX_TIMEOUT_S,
                "description": f"Seconds; {DEFAULT_TIMEOUT_S} if not given, at most {MAX_TIMEOUT_S}",
            },
        },
        "required": ["command"],
        "additionalProperties": False,
    },
)


async def bash(arguments: Arguments, transport: Transport, redact: Redact) -> Produced:
    """Run the command with both streams merged where it runs, and give the tail of what it printed (T1).

    No environment is set: "only where the sandbox has none" would need to know the sandbox. A lost connection is an
    error result with the partial output; raises NotStarted and its subclasses. Cancelled, it raises Interrupted with the
    partial output if there was any (E6).
    """
    command: str = arguments["command"]
    timeout_s = float(arguments.get("timeout", DEFAULT_TIMEOUT_S))
    if "\0" in command:
        return Produced("The command holds a NUL character, which no shell can take. It was not run.", is_error=True)
    seen = _Seen()
    try:
        result = await transport.exec(command, merge_streams=True, timeout_s=timeout_s, keep_bytes=KEEP_BYTES, on_output=seen.add)
    except asyncio.CancelledError as cancelled:  # then there is no result that could hold the output
        if seen.total:
            raise Interrupted(_shown(seen.tail(), seen.total, redact)) from cancelled
        raise
    except ConnectionLost as lost:
        text = _shown(lost.stdout[-KEEP_BYTES:], len(lost.stdout), redact)
        return Produced(_below(text, LOST), is_error=True, failure=lost)
    kept = await spill.keep(transport, bytes(seen.head)) if _is_cut(result, redact) else None
    whole = kept is not None and len(seen.head) == result.stdout_bytes
    text = _shown(result.stdout, result.stdout_bytes, redact, kept, whole=whole)
    return Produced(*_with_ending(text, result, timeout_s))


def _is_cut(result: ExecResult, redact: Redact) -> bool:
    if result.stdout_bytes > len(result.stdout):
        return True
    return tail(redact(clean(decode_tail(result.stdout, cut=False)))).cut


class _Seen:
    """The end of the output that has come so far, and its beginning, as much of it as would be kept in a file."""

    def __init__(self) -> None:
        self.total = 0
        self.head = bytearray()
        self._kept = bytearray()

    async def add(self, _: Stream, data: bytes) -> None:
        self.total += len(data)
        self.head += data[: spill.MAX_BYTES - len(self.head)]
        self._kept += data
        if len(self._kept) > 2 * KEEP_BYTES:  # at twice the size, so that the cost is amortised
            del self._kept[:-KEEP_BYTES]

    def tail(self) -> bytes:
        return bytes(self._kept[-KEEP_BYTES:])


def _with_ending(text: str, result: ExecResult, timeout_s: float) -> tuple[str, bool]:
    if result.timed_out:
        return _below(text, f"Command timed out after {timeout_s:g} seconds and was stopped."), True
    text = text or "(no output)"
    if result.background:
        text = _below(text, "[A background process of this command is still running; what it prints from now on is not shown.]")
    if result.status:
        return _below(text, f"Command exited with code {result.status}"), True
    return text, False


def _shown(kept: bytes, total: int, redact: Redact, file: str | None = None, *, whole: bool = False) -> str:
    """Return the kept end of the output as text: cleaned, redacted before it is cut, with a note of what is missing.

    ``file`` is where the output was kept: ``whole``, or only its beginning.
    """
    missing = total > len(kept)
    text = decode_tail(kept, cut=missing)
    if missing and "\n" in text[:-1]:
        text = text.partition("\n")[2]  # the first line is a part of one, and could start in the middle of a secret
    cut = tail(redact(clean(text)))
    shown = cut.text
    if shown.isspace():
        shown = _below(shown, "[Only whitespace.]")
    if not (missing or cut.cut):
        return shown
    what = "the end of the last line" if cut.inside_line else f"the last {cut.lines:,} lines"
    where = "what came before was dropped. To see all, send it to a file."
    if file is not None:
        where = f"all of it is in {file}" if whole else f"its first {spill.MAX_BYTES >> 20} MiB are in {file}"
    note = f"[Of {total:,} bytes of output you see {what}; {where}]"
    return _below(shown, note)


def _below(text: str, note: str) -> str:
    kept = text.rstrip("\n")
    return f"{kept}\n\n{note}" if kept.strip() else note


BASH = Tool(SCHEMA, summary="command", run=bash)
