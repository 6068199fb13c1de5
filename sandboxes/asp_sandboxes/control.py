"""Ask the gateway something; start it first if it does not run."""

import contextlib
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asp.errors import AspError, TransportError, UsageError
from asp.state import state_dir
from asp_sandboxes.peer import unix_peer_uid

ANSWER_TIMEOUT_S = 60.0
"""More than a start or a stop takes at most in the gateway."""

_GATEWAY_START_TIMEOUT_S = 30.0
_TRIES = 3
_CONTROL_NAME = "control"
_READY = b"ready\n"


class GatewayGone(TransportError):
    """No gateway answers. Nothing runs without one."""


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Let one ``up`` or ``down`` of this user run at a time."""
    descriptor = os.open(state_dir("sandboxes") / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def ask(request: Mapping[str, Any], *, start: bool = False) -> dict[str, Any]:
    """Send one request and return the answer. With ``start``, a gateway is started if none answers.

    Raises GatewayGone, and what the gateway refused as UsageError or AspError with its exit code.
    """
    for attempt in range(_TRIES):
        try:
            answer = _converse(request)
        except GatewayGone:
            # Also when it answers nothing: it was about to end, idle, when we came, or it died. What it started died with it.
            if not start or attempt == _TRIES - 1:
                raise
            _start_gateway()
            continue
        if "error" in answer:
            kind: type[AspError] = UsageError if answer.get("exit_code") == UsageError.exit_code else AspError
            raise kind(answer["error"])
        return answer
    raise AssertionError  # the last attempt returns or raises


def _converse(request: Mapping[str, Any]) -> dict[str, Any]:
    folder = os.open(state_dir("gateway"), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(ANSWER_TIMEOUT_S)
    try:
        with connection:
            connection.connect(f"/proc/self/fd/{folder}/{_CONTROL_NAME}")
            if unix_peer_uid(connection) != os.getuid():
                raise GatewayGone("another user's process answers for the gateway")
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n"):
                piece = connection.recv(65536)
                if not piece:
                    raise GatewayGone("the gateway gave no answer")
                answer += piece
    except TimeoutError as error:
        msg = f"the gateway did not answer within {ANSWER_TIMEOUT_S:g} s"
        raise TransportError(msg) from error
    except OSError as error:
        msg = f"no gateway answers ({error.strerror})"
        raise GatewayGone(msg) from error
    finally:
        os.close(folder)
    found: dict[str, Any] = json.loads(answer)
    return found


def _start_gateway() -> None:
    """Start a gateway with an environment built from nothing, and return when it can be asked."""
    log = state_dir("gateway") / "log"
    kept = {name: os.environ[name] for name in ("HOME", "XDG_STATE_HOME") if name in os.environ}
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(log, flags, 0o600), "wb") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-I", "-m", "asp_sandboxes.gateway"],
            env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin", "LANG": "C.UTF-8", **kept},
            cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log_file, start_new_session=True,
        )  # fmt: skip
    if process.stdout is None:
        raise AssertionError
    with process.stdout as answer:
        readable, _, _ = select.select([answer], [], [], _GATEWAY_START_TIMEOUT_S)
        if readable and answer.readline() == _READY:
            # It lives on without us, as a child of init once we are gone; this says so to Popen.
            process.returncode = 0
            return
    process.kill()
    process.wait()
    msg = f"the gateway did not start; it wrote: {_last_line(log)}"
    raise UsageError(msg)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line), "nothing")
