"""Make a sandbox for a repository, list the sandboxes, take one away. What the command does, without its words."""

import contextlib
import dataclasses
import os
import pwd
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any

from asp import contract, trees, trust
from asp.contract import CONTRACT_NAME, Contract
from asp.errors import AspError, UsageError
from asp.state import state_dir, write_private
from asp.terminal import printable
from asp_sandboxes import bubblewrap, contract_file, control, host_folders, local, local_limits, records, runtime
from asp_sandboxes.bubblewrap import Bubblewrap
from asp_sandboxes.records import Record

if TYPE_CHECKING:
    from asp_sandboxes.docker import Wish
    from asp_sandboxes.openssh_bundle import Bundle

PROVIDERS = ("local", "docker")


@dataclass(frozen=True)
class Listed:
    """A sandbox as ``list`` shows it."""

    record: Record
    running: bool


@dataclass(frozen=True)
class Started:
    """What ``up`` made. ``kept``: it was taken up again, and its workspace holds what it held. ``remarks`` are for the person."""

    record: Record
    kept: bool
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gone:
    """What ``down`` took away. ``contract_stays``: somebody changed the contract, so it is theirs now."""

    record: Record
    contract_stays: bool


def up(
    provider: str, repository: Path, name: str | None, tell: Callable[[str], None], wish: "Wish | None" = None,
    read_only: Sequence[Path] | None = None,
) -> Started:  # fmt: skip
    """Start a sandbox for ``repository`` and write its contract there.

    A contract of a sandbox of ours that has ended is taken up again: same name and workspace, the same port unless somebody
    took it, new keys; what was pushed to it stays known. ``tell`` receives one line before something that takes seconds.
    ``read_only``: folders of this machine that a local sandbox sees; None: those that it saw before.

    Raises AspError; then nothing is left behind.
    """
    if provider not in PROVIDERS:
        msg = f"there is no provider {provider!r}; there are: {', '.join(PROVIDERS)}"
        raise UsageError(msg)
    repository = _repository(repository)
    if name is not None and not records.NAME.fullmatch(name):
        msg = "a sandbox's name has 1 to 31 characters: small letters, digits, hyphens, and does not begin with a hyphen"
        raise UsageError(msg)
    seen = None if read_only is None else host_folders.checked(read_only, repository, _homes())
    begin = _beginning(provider, wish, tell)
    with control.exclusive():
        ended = _ended_sandbox_of(repository / CONTRACT_NAME, name)
        if ended is not None and ended.provider != provider:
            msg = f"the sandbox {ended.name} of this folder is of another kind; remove it: asp-sandbox down {ended.name}"
            raise UsageError(msg)
        if ended is not None:
            if seen is None:  # again: what they hold may have changed
                seen = host_folders.checked(map(Path, ended.shown), repository, _homes())
            ended = dataclasses.replace(ended, shown=seen)
            kept = provider == "local" and _holds_something(ended.workspace)
            return dataclasses.replace(begin(ended, ended.digest), kept=kept)
        taken = _known()
        wanted = name or records.free_name(repository, taken)
        if wanted in taken:
            msg = f"there is a sandbox named {wanted} already; remove it first: asp-sandbox down {wanted}"
            raise UsageError(msg)
        record = Record(name=wanted, provider=provider, contract=str(repository / CONTRACT_NAME), shown=seen or [])
        try:
            return begin(record, None)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                records.remove_tree(record.folder)
            raise


