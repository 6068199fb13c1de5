"""Say in one line why this machine lets no local sandbox start, and which setting or flag allows it.

A refusal is found by really trying; the settings only explain it. All of these look alike from inside: the kernel says
EPERM (EACCES, ENOSPC) to the first step that makes a namespace or mounts something.
"""

import re
from pathlib import Path

from asp.errors import quoted

_FORBIDDEN = re.compile(
    r"Operation not permitted|Permission denied|No permissions to create|No space left on device|Read-only file system",
    re.IGNORECASE,
)
_CONTAINER_CGROUP = re.compile(r"docker|containerd|kubepods|libpod|lxc|podman")
_SECCOMP_FILTER = "2"


def explain(stderr: str, root: Path = Path("/")) -> str:
    """Return one line for what bubblewrap or the launcher wrote. ``root``: where ``/proc`` and ``/.dockerenv`` are read."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    first = (lines[-1] if lines and lines[0].startswith("Traceback") else lines[0]) if lines else "it ended without a word"
    if not _FORBIDDEN.search(first):
        return f"the sandbox did not start: {quoted(first)}"
    sysctl = root / "proc/sys"
    if _read(sysctl / "user/max_user_namespaces") == "0":
        reason = "user namespaces are turned off; allow them: sysctl -w user.max_user_namespaces=15000"
    elif in_container(root):
        flags = "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
        if _read(root / "proc/self/attr/current").startswith("docker-"):
            flags += " --security-opt apparmor=unconfined"
        reason = f"this container may not make namespaces; start it with: docker run {flags}"
    elif _read(sysctl / "kernel/unprivileged_userns_clone") == "0":
        reason = "ordinary users may not make user namespaces; allow it: sysctl -w kernel.unprivileged_userns_clone=1"
    elif _read(sysctl / "kernel/apparmor_restrict_unprivileged_userns") == "1":
        reason = (
            "AppArmor keeps ordinary users from making user namespaces; allow it with an AppArmor profile for bwrap, "
            "or: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        )
    elif _seccomp_mode(root) == _SECCOMP_FILTER:
        reason = "a seccomp filter over this process forbids it; start it without one"
    else:
        reason = "the kernel forbids it"
    return f"local sandboxes cannot start here: {reason} (it said {quoted(first)})"


def in_container(root: Path = Path("/")) -> bool:
    """Return whether we seem to run inside a container."""
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    return bool(_CONTAINER_CGROUP.search(_read(root / "proc/self/cgroup")))


def _seccomp_mode(root: Path) -> str:
    match = re.search(r"^Seccomp:\s*(\d)", _read(root / "proc/self/status"), re.MULTILINE)
    return match.group(1) if match else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
