"""The Docker engine: connect to it, and say what about it could let a sandbox out.

Control calls go through docker-py (extra ``docker``), which negotiates the version of the API. Only an engine on this
machine, behind a unix socket, can be used: its containers are given folders of ours to read.
"""

import json
import os
import re
from pathlib import Path
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

from asp.errors import AspError, TransportError, UsageError, quoted

Engine: TypeAlias = Any
"""A docker-py ``APIClient``, which has no types."""

DEFAULT_SOCKET = "/var/run/docker.sock"
TIMEOUT_S = 60

# (component of /version, first version that has the fix in each line that got one, what it is)
_ESCAPES = (
    ("runc", ("1.1.12",), "CVE-2024-21626"),
    ("runc", ("1.2.8", "1.3.3", "1.4.0"), "CVE-2025-31133, CVE-2025-52565, CVE-2025-52881"),
    ("Engine", ("19.3.1",), "CVE-2019-14271"),
    ("Engine", ("23.0.15", "24.0.10", "25.0.6", "26.1.5", "27.1.1"), "CVE-2024-41110"),
)


class DockerFailed(AspError):
    """The engine refused something."""


class EngineGone(TransportError):
    """No engine answers."""


def socket_path() -> Path:
    """Return the socket of the engine that DOCKER_HOST, the current context or the default names. Raises UsageError."""
    named = os.environ.get("DOCKER_HOST") or _context_host() or f"unix://{DEFAULT_SOCKET}"
    parts = urlsplit(named)
    if parts.scheme != "unix" or not parts.path:
        msg = f"the Docker engine at {quoted(named)} is not on this machine; Docker sandboxes need one behind a unix socket"
        raise UsageError(msg)
    return Path(parts.path)


def connect() -> Engine:
    """Return a client of the engine, with a version of the API that both know. Raises UsageError, EngineGone."""
    try:
        from docker import APIClient  # noqa: PLC0415 - 0.2 s, and an extra
        from docker.errors import DockerException  # noqa: PLC0415 - the same
    except ModuleNotFoundError as error:
        msg = "the Docker SDK is not installed; install with: pip install 'asp-agent[docker]'"
        raise UsageError(msg) from error
    path = socket_path()
    try:
        return APIClient(base_url=f"unix://{path}", version="auto", timeout=TIMEOUT_S)
    except DockerException as error:
        msg = f"no Docker engine answers at {path} ({_why(path, error)})"
        raise EngineGone(msg) from error


def known_escapes(version: dict[str, Any]) -> list[str]:
    """Return a line for each known way out of a container that the versions in ``/version`` have.

    A distribution may have put the repair into an older version; the line says so.
    """
    found: list[str] = []
    for component in version.get("Components") or ():
        text = str(component.get("Version", ""))
        numbers = _numbers(text)
        holes = [what for name, fixed, what in _ESCAPES if component.get("Name") == name and numbers and _older(numbers, fixed)]
        if holes:
            name = str(component["Name"]).replace("Engine", "Docker")
            found.append(f"{name} {text} has known escapes ({', '.join(holes)}), unless your distribution has repaired them")
    return found


def explain(error: Exception) -> str:
    """Return the engine's own words, in one quoted line."""
    said = getattr(error, "explanation", None) or str(error)
    return quoted(str(cast("object", said)).partition("\n")[0])


def _context_host() -> str | None:
    """Return the endpoint of the context that ``docker context use`` has set, None if it is the default one."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path("~/.docker").expanduser())
    try:
        name = os.environ.get("DOCKER_CONTEXT") or json.loads((folder / "config.json").read_bytes()).get("currentContext")
        if not name or name == "default":
            return None
        for meta in (folder / "contexts" / "meta").glob("*/meta.json"):
            context = json.loads(meta.read_bytes())
            if context.get("Name") == name:
                return str(context["Endpoints"]["docker"]["Host"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return None
    return None


def _why(path: Path, error: Exception) -> str:
    if not path.exists():
        return "there is no such socket; is Docker installed and started?"
    if not os.access(path, os.W_OK):
        return "this user may not use it; add the user to the group docker, or use asp-sandbox up local"
    return str(error).partition("\n")[0][-100:]


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def _older(numbers: tuple[int, ...], fixed: tuple[str, ...]) -> bool:
    """Whether a version lacks a fix: older than the fix of its own line, or of a line older than all that got one."""
    lines = [_numbers(text) for text in fixed]
    same = [line for line in lines if line[:2] == numbers[:2] or (line[0] == numbers[0] and line[0] > 1)]
    return numbers < (same[0] if same else max(lines) if numbers > max(lines) else min(lines))