def down(name: str) -> Gone:
    """Stop a sandbox and remove all of it: processes, workspace, keys, contract, trust, the tree that was pushed to it.

    A contract that somebody changed is left alone. Raises AspError.
    """
    with control.exclusive():
        known = _known()
        if name not in known:
            msg = f"there is no sandbox named {name!r} (there are: {', '.join(known) or 'none'})"
            raise UsageError(msg)
        record = known[name].record
        _stop(record)
        if record.provider == "docker":
            _docker().remove_all(state_dir(), record.name)
        removed = True
        if record.contract:
            path = Path(record.contract)
            removed = contract_file.remove(path, record.digest, record.replaced)
            if removed:
                trust.forget(path)
            trees.forget_base(_contract_of(record))
        try:
            records.remove_tree(record.folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            msg = f"{record.folder}: cannot be removed ({error.strerror})"
            raise AspError(msg) from error
    return Gone(record, contract_stays=not removed)


def listed() -> list[Listed]:
    """Return all sandboxes: those with a record, and what runs without one. Raises AspError.

    Containers outlive a gateway that was killed; they are served again, on the ports that they had.
    """
    known = _known()
    if any(found.record.container and not found.running for found in known.values()):
        with control.exclusive():
            for found in _known().values():
                if found.record.container and not found.running:
                    _serve_again(found.record)
        known = _known()
    return list(known.values())


def start(name: str, tell: Callable[[str], None]) -> Started:
    """Start a sandbox that has ended: a local one with the files it had, a container that still runs as it is.

    Raises UsageError: there is no such sandbox, or its container is gone.
    """
    known = {found.record.name: found for found in listed()}
    if name not in known:
        msg = f"there is no sandbox named {name!r} (there are: {', '.join(known) or 'none'})"
        raise UsageError(msg)
    record = known[name].record
    if known[name].running:
        return Started(record, kept=True)
    if record.provider != "local":
        msg = f"the container of {name} is gone, and with it what it held; make a new one: asp-sandbox up {record.provider}"
        raise UsageError(msg)
    return up(record.provider, Path(record.contract).parent, name, tell)


def _serve_again(record: Record) -> None:
    """Let the gateway listen for a container again, if that still runs. The contract follows to another port, if it is ours."""
    if not _docker().is_running(record.container):
        return
    port = int(
        control.ask({"verb": "start", "name": record.name, "order": record.order, "port": record.port}, start=True)["port"]
    )
    if port == record.port:
        return
    path = Path(record.contract)
    moved = dataclasses.replace(record, port=port)
    if record.digest and contract_file.digest_of(path) == record.digest:
        data = contract_file.document(port, record.client_key, record.host_key, user=record.user, workspace=record.directory)
        moved = dataclasses.replace(moved, digest=contract_file.write(path, data, replaces=record.digest))
        trust.remember(contract.load(path))
        trees.move_base(_contract_of(record), _contract_of(moved))
    moved.save()


def _beginning(provider: str, wish: "Wish | None", tell: Callable[[str], None]) -> Callable[[Record, str | None], Started]:
    """Return what starts a sandbox of this kind; whatever can be missing on this machine is missed now. Raises UsageError."""
    if provider == "local":
        found = bubblewrap.find()
        limits = local_limits.described(own_uid=os.geteuid() == 0)
        return lambda record, replaces: Started(
            _start(record, found, replaces=replaces, tell=tell), kept=False, remarks=(limits,)
        )
    if wish is None:
        msg = "say which image: --image NAME"
        raise UsageError(msg)
    bundle = _docker().bundle(tell)
    return lambda record, replaces: _start_container(record, wish, bundle, tell, replaces=replaces)


def _docker() -> ModuleType:
    from asp_sandboxes import docker  # noqa: PLC0415 - only for its sandboxes

    return docker


def _known() -> dict[str, Listed]:
    running = _running()
    known = {record.name: Listed(record, record.name in running) for record in records.load_all()}
    # Its folder can be deleted under it; what nobody sees, nobody stops.
    lost = {name: Listed(records.lost(name, port), running=True) for name, port in running.items() if name not in known}
    return known | lost


def _repository(folder: Path) -> Path:
    """Return the folder's own path, as asp.contract does: what is trusted is a path. Raises UsageError."""
    try:
        repository = folder.resolve()
    except FileNotFoundError as error:
        msg = "the working directory does not exist any more; change to another folder, or name one in full: --repo"
        raise UsageError(msg) from error
    shown = printable(str(repository), newlines=False)
    if not repository.is_dir():
        msg = f"{shown}: no such folder"
        raise UsageError(msg)
    if repository == Path("/") or repository in _homes():
        msg = f"{shown}: not a folder for a sandbox, asp push would send your keys; change to a repository, or name one: --repo"
        raise UsageError(msg)
    return repository


def _homes() -> set[Path]:
    """Return the user's home folder, as the environment and as the system has it."""
    homes = {os.environ.get("HOME", "")}
    with contextlib.suppress(KeyError):
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    return {Path(home).resolve() for home in homes if home.startswith("/")}


def _holds_something(workspace: Path) -> bool:
    try:
        with os.scandir(workspace) as entries:
            return any(entries)
    except FileNotFoundError:
        return False
    except OSError:  # its owner, the agent, may have closed it
        return True


def _contract_of(record: Record) -> Contract:
    """Return the contract as we wrote it, also when its file is gone or changed: the base tree is kept by its endpoint."""
    return Contract(
        path=Path(record.contract), digest=record.digest, host=contract_file.LOOPBACK, port=record.port,
        host_key=record.host_key or None, workspace=PurePosixPath(record.directory),
    )  # fmt: skip


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
        if record.contract == str(path) and digest and digest in {record.digest, record.replaced}:
            if record.name in _running():
                msg = f"{shown}: sandbox {record.name} runs for this folder already; remove it: asp-sandbox down {record.name}"
                raise UsageError(msg)
            if name not in {None, record.name}:
                msg = f"{shown}: is that of sandbox {record.name}, which has ended; remove it: asp-sandbox down {record.name}"
                raise UsageError(msg)
            return dataclasses.replace(record, digest=digest)
    msg = f"{shown}: exists already and is not ours; nothing was overwritten (move it away, or name another folder: --repo)"
    raise UsageError(msg)


def _start(record: Record, found: Bubblewrap, *, replaces: str | None, tell: Callable[[str], None]) -> Record:
    import asyncssh  # noqa: PLC0415 - it takes longer to load than everything else of this command

    if not runtime.is_staged():
        tell("preparing the sandbox's runtime, once for this version")
    staged = runtime.stage()
    before = record
    record = dataclasses.replace(record, runtime=staged.folder.name)
    record.folder.mkdir(mode=0o700, exist_ok=True)
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
        library_path=staged.library_path, uid=record.uid, shown=record.shown,
        bwrap=found.path, bwrap_libraries=found.libraries, disable_user_namespaces=found.disables_user_namespaces,
        host_key=host_key.export_private_key("openssh").decode(),
        authorized_keys=client_key.export_public_key("openssh").decode(),
    )  # fmt: skip
    record = _serve(
        record, before, order.as_json(), " ".join(host_key.export_public_key("openssh").decode().split()[:2]), replaces
    )
    runtime.discard_unused({staged.folder.name, *(other.runtime for other in records.load_all())})
    return record


