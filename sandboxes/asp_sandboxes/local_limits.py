"""How much of the machine a local sandbox may take, and which limits are not in force: ``up`` says both.

bubblewrap makes no control group, so these are limits of a process or of a user in a namespace (setrlimit(2)). The server
inside sets them for itself before it serves, so all commands inherit them and cannot raise them.

Memory has none: RLIMIT_AS and RLIMIT_DATA count what is only reserved, so they break what reserves a lot (AddressSanitizer,
JVMs). If the machine runs out of memory, the kernel takes it from a sandbox first: ``oom_score_adj`` is raised inside.
"""

import os
import re

PROCESSES = 4096
DESCRIPTORS = (4096, 65536)
"""Soft and hard: the gateway's own are many more."""

_COUNTED_BY_NAMESPACE = (5, 14)
"""Since this kernel RLIMIT_NPROC counts a user's processes in one user namespace; before, all of the person's own."""


def limits(*, own_uid: bool, kernel: str | None = None) -> dict[str, tuple[int, int]]:
    """Return soft and hard limits by name, as setrlimit(2) names them without ``RLIMIT_``.

    ``own_uid``: the sandbox has a uid that nobody else has. ``kernel``: its release, by default this machine's.
    """
    found = {"NOFILE": DESCRIPTORS, "CORE": (0, 0)}
    if own_uid or _counts_by_namespace(kernel or os.uname().release):
        found["NPROC"] = (PROCESSES, PROCESSES)
    return found


def described(*, own_uid: bool, kernel: str | None = None) -> str:
    """Return one line for the person: the limits, and what has none."""
    megabytes = scratch_bytes() >> 20
    held = [f"/tmp, /dev/shm and home {megabytes} MiB each, in memory"]  # noqa: S108 - words
    missing = ["memory", "CPU", "the size of the workspace"]
    if "NPROC" in limits(own_uid=own_uid, kernel=kernel):
        held.insert(0, f"{PROCESSES} processes")
    else:
        missing.insert(0, "processes")
    return f"limits: {', '.join(held)}; none on {', '.join(missing)} (asp-sandbox up docker has them)"


def scratch_bytes() -> int:
    """Return the bound of each writable place that lives in memory: a quarter of it."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def _counts_by_namespace(release: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _COUNTED_BY_NAMESPACE
