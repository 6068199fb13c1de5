"""Keep the whole output of a cut command in the sandbox, where the model's own ``read`` can open it (T2).

Other harnesses keep it on the harness's disk, which a remote ``read`` does not reach (facts/policy.md 0.9). The file is outside
the workspace, so that it is in no patch; its name is made of its content, so that the same output has the same name everywhere.
"""

import hashlib
import shlex
from weakref import WeakKeyDictionary

from asp.errors import AspError
from asp.transport import Transport

FOLDER = "/tmp"  # noqa: S108 - the sandbox's own, and the name tells nothing
MAX_BYTES = 10 << 20
"""Of one output so much is kept, from its beginning. 10 MiB."""

MAX_TOTAL_BYTES = 100 << 20
"""Of one run so much is kept; the oldest are removed. 100 MiB."""

_kept: WeakKeyDictionary[Transport, dict[str, int]] = WeakKeyDictionary()


async def keep(transport: Transport, data: bytes) -> str | None:
    """Write ``data`` to a file of the sandbox and return its path; None if it cannot be written: that must end nothing."""
    path = f"{FOLDER}/output-{hashlib.sha256(data).hexdigest()[:12]}.txt"
    files = _kept.setdefault(transport, {})
    if path in files:
        return path
    try:
        oldest: list[str] = []
        while files and sum(files.values()) + len(data) > MAX_TOTAL_BYTES:
            oldest.append(next(iter(files)))
            del files[oldest[-1]]
        if oldest:
            await transport.exec(f"rm -f -- {shlex.join(oldest)}")
        await transport.write(path, data)
    except AspError:
        return None
    files[path] = len(data)
    return path
