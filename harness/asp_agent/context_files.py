"""The project's own words to agents, AGENTS.md and CLAUDE.md, read in the sandbox and put into the prompt (L6).

They are read through the transport like everything else, once, before the first request. Whoever wrote the repository wrote
them, so they are shown at the start, and ``--no-context-files`` leaves them out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asp.errors import RemotePathError
from asp.transport import Transport

NAMES = ("AGENTS.md", "CLAUDE.md")
MAX_BYTES = 32 << 10
"""Of each file this much is taken. 32 KiB: more would be paid for with every request."""


@dataclass(frozen=True, slots=True)
class ContextFile:
    """One file: its name, its text, and its size in bytes as far as it was read."""

    name: str
    text: str
    cut: bool

    def described(self) -> str:
        """Return what is shown of it at the start."""
        size = len(self.text.encode("utf-8", "surrogatepass"))
        return f"{self.name} ({size:,} bytes{', the rest is left out' if self.cut else ''})"


async def read(transport: Transport, redact: Callable[[str], str]) -> list[ContextFile]:
    """Return the files that there are, redacted. Two with the same text are one. Raises TransportError."""
    found: list[ContextFile] = []
    for name in NAMES:
        try:
            data = await transport.read(name, max_bytes=MAX_BYTES + 1)
        except RemotePathError:  # not there, a folder, not readable: there is none
            continue
        text = redact(data[:MAX_BYTES].decode("utf-8", "replace"))
        if text.strip() and text not in {one.text for one in found} and b"\0" not in data:
            found.append(ContextFile(name, text, cut=len(data) > MAX_BYTES))
    return found


def prompt(files: Sequence[ContextFile]) -> str:
    """Return what is added to the system prompt; nothing if there are none."""
    parts = [f"\nThe project's notes for agents, from {one.name}:\n\n{one.text.rstrip()}\n" for one in files]
    return "".join(parts)
