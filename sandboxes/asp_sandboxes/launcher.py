"""Started by the gateway when that is root: become a uid of the sandbox's own, then become bubblewrap (S3).

With kernel uid 0 and no capability at all a process still writes most of ``/proc/sys`` [ran], so a sandbox never has it.
But after the drop everything below a 0700 home is out of reach, by path and by descriptor. So, in a mount namespace that
nobody else sees, what bubblewrap needs is first bound to neutral paths below ``/run``.

Root in a container has no CAP_SYS_ADMIN: the mount namespace belongs to a user namespace, whose maps (0 to 0 for the
mounts, the sandbox's uid to itself) only the parent may write. One socket carries the order and the handshake::

    launcher -> gateway   b"unshared"           gateway writes /proc/PID/{uid_map,gid_map}
    gateway -> launcher   one JSON line         {"uid": N, "binds": [[source, target]], "copies": [[source, target]],
                                                 "argv": [...], "processes": N}

Only the standard library, so that it starts with ``-I -S``. It fails with one line on stderr and status 125.
"""

import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import sys
from pathlib import Path

PLACE = "/run"
UNSHARED = b"unshared"
FAILED = 125

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18
_MS_NOSUID = 2
_MS_NODEV = 4
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class LaunchFailed(Exception):
    """One step failed; the text names it."""


def _check(result: int, step: str) -> None:
    if result != 0:
        msg = f"{step}: {os.strerror(ctypes.get_errno())}"
        raise LaunchFailed(msg)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    names = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    options = None if data is None else data.encode()
    _check(_libc.mount(*names, ctypes.c_ulong(flags), options), f"mount {target}")


def _read_line(channel: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = channel.recv(65536)
        if not piece:
            raise LaunchFailed("the gateway is gone")
        line += piece
    return line


def _launch(channel: socket.socket) -> None:
    parent = os.getppid()
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
    channel.sendall(UNSHARED)
    order = json.loads(_read_line(channel))
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", PLACE, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=16m")
    for source, target in order["binds"]:
        Path(target).mkdir(mode=0o755)
        _mount(source, target, None, _MS_BIND | _MS_REC)
    for source, target in order["copies"]:
        Path(target).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        Path(target).chmod(0o755)
    uid = order["uid"]
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.chdir("/")
    resource.setrlimit(resource.RLIMIT_NPROC, (order["processes"], order["processes"]))
    # bubblewrap asks for this too, but only once it runs; a change of uid takes it away, so not before the drop.
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        raise LaunchFailed("the gateway is gone")
    channel.close()
    os.execve(order["argv"][0], ["bwrap", *order["argv"][1:]], {})  # noqa: S606


def main() -> int:
    """Run with one argument, the number of the inherited socket. Returns only if something failed."""
    os.umask(0o022)
    try:
        _launch(socket.socket(fileno=int(sys.argv[1])))
    except LaunchFailed as error:
        sys.stderr.write(f"launcher: {error}\n")
    except OSError as error:
        sys.stderr.write(f"launcher: {error.filename or 'uid'}: {error.strerror}\n")
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
