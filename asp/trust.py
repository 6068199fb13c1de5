"""Decide whether a contract may be used to connect: whose file it is, and who said so (C3).

A valid ``.asp.json`` in a cloned repository can aim the user's own key at the user's own or an internal host. So a
connection takes a :class:`TrustedContract` and nothing else, and only this module makes one: for a file that a person
named, or that was remembered with exactly these bytes. Reading a contract needs no trust.
"""

import contextlib
import fcntl
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Literal, cast, final

from asp import hostkey
from asp.contract import CONTRACT_NAME, Contract, absolute, find, is_plain_account, load, local_user, shown_path
from asp.errors import ContractUntrusted, IdentityError, UsageError
from asp.identity import identity_path
from asp.state import state_dir, write_private
from asp.terminal import printable

ENVIRONMENT_VARIABLE = "ASP_CONTRACT"
"""Names a contract, as ``--contract`` does."""

_MADE_HERE = object()
_DIGEST = re.compile(r"[0-9a-f]{64}")


@final
@dataclass(frozen=True)
class TrustedContract:
    """A contract that may be used to connect. Calling the class raises TypeError: it comes from :func:`require` alone.

    ``how`` says why it may: a person ``named`` the file, or it is ``remembered`` by path and digest.
    """

    contract: Contract
    how: Literal["named", "remembered"]
    made_by: InitVar[object] = None

    def __post_init__(self, made_by: object) -> None:
        """Refuse every caller but this module, ``dataclasses.replace`` included."""
        if made_by is not _MADE_HERE:
            msg = "a TrustedContract is made by asp.trust.require, which looks whether the file may be used"
            raise TypeError(msg)


def resolve(option: str | None, start: Path) -> TrustedContract:
    """Return the contract to use: ``--contract``, else ``ASP_CONTRACT``, else the nearest in or above ``start``.

    A named path is relative to ``start``; a folder stands for the ``.asp.json`` in it. An empty variable is as none.

    Raises ContractError and its subclasses, UsageError.
    """
    named = option if option is not None else os.environ.get(ENVIRONMENT_VARIABLE) or None
    if named is None:
        return require(load(find(start)), named=False)
    return require(load(named_path(named, start)), named=True)


def named_path(named: str, start: Path) -> Path:
    """Return the contract file that ``named`` stands for: itself, or the ``.asp.json`` directly in that folder.

    Raises UsageError for an empty name or one that cannot be a path.
    """
    if not named:
        msg = "the path of the contract is empty; name a file, or leave the option out"
        raise UsageError(msg)
    path = start / named
    return path / CONTRACT_NAME if is_folder(path) else path


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder; false, not an error, for what cannot be a path: ``load`` says what is wrong."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def require(contract: Contract, *, named: bool) -> TrustedContract:
    """Return the contract as trusted if a person named its file, or if it is remembered with the same digest.

    Raises ContractUntrusted with the line to type; UsageError if the store cannot be used.
    """
    if named:
        return TrustedContract(contract, "named", _MADE_HERE)
    known = _read_store().get(str(contract.path))
    if known == contract.digest:
        return TrustedContract(contract, "remembered", _MADE_HERE)
    shown = shown_path(contract.path)
    typed = printable(shlex.quote(str(contract.path)), newlines=False)
    cause = "nobody has said that it may be used" if known is None else "it has changed since it was trusted"
    msg = f"{shown}: {cause} (it would connect to {contract.endpoint}); look at it, then type: asp trust {typed}"
    raise ContractUntrusted(msg)


def is_remembered(contract: Contract) -> bool:
    """Whether exactly these bytes at this path were remembered. Raises UsageError if the store cannot be used."""
    return _read_store().get(str(contract.path)) == contract.digest


def remember(contract: Contract) -> None:
    """Trust this path with exactly these bytes from now on; an earlier digest of the path is replaced.

    Raises UsageError if the store cannot be used.
    """
    with _locked_store() as store:
        store[str(contract.path)] = contract.digest


def forget(path: Path) -> bool:
    """Stop trusting a path and return whether it was trusted. The file may be gone.

    Raises UsageError if the store cannot be used.
    """
    with _locked_store() as store:
        return store.pop(str(absolute(path)), None) is not None


def describe(contract: Contract) -> str:
    """Return what a person needs to see before trusting, one line each, safe for a terminal and without secrets.

    ``user`` is shown only if it looks like an account name (C7); of an identity the path or the variable's name.
    """
    pin = contract.pinned
    rows = {
        "contract": str(contract.path),
        "host": contract.endpoint,
        "user": _describe_user(contract.user),
        "identity": _describe_identity(contract),
        "host key": "none" if pin is None else f"{pin.algorithm} {pin.fingerprint()}",
        "workspace": str(contract.workspace),
    }
    if hostkey.is_loopback(contract.host):
        rows["host"] += "  (this machine)"
    return "\n".join(f"{name + ':':<11}{printable(value, newlines=False)}" for name, value in rows.items())


def confirm_on_terminal(contract: Contract, ask: Callable[[str], str]) -> TrustedContract:
    """Return the contract as trusted; if it is not remembered, ask a person first and remember a yes.

    ``ask`` shows its text, several lines that end in a question, and returns the answer, as ``input`` does. All but
    ``y`` and ``yes`` is a no, the end of input too.

    Raises ContractUntrusted for a no; UsageError if the store cannot be used.
    """
    if not is_remembered(contract):
        try:
            answer = ask(f"{describe(contract)}\nEvery command of the agent will run there. Use it? [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() in {"y", "yes"}:
            remember(contract)
    return require(contract, named=False)


def _describe_user(user: str | None) -> str:
    if user is None:
        return f"{local_user()}  (your local account's name)"
    return user if is_plain_account(user) else "(a token, not shown)"


def _describe_identity(contract: Contract) -> str:
    identity = contract.identity
    if identity is None:
        return "none, no key is offered"
    if identity.env is not None:
        return f"the key in the variable {identity.env}"
    try:
        return f"the key file {identity_path(contract)}"
    except IdentityError as error:
        return str(error)


def _store() -> Path:
    return state_dir() / "trust.json"


def _read_store() -> dict[str, str]:
    """Return the map from path to digest. A store that we cannot read is never taken for an empty one."""
    path = _store()
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        msg = f"{shown_path(path)}: the list of trusted contracts cannot be read ({error.strerror})"
        raise UsageError(msg) from error
    try:
        store: object = json.loads(data)
    except (ValueError, RecursionError):
        store = None
    if isinstance(store, dict):
        entries = cast("dict[str, object]", store)
        if all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in entries.values()):
            return cast("dict[str, str]", entries)
    shown, typed = (printable(text, newlines=False) for text in (str(path), shlex.quote(str(path))))
    msg = f"{shown}: the list of trusted contracts is damaged; type: mv {typed} {typed}.damaged, then trust them again"
    raise UsageError(msg)


@contextlib.contextmanager
def _locked_store() -> Iterator[dict[str, str]]:
    """Yield the store to change, and write it after. The lock guards read, change, write against a second process."""
    path = _store()
    try:
        descriptor = os.open(path.with_name("trust.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            store = _read_store()
            before = dict(store)
            yield store
            if store != before:
                write_private(path, json.dumps(store, indent=1, sort_keys=True).encode() + b"\n")
    except OSError as error:
        shown = shown_path(path)
        msg = f"{shown}: the list of trusted contracts cannot be written ({error.strerror})"
        raise UsageError(msg) from error
