"""Files in and out: push a folder into the workspace, and show what became of it (S6).

The tree that was pushed is kept on our side as ``base.tar``.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asp import archive
from asp.archive import Pushed, TreeError
from asp.contract import Contract
from asp.errors import UsageError, quoted
from asp.patch import Entry, patch
from asp.pull import pack_entries
from asp.state import state_dir
from asp.transport import Stream, Transport

PUSH_TIMEOUT_S = 600.0
DIFF_TIMEOUT_S = 120.0
_BASE = "base.tar"

SET_UP = b"/opt/deps/"
"""Where dependencies of a sandbox lie that were installed before its network went away (S4)."""


def base_folder(contract: Contract) -> Path:
    """Return the folder on our side that keeps the base tree for this endpoint and workspace."""
    where = f"{contract.host}\0{contract.port}\0{contract.host_key}\0{contract.workspace}"
    return state_dir("trees", hashlib.sha256(where.encode("utf-8", "surrogateescape")).hexdigest()[:32])


def forget_base(contract: Contract) -> None:
    """Remove the base tree of a sandbox that is gone."""
    shutil.rmtree(base_folder(contract), ignore_errors=True)


def move_base(old: Contract, new: Contract) -> None:
    """Let the base tree follow a sandbox to its new port and keys; its workspace is the same."""
    source = base_folder(old)
    if (source / _BASE).exists():
        (source / _BASE).replace(base_folder(new) / _BASE)
    shutil.rmtree(source, ignore_errors=True)


_NOT_EMPTY, _NO_TAR = 91, 92
_UNPACK = r"""
left=
for f in * .[!.]* ..?*; do
  if ! [ -e "$f" ] && ! [ -L "$f" ]; then continue; fi
  case $(readlink "$f" 2>/dev/null) in /opt/deps/*) continue ;; esac
  if [ "$REPLACE" = yes ]; then rm -rf -- "$f"; else left=1; fi
done
[ -z "$left" ] || exit 91
command -v tar >/dev/null 2>&1 || exit 92
tar -xpof - || exit 1
command -v git >/dev/null 2>&1 || exit 0
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
git -c init.defaultBranch=main init -q --template= && git add -A &&
git -c user.name=base -c user.email=base -c commit.gpgsign=false -c core.hooksPath=/dev/null \
  commit -q --allow-empty -m base && echo git
"""


@contextlib.contextmanager
def _packed(contract: Contract, root: Path, exclude: Sequence[str]) -> Iterator[tuple[bytes, Pushed, Callable[[], None]]]:
    """Give the packed tree, what it holds, and the function that makes it the base; a failed push changes no base."""
    identity = None
    if contract.identity is not None and contract.identity.file is not None:
        identity = (contract.path.parent / Path(contract.identity.file).expanduser()).resolve()
    folder = base_folder(contract)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".base.", delete=False) as packed:
        temporary = Path(packed.name)
        try:
            report = archive.pack(root, packed, identity=identity, exclude=exclude)
            packed.flush()
            yield temporary.read_bytes(), report, lambda: _rename(temporary, folder / _BASE)
        finally:
            temporary.unlink(missing_ok=True)


def keep_as_base(contract: Contract, entries: Mapping[bytes, Entry]) -> None:
    """Let the tree that was taken be what the next diff and pull compare with."""
    folder = base_folder(contract)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".base.", delete=False) as packed:
        pack_entries(entries, packed)
        packed.flush()
        Path(packed.name).rename(folder / _BASE)


def _rename(old: Path, new: Path) -> None:
    old.rename(new)


async def push(
    transport: Transport, contract: Contract, root: Path, *, replace: bool = False, exclude: Sequence[str] = ()
) -> Pushed:
    """Send the tree below ``root`` into the workspace, make a fresh git history there, and keep the tree as the base.

    ``.asp.json``, ``.git``, files that usually hold credentials, caches and virtual environments stay here. A workspace that
    is not empty is refused unless ``replace``, which empties it first (never ``/``). ``exclude``: globs of
    what stays here too.

    Raises TreeError (nothing was sent, or tar failed), TransportError.
    """
    if replace and str(contract.workspace) == "/":
        msg = "the workspace is /, which is never emptied; set workspace in the contract"
        raise UsageError(msg)
    with _packed(contract, root, exclude) as (packed, report, keep_as_base):
        result = await transport.exec(
            _UNPACK, stdin=packed, env={"REPLACE": "yes" if replace else "no"}, timeout_s=PUSH_TIMEOUT_S,
        )
        if result.status == _NOT_EMPTY:
            msg = "the workspace is not empty; pass --replace to empty it first (what the sandbox holds is lost)"
            raise TreeError(msg)
        if result.status == _NO_TAR:
            msg = "there is no tar in the sandbox, which push needs"
            raise TreeError(msg)
        if result.status != 0 or result.timed_out:
            msg = f"the sandbox could not unpack the files: {quoted(result.stderr or result.stdout or b'no reason given')}"
            raise TreeError(msg)
        keep_as_base()
    report.git = result.stdout.endswith(b"git\n")
    return report


def _base_entries(contract: Contract) -> dict[bytes, Entry]:
    base = base_folder(contract) / _BASE
    try:
        with base.open("rb") as file:
            return archive.read_entries(file)[0]
    except FileNotFoundError as error:
        msg = "nothing was pushed to this workspace from here; use: asp push"
        raise TreeError(msg) from error


@dataclass(frozen=True)
class Difference:
    """The pushed tree, the one that the workspace holds now, and what was ``odd`` about what came."""

    old: Mapping[bytes, Entry]
    new: Mapping[bytes, Entry]
    odd: list[str]

    def patch(self) -> bytes:
        """Return what leads from one to the other, as git reads it; may take some seconds of computing.

        The bytes are the sandbox's: pass them through :func:`asp.terminal.printable` before a terminal sees them.
        """
        return patch(self.old, self.new)


async def diff(transport: Transport, contract: Contract) -> Difference:
    """Return the pushed tree and what the workspace holds now.

    The agent owns the tar and the files there, so this shows what it wants to show (S7). New caches, which push leaves out
    too, are not part of it.

    Raises TreeError (nothing was pushed from here, or the answer cannot be read), TransportError.
    """
    old = _base_entries(contract)
    with tempfile.TemporaryFile() as received:
        size = 0

        async def keep(stream: Stream, data: bytes) -> None:
            nonlocal size
            if stream is Stream.STDOUT:
                size += len(data)
                if size > 2 * archive.MAX_TREE_BYTES:
                    msg = f"the workspace holds more than {archive.MAX_TREE_BYTES >> 20} MiB"
                    raise TreeError(msg)
                received.write(data)

        result = await transport.exec(
            "tar -cf - --exclude=./.git .", on_output=keep, keep_bytes=1000, timeout_s=DIFF_TIMEOUT_S,
        )
        if result.timed_out:
            msg = f"the sandbox did not pack its files within {DIFF_TIMEOUT_S:.0f} s"
            raise TreeError(msg)
        if result.status != 0 and not size:
            msg = f"the sandbox could not pack its files: {quoted(result.stderr or b'no reason given')}"
            raise TreeError(msg)
        received.seek(0)
        with archive.broken():
            new, odd = archive.read_entries(received)
    if result.status != 0:
        odd.append(f"tar in the sandbox ended with {result.status}: {quoted(result.stderr)}")
    caches = [name for name in new if name not in old and any(archive.is_cache(part) for part in os.fsdecode(name).split("/"))]
    # What a set-up made before the network went away is linked into the workspace; it is no work of the agent's.
    set_up = [name for name, entry in new.items() if (entry.link or b"").startswith(SET_UP) and b"/" not in name]
    for name in {*caches, *set_up} - old.keys():
        del new[name]
    return Difference(old, new, odd)


