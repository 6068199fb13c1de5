"""Make a sandbox for a repository, list the sandboxes, take one away. What the command does, without its words."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asp import contract, trust
from asp.contract import CONTRACT_NAME
from asp.errors import AspError, UsageError
from asp.state import write_private
from asp.terminal import printable
from asp_sandboxes import bubblewrap, contract_file, control, local, records, runtime
from asp_sandboxes.bubblewrap import Bubblewrap
from asp_sandboxes.records import Record

PROVIDERS = ("local",)


@dataclass(frozen=True)
class Listed:
    """A sandbox as ``list`` shows it."""

    record: Record
    running: bool


def up(provider: str, repository: Path, name: str | None, tell: Callable[[str], None]) -> Record:
    """Start a sandbox for ``repository`` and write its contract there.

    A contract of a sandbox of ours that has ended is taken up again: same name and workspace, new keys, new port.
    ``tell`` receives one line before something that takes seconds. Raises AspError; then nothing is left behind.
    """
    if provider not in PROVIDERS:
        msg = f"there is no provider {provider!r}; there are: {', '.join(PROVIDERS)}"
        raise UsageError(msg)
    repository = repository.resolve()  # as asp.contract does: what is trusted is a path
    if not repository.is_dir():
        msg = f"{printable(str(repository), newlines=False)}: no such folder"
        raise UsageError(msg)
    if name is not None and not records.NAME.fullmatch(name):
        msg = "a sandbox's name has 1 to 31 characters: small letters, digits, hyphens, and does not begin with a hyphen"
        raise UsageError(msg)
    found = bubblewrap.find()
    with control.exclusive():
        ended = _ended_sandbox_of(repository / CONTRACT_NAME, name)
        if ended is not None:
            return _start(ended, found, replaces=ended.digest, tell=tell)
        wanted = name or records.free_name(repository)
        if wanted in {record.name for record in records.load_all()}:
            msg = f"there is a sandbox named {wanted} already; remove it first: asp-sandbox down {wanted}"
            raise UsageError(msg)
        record = Record(name=wanted, provider=provider, contract=str(repository / CONTRACT_NAME))
        try:
            return _start(record, found, replaces=None, tell=tell)
        except BaseException:
            records.remove_tree(record.folder)
            raise


def down(name: str) -> Record:
    """Stop a sandbox and remove all of it: processes, workspace, keys, contract, trust. Raises AspError."""
    with control.exclusive():
        record = records.find(name)
        _stop(record)
        if record.contract:
            path = Path(record.contract)
            if contract_file.remove(path, record.digest):
                trust.forget(path)
        try:
            records.remove_tree(record.folder)
        except OSError as error:
            msg = f"{record.folder}: cannot be removed ({error.strerror})"
            raise AspError(msg) from error
    return record


def listed() -> list[Listed]:
    """Return all sandboxes. Raises AspError."""
    running = _running()
    return [Listed(record, record.name in running) for record in records.load_all()]


def _running() -> dict[str, int]:
    try:
        return dict(control.ask({"verb": "list"})["running"])
    except control.GatewayGone:
        return {}


def _stop(record: Record) -> None:
    with contextlib.suppress(control.GatewayGone):  # its sandboxes died with it
        control.ask({"verb": "stop", "name": record.name})


def _ended_sandbox_of(path: Path, name: str | None) -> Record | None:
    """Return the sandbox that wrote this contract and has ended, None if there is no contract. Raises UsageError."""
    if not os.path.lexists(path):
        return None
    digest = contract_file.digest_of(path)
    shown = printable(str(path), newlines=False)
    for record in records.load_all():
        if record.contract == str(path) and record.digest == digest:
            if record.name in _running():
                msg = f"{shown}: sandbox {record.name} runs for this folder already; remove it: asp-sandbox down {record.name}"
                raise UsageError(msg)
            if name not in {None, record.name}:
                msg = f"{shown}: is that of sandbox {record.name}, which has ended; remove it: asp-sandbox down {record.name}"
                raise UsageError(msg)
            return record
    msg = f"{shown}: exists already and is not ours; nothing was overwritten (move it away, or name another folder: --repo)"
    raise UsageError(msg)


def _start(record: Record, found: Bubblewrap, *, replaces: str | None, tell: Callable[[str], None]) -> Record:
    import asyncssh  # noqa: PLC0415 - it takes longer to load than everything else of this command

    if not runtime.is_staged():
        tell("preparing the sandbox's runtime, once for this version")
    staged = runtime.stage()
    record = dataclasses.replace(record, runtime=staged.folder.name)
    record.workspace.mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() == 0:
        taken = {other.uid for other in records.load_all() if other.uid is not None and other.name != record.name}
        record = dataclasses.replace(record, uid=record.uid or local.own_uid(taken))
        os.chown(record.workspace, record.uid or -1, record.uid or -1, follow_symlinks=False)
    record.save()
    host_key = asyncssh.generate_private_key("ssh-ed25519")
    client_key = asyncssh.generate_private_key("ssh-ed25519")
    write_private(record.client_key, client_key.export_private_key("openssh"))
    order = local.Order(
        folder=record.folder, workspace=record.workspace, runtime=staged.tree, python=staged.python,
        library_path=staged.library_path, uid=record.uid,
        bwrap=found.path, bwrap_libraries=found.libraries, disable_user_namespaces=found.disables_user_namespaces,
        host_key=host_key.export_private_key("openssh").decode(),
        authorized_keys=client_key.export_public_key("openssh").decode(),
    )  # fmt: skip
    path = Path(record.contract)
    written = ""
    try:
        port = control.ask({"verb": "start", "name": record.name, "order": order.as_json()}, start=True)["port"]
        pin = " ".join(host_key.export_public_key("openssh").decode().split()[:2])
        data = contract_file.document(port, record.client_key, pin)
        written = contract_file.write(path, data, replaces=replaces)
        record = dataclasses.replace(record, port=port, digest=written)
        record.save()
        trust.remember(contract.load(path))
        contract_file.exclude_from_git(path.parent)
    except BaseException:
        _stop(record)
        if written and contract_file.remove(path, written):
            trust.forget(path)
        raise
    runtime.discard_unused({staged.folder.name, *(other.runtime for other in records.load_all())})
    return record
