"""Write the contract into the user's repository, and take it away again. No other file of theirs is touched but git's exclude."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from pathlib import Path

from asp.contract import CONTRACT_NAME
from asp.errors import ContractError, UsageError
from asp.terminal import printable
from asp_sandboxes import bubblewrap

_MAX_GIT_POINTER_BYTES = 4096
_PRIVATE = 0o600
_UNFINISHED = re.compile(re.escape(CONTRACT_NAME) + r"\.[0-9a-f]{16}")
LOOPBACK = "127.0.0.1"


def document(
    port: int, client_key: Path, host_key: str, *, user: str = bubblewrap.USER, workspace: str = str(bubblewrap.WORKSPACE)
) -> bytes:
    """Return the contract's bytes. ``host_key`` is ``TYPE BASE64``."""
    contract = {
        "version": "0",
        "transport": "ssh",
        "connection": {
            "host": LOOPBACK,
            "port": port,
            "user": user,
            "identity": {"file": str(client_key)},
            "host_key": host_key,
        },
        "workspace": workspace,
    }
    return json.dumps(contract, indent=2).encode() + b"\n"


def digest(data: bytes) -> str:
    """Return what :func:`digest_of` says of a file that holds this."""
    return hashlib.sha256(data).hexdigest()


def digest_of(path: Path) -> str | None:
    """Return the SHA-256 of a regular file, None if there is none; a link is not followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:  # an OSError for a directory
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return digest(file.read())
    except OSError:
        pass
    return None


def write(path: Path, data: bytes, *, replaces: str | None) -> str:
    """Write the contract, mode 0600, and return its digest.

    ``replaces`` is the digest of the file that may be overwritten; without it nothing is. Raises ContractError.
    """
    temporary = path.with_name(f"{CONTRACT_NAME}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            if replaces is not None and digest_of(path) == replaces:
                temporary.rename(path)
            else:
                os.link(temporary, path)  # fails if there is anything
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
    except FileExistsError as error:
        msg = f"{printable(str(path), newlines=False)}: exists already and is not ours; nothing was overwritten"
        raise UsageError(msg) from error
    except OSError as error:
        msg = f"{printable(str(path), newlines=False)}: cannot be written ({error.strerror})"
        raise ContractError(msg) from error
    return digest(data)


def remove(path: Path, *digests: str) -> bool:
    """Remove the contract if it is still one that we wrote; return whether it is gone. Raises ContractError."""
    _remove_unfinished(path)
    if digest_of(path) not in digests:
        return not os.path.lexists(path)
    try:
        path.unlink()
    except FileNotFoundError:
        return True
    except OSError as error:
        msg = f"{printable(str(path), newlines=False)}: cannot be removed ({error.strerror})"
        raise ContractError(msg) from error
    return True


def _remove_unfinished(path: Path) -> None:
    """Remove what :func:`write` leaves when it is killed: a private file of ours with a name that only it gives."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if _UNFINISHED.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                found = entry.stat(follow_symlinks=False)
                if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == _PRIVATE:
                    Path(entry.path).unlink()


def exclude_from_git(folder: Path) -> Path | None:
    """Keep the contract in ``folder`` out of commits (S5): one line in git's own, never committed ``info/exclude``.

    Returns the file if the line is in it, None if there is no repository or its layout is not one we know. git is not run:
    settings of a repository can make it run programs. A link is not followed: it could lead to any file of the user.
    """
    for top in (folder, *folder.parents):
        if os.path.lexists(top / ".git"):
            break
    else:
        return None
    shared = _shared_git_folder(top / ".git")
    if shared is None:
        return None
    relative = "/".join(re.sub(r"([\\*?\[\] ])", r"\\\1", part) for part in folder.relative_to(top).parts)
    line = f"/{relative}/{CONTRACT_NAME}" if relative else f"/{CONTRACT_NAME}"
    exclude = shared / "info" / "exclude"
    try:
        exclude.parent.mkdir(exist_ok=True)
        if exclude.parent.is_symlink():
            return None
        descriptor = os.open(exclude, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "rb+") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            present = file.read()
            if os.fsencode(line) not in present.splitlines():
                file.write((b"" if not present or present.endswith(b"\n") else b"\n") + os.fsencode(line) + b"\n")
    except OSError:
        return None
    return exclude


def _shared_git_folder(git: Path) -> Path | None:
    """Return the folder that holds ``info``: ``.git`` itself, or where a worktree's or submodule's file points to."""
    if git.is_symlink():
        return None
    if git.is_file():
        pointer = _pointer(git)
        if pointer is None or not pointer.startswith("gitdir: "):
            return None
        git = (git.parent / pointer.removeprefix("gitdir: ")).resolve()
        common = _pointer(git / "commondir")  # a worktree's own folder has no info/exclude; a submodule's has no commondir
        if common is not None:
            git = (git / common).resolve()
    return git if git.is_dir() and (git / "HEAD").is_file() else None


def _pointer(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            text = os.fsdecode(file.read(_MAX_GIT_POINTER_BYTES)).strip("\n")
    except OSError:
        return None
    return None if "\0" in text else text
