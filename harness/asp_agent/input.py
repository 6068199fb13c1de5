"""What is piped into ``asp-agent run``: more context for the task, read once before the run begins.

``git diff | asp-agent run "review this"``. A terminal is not read, and a pipe that nobody writes to must not hang the
run: many programs leave one open to their children.
"""

import os
import select
import stat
from typing import NoReturn

from asp.errors import UsageError

MAX_BYTES = 256 << 10
"""More than this is refused: it would not be context any more. 256 KiB."""

FIRST_BYTE_S = 5.0
"""How long a pipe may say nothing before the run goes on without it, in seconds."""

REST_S = 30.0
"""How long a pipe that has begun may pause before it is said not to end, in seconds."""


def read_piped(descriptor: int = 0, *, first_byte_s: float = FIRST_BYTE_S, rest_s: float = REST_S) -> str | None:
    """Return what was piped in as text (UTF-8, wrong bytes replaced), "" if nothing was, None if nothing came in time.

    Only a pipe, a socket or a regular file is read, to its end. Raises UsageError: more than 256 KiB, a stream that has
    begun and does not end, an input that cannot be read.
    """
    try:
        kind = os.fstat(descriptor).st_mode
        if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or stat.S_ISREG(kind)):
            return ""
        data = bytearray()
        while True:
            patience = rest_s if data else first_byte_s
            if not stat.S_ISREG(kind) and not select.select([descriptor], [], [], patience)[0]:
                if not data:
                    return None
                _refuse(f"it began and then said nothing for {patience:g} s")
            try:
                piece = os.read(descriptor, 1 << 16)
            except BlockingIOError:  # somebody else took what was there, or it never was: ask again
                continue
            if not piece:
                return data.decode("utf-8", "replace")
            data += piece
            if len(data) > MAX_BYTES:
                _refuse(f"it is more than {MAX_BYTES >> 10} KiB; put it into a file of the sandbox (asp write) and name that")
    except OSError as error:
        _refuse(str(error.strerror))


def with_piped(task: str, piped: str) -> str:
    """Return the task with what was piped in below it; the task alone if that is nothing but white space."""
    if not piped.strip():
        return task
    return f"{task}\n\nThis was given along with the task:\n\n{piped.rstrip()}\n"


def _refuse(why: str) -> NoReturn:
    msg = f"standard input cannot be used as context: {why}"
    raise UsageError(msg)
