"""An OpenSSH server that runs in any image: sshd, its libraries, its loader and a static busybox in one read-only folder.

It is made once for each version of what it is made from, on this machine, from the files of the distribution's own packages
(``openssh-server`` and ``busybox-static``), or of an image that has them; nothing is shipped and nothing is downloaded here.
It is mounted at a neutral path, and sshd is started through its own loader, so that the image needs no libc and nothing of
the image gets into sshd: not by ``LD_PRELOAD``, since the engine starts it with the image's environment cleared, nor by
``/etc/ld.so.preload``, whose name is changed inside the copied loader to one below the read-only folder.

OpenSSH 9.8 and later start a second program at a path that is compiled in (``sshd-session``); they are refused by name.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from asp.errors import AspError, quoted
from asp.state import state_dir

MOUNT = PurePosixPath("/opt/base")
"""Where it is in a sandbox. The path tells nothing."""

SSHD = ("/usr/sbin/sshd", "/usr/local/sbin/sshd")
BUSYBOX = ("/bin/busybox", "/usr/bin/busybox")
_LAYOUT = "1"
_PRELOAD, _NO_PRELOAD = b"/etc/ld.so.preload\0", b"/opt/base/.preload\0"
_LAST_GOOD = (9, 7)
_LIBRARY = re.compile(r"=>\s+(/\S+)|^\s+(/\S+)", re.MULTILINE)


class BundleMissing(AspError):
    """No OpenSSH server can be had for the sandbox."""

    exit_code = 2


@dataclass(frozen=True)
class Bundle:
    """A folder to mount read-only at :data:`MOUNT`."""

    folder: Path

    @staticmethod
    def sshd(config: str) -> list[str]:
        """Return the command that serves one connection on stdin and stdout."""
        lib = f"{MOUNT}/lib"
        return [f"{lib}/ld.so", "--inhibit-cache", "--library-path", lib, f"{MOUNT}/bin/sshd", "-i", "-f", config]

    @staticmethod
    def shell() -> str:
        """Return the path of a POSIX shell that is always there."""
        return f"{MOUNT}/bin/sh"

    @staticmethod
    def tools() -> str:
        """Return the folder with busybox's tools."""
        return f"{MOUNT}/bin"


def is_made() -> bool:
    """Whether :func:`make` has nothing to do."""
    try:
        return (_folder(_sources()) / "bin" / "sshd").is_file()
    except BundleMissing:
        return False


def make() -> Bundle:
    """Return the bundle, made now if it is not there yet. Two that make it at once do not disturb each other.

    Raises BundleMissing: this machine has no sshd or no static busybox (or one that cannot be moved); AspError: no disk.
    """
    sources = _sources()
    folder = _folder(sources)
    if not (folder / "bin" / "sshd").is_file():
        try:
            _make_at(folder, sources)
        except OSError as error:
            msg = f"{error.filename or folder}: cannot make the OpenSSH bundle ({error.strerror})"
            raise AspError(msg) from error
    return Bundle(folder)


def _sources() -> dict[str, Path]:
    """Return what is copied: the path in the bundle, and the file. Raises BundleMissing."""
    sshd = next((Path(path) for path in SSHD if os.access(path, os.X_OK)), None)
    busybox = next((Path(path) for path in BUSYBOX if os.access(path, os.X_OK)), None)
    if sshd is None or busybox is None:
        package = "openssh-server" if sshd is None else "busybox-static"
        msg = (
            f"a Docker sandbox needs {package} on this machine, to be shown read-only in it; type: sudo apt-get install {package}"
        )
        raise BundleMissing(msg)
    loader, libraries = _libraries(sshd)
    if _interpreter(busybox) is not None:
        msg = f"{busybox} is not static; type: sudo apt-get install busybox-static"
        raise BundleMissing(msg)
    return {"bin/sshd": sshd, "bin/busybox": busybox, "lib/ld.so": loader, **{f"lib/{path.name}": path for path in libraries}}


def _libraries(program: Path) -> tuple[Path, list[Path]]:
    """Return the loader of a program and all libraries that it loads, as its own loader says. Raises BundleMissing."""
    loader = _interpreter(program)
    if loader is None:
        msg = f"{program} names no loader, so it cannot be moved"
        raise BundleMissing(msg)
    done = subprocess.run([loader, "--list", program], capture_output=True, text=True, check=False, env={})  # noqa: S603
    found = sorted({Path(first or second) for first, second in _LIBRARY.findall(done.stdout)} - {loader})
    if done.returncode or not found:
        msg = f"the libraries of {program} cannot be found: {quoted(done.stderr)}"
        raise BundleMissing(msg)
    return loader, [path for path in found if path.name != loader.name]


def _interpreter(program: Path) -> Path | None:
    """Return the loader that an ELF file names (PT_INTERP), None for a static one. Little-endian 64 bit only."""
    data = program.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    start, size, count = (int.from_bytes(data[at : at + width], "little") for at, width in ((32, 8), (54, 2), (56, 2)))
    for number in range(count):
        header = data[start + number * size :][:size]
        if int.from_bytes(header[:4], "little") == 3:  # noqa: PLR2004 - PT_INTERP
            offset, length = int.from_bytes(header[8:16], "little"), int.from_bytes(header[32:40], "little")
            return Path(data[offset : offset + length].rstrip(b"\0").decode())
    return None


def _folder(sources: Mapping[str, Path]) -> Path:
    parts = [_LAYOUT, os.uname().machine]
    for name, path in sorted(sources.items()):
        status = path.stat()
        parts.append(f"{name} {path} {status.st_size} {status.st_mtime_ns}")
    return state_dir("openssh") / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _make_at(folder: Path, sources: Mapping[str, Path]) -> None:
    _refuse_split_sshd(sources["bin/sshd"])
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        for name in ("bin", "lib"):
            (scratch / name).mkdir(mode=0o755)
        for name, source in sources.items():
            data = source.read_bytes()
            if name == "lib/ld.so":
                if data.count(_PRELOAD) != 1:
                    msg = f"{source}: this loader names /etc/ld.so.preload in another way, so it cannot be kept from it"
                    raise BundleMissing(msg)
                data = data.replace(_PRELOAD, _NO_PRELOAD)
            (scratch / name).write_bytes(data)
            (scratch / name).chmod(0o755)
        listed = subprocess.run([scratch / "bin/busybox", "--list"], capture_output=True, text=True, check=True)  # noqa: S603
        for applet in listed.stdout.split():
            if applet != "busybox":
                (scratch / "bin" / applet).symlink_to("busybox")
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:  # somebody else was quicker
            if not (folder / "bin" / "sshd").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _refuse_split_sshd(sshd: Path) -> None:
    done = subprocess.run([sshd, "-V"], capture_output=True, text=True, check=False)  # noqa: S603 - the distribution's own
    version = re.search(r"OpenSSH_(\d+)\.(\d+)", done.stderr + done.stdout)
    if version is None or (int(version[1]), int(version[2])) > _LAST_GOOD:
        said = quoted((done.stderr + done.stdout).partition("\n")[0])
        msg = (
            f"{sshd} cannot be moved into a sandbox: it says {said}, and from 9.8 on sshd needs a second program at a fixed path"
        )
        raise BundleMissing(msg)
