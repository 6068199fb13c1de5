"""What we keep of each sandbox: one folder of our state directory with a record, the client key and the workspace."""

import json
import os
import re
import secrets
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asp.state import state_dir, write_private

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_RECORD = "sandbox.json"


@dataclass(frozen=True)
class Record:
    """One sandbox. ``contract`` and ``digest`` say which file we wrote; ``uid`` is its own uid if root started it.

    The record is saved before the file is written, else who is killed between the two leaves a file that nobody knows:
    until then the file has the digest ``replaced``, if there is one.

    ``host_key`` is the pinned key, ``TYPE BASE64``: with the port it names the pushed base tree, whatever became of the file.
    Of a local one: ``shown`` are the folders that it sees read-only.
    Of a container: ``container`` is its id, ``order`` what the gateway is told of it, ``wish`` what the person asked for.
    """

    name: str
    provider: str
    contract: str
    digest: str = ""
    replaced: str = ""
    port: int = 0
    uid: int | None = None
    runtime: str = ""
    host_key: str = ""
    shown: list[str] = field(default_factory=list[str])
    container: str = ""
    user: str = "agent"
    directory: str = "/workspace"
    order: dict[str, Any] = field(default_factory=dict[str, Any])
    wish: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def folder(self) -> Path:
        """Where all of it is, mode 0700. It may be gone, and looking does not make it."""
        return state_dir("sandboxes") / self.name

    @property
    def workspace(self) -> Path:
        """The workspace from the outside: the second door that the agent's uid cannot touch (S7)."""
        return self.folder / "workspace"

    @property
    def client_key(self) -> Path:
        """The private key that logs in."""
        return self.folder / "key"

    def save(self) -> None:
        """Write the record. Raises OSError."""
        write_private(self.folder / _RECORD, json.dumps(asdict(self), indent=1).encode() + b"\n")


def load_all() -> Iterator[Record]:
    """Return the records by name. A folder without a readable record is what a killed ``up`` left: it is named in full."""
    for folder in sorted(state_dir("sandboxes").iterdir()):
        if not NAME.fullmatch(folder.name):
            continue
        try:
            yield Record(**json.loads((folder / _RECORD).read_bytes()))
        except (OSError, ValueError, TypeError):
            yield lost(folder.name)


def lost(name: str, port: int = 0) -> Record:
    """Return what stands for a sandbox whose record is not there or cannot be read."""
    return Record(name=name, provider="unknown", contract="", port=port)


def free_name(repository: Path, taken: Container[str]) -> str:
    """Return a name made from that of the folder, with a number if it is taken."""
    stem = re.sub(r"[^a-z0-9]+", "-", repository.name.lower()).strip("-")[:24] or "sandbox"
    number = 1
    name = stem
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name


def remove_tree(top: Path) -> None:
    """Remove a folder whose content somebody else made: unreadable folders, any depth, links are not followed.

    Folders are moved up before they are emptied, so neither recursion nor the length of a path limits it. Nothing may still
    run in it. Raises OSError.
    """
    mark = secrets.token_hex(8)
    moved = 0
    pending = [top]
    while pending:
        folder = pending.pop()
        folder.chmod(0o700)
        with os.scandir(folder) as entries:
            found = list(entries)
        for entry in found:
            if not entry.is_dir(follow_symlinks=False):
                Path(entry.path).unlink()
                continue
            Path(entry.path).chmod(0o700)
            moved += 1
            target = top / f"{mark}.{moved}"
            Path(entry.path).rename(target)
            pending.append(target)
        if folder != top:
            folder.rmdir()
    top.rmdir()