def _start_container(
    record: Record, wish: "Wish", bundle: "Bundle", tell: Callable[[str], None], *, replaces: str | None
) -> Started:
    import asyncssh  # noqa: PLC0415 - it takes longer to load than everything else of this command

    docker = _docker()
    before = record
    record.folder.mkdir(mode=0o700, exist_ok=True)
    docker.remove_all(state_dir(), record.name)
    host_key = asyncssh.generate_private_key("ssh-ed25519")
    client_key = asyncssh.generate_private_key("ssh-ed25519")
    write_private(record.client_key, client_key.export_private_key("openssh"))
    record.save()  # so that a container that nobody else knows of is found again
    made = docker.start(
        wish, record.folder, record.name, host_key.export_private_key("openssh").decode(),
        client_key.export_public_key("openssh").decode(), bundle, Path(record.contract).parent, tell,
    )  # fmt: skip
    try:
        record = dataclasses.replace(
            record, container=made.order.container, order=made.order.as_json(), wish=wish.as_json(),
            user=made.account.name, directory=str(made.workspace),
        )  # fmt: skip
        record.save()
        pin = " ".join(host_key.export_public_key("openssh").decode().split()[:2])
        record = _serve(record, before, made.order.as_json(), pin, replaces)
    except BaseException:
        docker.remove(made.order.container)
        raise
    return Started(record, kept=False, remarks=(docker.described(wish, made), *made.remarks))


def _serve(record: Record, before: Record, order: dict[str, Any], pin: str, replaces: str | None) -> Record:
    """Let the gateway listen for a sandbox, and write its contract. Raises AspError; then it does neither."""
    path = Path(record.contract)
    written = ""
    try:
        port = control.ask({"verb": "start", "name": record.name, "order": order, "port": record.port}, start=True)["port"]
        data = contract_file.document(port, record.client_key, pin, user=record.user, workspace=record.directory)
        record = dataclasses.replace(
            record, port=port, digest=contract_file.digest(data), replaced=replaces or "", host_key=pin
        )
        record.save()
        written = contract_file.write(path, data, replaces=replaces)
        trust.remember(contract.load(path))
        contract_file.exclude_from_git(path.parent)
        if replaces is not None:
            trees.move_base(_contract_of(before), _contract_of(record))
    except BaseException:
        _stop(record)
        if written and contract_file.remove(path, written):
            trust.forget(path)
        if replaces is not None:
            with contextlib.suppress(OSError):
                before.save()
        raise
    return record
