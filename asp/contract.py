"""Find and read the contract, ``.asp.json``: the one file that says which sandbox to use and how to reach it (C1, C2).

``find`` looks for the file, ``load`` reads it and refuses what is wrong, with one finding for each fault. Neither
connects, and neither decides whether the file may be used: that is ``asp.trust``. What the fields mean is in
``schema/asp.schema.json``, the verdict on each known document in ``schema/cases``.
"""

import hashlib
import json
import os
import pwd
import re
import shlex
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, cast

from asp import hostkey
from asp.errors import ContractInvalid, ContractMissing, ContractUnsafe, HostKeyError, UsageError, quoted
from asp.terminal import printable

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError

CONTRACT_NAME = ".asp.json"
MAX_CONTRACT_BYTES = 1 << 20
DEFAULT_PORT = 22  # RFC 4253 4.1
MAKE_ONE = "asp-sandbox up local"  # makes a sandbox and its contract
_MAX_DEPTH = 8  # A valid document has 3 levels. jsonschema builds texts by recursion, so depth is bounded before it.
_TOO_DEEP = f"(file): is nested more than {_MAX_DEPTH} levels deep; a contract has three"
_MAX_FINDINGS = 20
_PLAIN_ACCOUNT = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")  # A key pasted into "env" does not pass, so a name can be shown.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # C0, DEL, C1, and surrogates, which UTF-8 cannot carry
_TEXTS = {"connection.host", "connection.user", "connection.identity.file", "connection.identity.env", "workspace"}
_PLAIN_FIELD = re.compile(r"[a-zA-Z0-9_$.-]{1,64}")

_WRITE = {
    "": 'write an object with "version", "transport" and "connection"',
    "$schema": "write a text or leave it out",
    "version": 'write "version": "0"',
    "transport": 'write "transport": "ssh"',
    "connection": 'write an object with at least "host"',
    "connection.host": "write a host name or an IP address alone, without user and port",
    "connection.port": "write a whole number from 1 to 65535, without quotes, or leave it out for 22",
    "connection.user": "write the login name, or leave it out for the name of your local account",
    "connection.identity": 'write {"file": "PATH"} or {"env": "VARIABLE"}, or leave it out to offer no key',
    "connection.identity.file": "write the path of a private key file",
    "connection.identity.env": "write the name of an environment variable that holds the text of a private key",
    "connection.host_key": 'write "TYPE BASE64", as in a .pub file, or leave it out',
    "workspace": 'write an absolute path in the sandbox, such as "/workspace", or leave it out for "/"',
}
# What people write instead, folded: lower case, no "_" and "-".
_MEANT = {
    **{name.rpartition(".")[2].replace("_", ""): name for name in _WRITE},
    **dict.fromkeys(["hostname", "address"], "connection.host"),
    **dict.fromkeys(["username", "login"], "connection.user"),
    **dict.fromkeys(["identityfile", "key", "keyfile", "privatekey"], "connection.identity"),
    **dict.fromkeys(["cwd", "workdir", "workingdirectory"], "workspace"),
}
_KINDS: dict[type, str] = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
_FAULTS = {
    "minimum": "is out of range", "maximum": "is out of range", "minLength": "is empty",
    "pattern": "is not an absolute path", "minProperties": "names neither a file nor a variable",
    "maxProperties": "names both a file and a variable",
}  # fmt: skip
_WANTED = {"object": "an object", "string": "a text", "integer": "a whole number"}


@dataclass(frozen=True, slots=True)
class Identity:
    """Where the client's private key is: a file's path or a variable's name, exactly one is set. Hidden from repr."""

    file: str | None = field(default=None, repr=False)
    env: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Contract:
    """A contract that follows every rule of C1. ``user`` and ``identity`` may be secrets and are hidden from repr.

    ``path`` is absolute, its folder resolved; ``digest`` is the SHA-256 of the file's exact bytes in hex; ``host`` has
    no brackets; ``workspace`` keeps ``..``, which only the sandbox can resolve.
    """

    path: Path
    digest: str
    host: str
    port: int = DEFAULT_PORT
    user: str | None = field(default=None, repr=False)
    identity: Identity | None = field(default=None, repr=False)
    host_key: str | None = None
    workspace: PurePosixPath = field(default=PurePosixPath("/"))

    @property
    def endpoint(self) -> str:
        """``host:port``, an IPv6 address in brackets, safe to show."""
        return hostkey.endpoint(self.host, self.port)

    @property
    def pinned(self) -> "hostkey.PinnedKey | None":
        """The host key that the server must show, or None."""
        return None if self.host_key is None else hostkey.parse(self.host_key)


def find(start: Path) -> Path:
    """Return the nearest ``.asp.json`` in ``start`` or above it; whatever has that name counts, none is skipped (C2).

    ``start`` is resolved first, so a symbolic link into a project walks up the project, not the link's parents.

    Raises ContractMissing; UsageError if ``start`` is not there; ContractUnsafe if a folder above cannot be entered.
    """
    try:
        folder = start.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links; ValueError: a NUL
        msg = f"{shown_path(start)}: cannot look for {CONTRACT_NAME} there: no such folder, or it cannot be entered"
        raise UsageError(msg) from error
    for place in [folder, *folder.parents]:
        candidate = place / CONTRACT_NAME
        try:
            candidate.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            msg = f"{shown_path(candidate)}: cannot see if it is there ({error.strerror}); name one with --contract"
            raise ContractUnsafe(msg) from error
        return candidate
    msg = f"no {CONTRACT_NAME} in {shown_path(folder)} or above it; make one with: {MAKE_ONE}"
    raise ContractMissing(msg)


def load(path: Path) -> Contract:
    """Read and check one contract; nothing is connected to and no key is opened.

    The file must be a regular file (no link), owned by the caller or root, not writable by others (C3), at most 1 MiB,
    UTF-8 without BOM, strict JSON, and follow the schema and the rules that a schema cannot say (C1).

    Raises ContractMissing, ContractUnsafe, ContractInvalid (with every finding); UsageError for an impossible path.
    """
    place = absolute(path)
    data = _read_ours(place)
    findings: list[str] = []
    document = _parse(data, findings)
    if not findings:
        findings += _check(document)
    if len(findings) > _MAX_FINDINGS:
        findings[_MAX_FINDINGS:] = [f"(file): has {len(findings) - _MAX_FINDINGS} more faults; mend these first"]
    if findings:
        raise ContractInvalid([f"{shown_path(place)}: {finding}" for finding in findings])
    fields = _fields(document)
    connection = _fields(fields["connection"])
    identity = cast("dict[str, str] | None", connection.get("identity"))
    return Contract(
        path=place,
        digest=hashlib.sha256(data).hexdigest(),
        host=hostkey.without_brackets(cast("str", connection["host"])),
        port=cast("int", connection.get("port", DEFAULT_PORT)),
        user=cast("str | None", connection.get("user")),
        identity=None if identity is None else Identity(file=identity.get("file"), env=identity.get("env")),
        host_key=cast("str | None", connection.get("host_key")),
        workspace=PurePosixPath(cast("str", fields.get("workspace", "/"))),
    )


def absolute(path: Path) -> Path:
    """Return ``path`` with its folder resolved but not its last part, which ``load`` refuses to follow.

    Raises UsageError for a path that cannot be: a loop of links, a relative one in a working directory that is gone.
    """
    try:
        return path.parent.resolve() / path.name
    except (OSError, RuntimeError, ValueError) as error:
        msg = f"{shown_path(path)}: not a usable path"
        raise UsageError(msg) from error


def local_user() -> str:
    """Return the local account's name from the user database, as OpenSSH does; ``$USER`` is not looked at (C7).

    Raises UsageError if the account has no name, as in some containers.
    """
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError as error:
        msg = f"user id {os.getuid()} has no account name here; write connection.user in {CONTRACT_NAME}"
        raise UsageError(msg) from error


def effective_user(contract: Contract) -> str:
    """Return the name to log in with: the contract's, else the local account's (C7). It may be a token."""
    return local_user() if contract.user is None else contract.user


def shown_path(path: Path) -> str:
    """Return a path of this machine in one line that is safe to show (L8)."""
    return printable(str(path), newlines=False)


def is_plain_account(name: str) -> bool:
    """Whether ``name`` looks like an account and not like an access token, so that it may be shown (C7)."""
    return _PLAIN_ACCOUNT.fullmatch(name) is not None


def _read_ours(path: Path) -> bytes:
    """Return the bytes of a file that only the caller and root can have written (C3)."""
    try:
        # Looked at before it is opened: opening a device can act on it. The descriptor is looked at again below.
        _refuse_kind(path, path.lstat().st_mode)
        # O_NONBLOCK: a FIFO that took the file's place must not make us wait.
        quietly = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | quietly)) as file:
            status = os.fstat(file.fileno())
            _refuse_kind(path, status.st_mode)
            if status.st_uid not in (os.geteuid(), 0):
                msg = f"{shown_path(path)}: belongs to user id {status.st_uid}, not to you or root; use a copy of your own"
                raise ContractUnsafe(msg)
            if status.st_mode & 0o022:
                typed = printable(shlex.quote(str(path)), newlines=False)
                msg = f"{shown_path(path)}: its group or others can write it; type: chmod go-w {typed}"
                raise ContractUnsafe(msg)
            data = file.read(MAX_CONTRACT_BYTES + 1)
    except ValueError as error:
        msg = f"{shown_path(path)}: a path cannot hold a NUL"
        raise UsageError(msg) from error
    except FileNotFoundError as error:
        msg = f"{shown_path(path)}: no such file; make one with: {MAKE_ONE}"
        raise ContractMissing(msg) from error
    except OSError as error:
        msg = f"{shown_path(path)}: cannot be read ({error.strerror})"
        raise ContractUnsafe(msg) from error
    if len(data) > MAX_CONTRACT_BYTES:
        raise ContractInvalid([f"{shown_path(path)}: (file): is larger than 1 MiB; a contract has a dozen lines"])
    return data


def _refuse_kind(path: Path, mode: int) -> None:
    if stat.S_ISLNK(mode):
        msg = f"{shown_path(path)}: is a symbolic link; put the file itself here, or name it with --contract"
        raise ContractUnsafe(msg)
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a FIFO, device or socket"
        msg = f"{shown_path(path)}: is {kind}, not a regular file; move it away"
        raise ContractUnsafe(msg)


class _Object(dict[str, object]):
    """A JSON object that remembers which keys were written more than once."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, object]]) -> _Object:
    result = _Object(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        result.repeated = tuple(key for key, count in counts.items() if count > 1)
    return result


def _parse(data: bytes, findings: list[str]) -> object:
    """Return the document, or add findings: what is not one strict JSON text in UTF-8 (C1)."""
    if data.startswith(b"\xef\xbb\xbf"):
        findings.append("(file): begins with a byte order mark; save it as UTF-8 without BOM")
        return None
    if not data.strip():
        findings.append(f"(file): is empty; make one with: {MAKE_ONE}")
        return None
    document: object = None
    try:
        # NaN and Infinity, which Python reads, need no rule of their own: no field takes a float.
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        findings.append(f"(file): byte {error.start + 1} is not UTF-8; save it as UTF-8")
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        findings.append(f"(file): {where}: not JSON; write one object, no comment, no last comma, no text after it")
    except RecursionError:
        findings.append(_TOO_DEEP)
    except ValueError:  # more digits than Python makes a number of
        findings.append("(file): holds a number with too many digits; write a port from 1 to 65535")
    findings.extend(_structure_findings(document))
    return document


def _structure_findings(document: object) -> Iterator[str]:
    """Yield repeated keys and too many levels; not by recursion, the document may be deeper than Python's stack."""
    waiting: list[tuple[str, object, int]] = [("", document, 1)]
    while waiting:
        name, value, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            yield _TOO_DEEP
            return
        if isinstance(value, _Object):
            yield from (f"{_joined(name, key)}: is written more than once; keep one" for key in value.repeated)
            waiting += [(_joined(name, key), item, depth + 1) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(name, item, depth + 1) for item in cast("list[object]", value)]


@cache
def _validator() -> "Draft202012Validator":
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - 0.2 s that only this function needs

    schema = json.loads(Path(__file__).with_name("asp.schema.json").read_text(encoding="utf-8"))
    return Draft202012Validator(schema)


def _check(document: object) -> list[str]:
    """Return the findings of a document, one for each field: the schema's first, then our own rules."""
    found: dict[str, str] = {}
    for error in _validator().iter_errors(cast("str", document)):  # what JSON is, the stubs say by a private name
        for name, text in _explained(error):
            found.setdefault(name, text)
    if any(name.startswith("connection.identity.") for name in found):
        found.pop("connection.identity", None)  # the unknown field says it better than "both"
    for name, text in _own_findings(document):
        found.setdefault(name, text)
    order = list(_WRITE)
    names = sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))
    return [f"{name or '(file)'}: {found[name]}" for name in names]


def _explained(error: "ValidationError") -> Iterator[tuple[str, str]]:
    """Yield (field, text) for one schema error, in words; only a ``version`` or ``transport`` is shown itself."""
    name = ".".join(str(part) for part in error.absolute_path)
    value: object = error.instance
    if error.validator == "additionalProperties":
        known = _fields(cast("dict[str, object]", error.schema)["properties"])
        for key in _fields(value).keys() - known.keys():
            yield _joined(name, key), _unknown(name, key)
    elif error.validator == "required":
        for key in cast("list[str]", error.validator_value):
            if key not in _fields(value):
                yield _joined(name, key), f"is missing; {_WRITE[_joined(name, key)]}"
    else:
        kind = "null" if value is None else _KINDS.get(type(value), "an object")
        if error.validator == "const":
            shown = quoted(value) if isinstance(value, str) else kind
            fault = f"is {shown}, and this program knows only {json.dumps(error.validator_value)}"
        elif error.validator == "type":
            fault = "is null" if value is None else f"is {kind}, not {_WANTED[str(error.validator_value)]}"
        else:
            fault = _FAULTS[str(error.validator)]
        yield name, f"{fault}; {_WRITE[name]}"


def _joined(parent: str, key: str) -> str:
    shown = key if _PLAIN_FIELD.fullmatch(key) else quoted(key)
    return f"{parent}.{shown}" if parent else shown


def _unknown(parent: str, key: str) -> str:
    meant = _MEANT.get(key.replace("_", "").replace("-", "").lower())
    if parent == "connection.identity":
        return f"is not a field of version 0; {_WRITE[parent]}"
    if meant and meant != parent:
        return f"is not a field of version 0; did you mean {meant}?"
    return "is not a field of version 0; remove it"


def _own_findings(document: object) -> Iterator[tuple[str, str]]:
    """Yield (field, text) for the rules that the schema cannot say: the named differences of ``schema/cases`` (C1)."""
    connection = _fields(_fields(document).get("connection"))
    values = {"workspace": _fields(document).get("workspace")}
    values |= {f"connection.{key}": value for key, value in connection.items()}
    values |= {f"connection.identity.{key}": value for key, value in _fields(connection.get("identity")).items()}
    for name, value in values.items():
        if name == "connection.port" and isinstance(value, float):
            yield name, f"is not written as a whole number; {_WRITE[name]}"
        elif name == "connection.host_key" and isinstance(value, str):
            try:
                hostkey.parse(value)
            except HostKeyError as error:
                yield name, str(error)
        elif name in _TEXTS and isinstance(value, str):
            fault = _text_fault(name, value)
            if fault:
                yield name, f"{fault}; {_WRITE[name]}"


def _fields(value: object) -> dict[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _text_fault(name: str, value: str) -> str | None:
    """Return what is wrong with a text, or None; never the text itself, a user or an identity may be a secret."""
    if not value:
        return "is empty"
    if name == "connection.identity.file" and "-----BEGIN" in value:
        return "holds the text of a key, not a path"
    if name == "connection.identity.env" and not _VARIABLE.fullmatch(value):
        return "is not the name of a variable (letters, digits and _, without $)"
    if name == "connection.host" and not hostkey.is_host(hostkey.without_brackets(value)):
        return "is neither a host name nor an IP address"
    return "has a control character" if _CONTROL.search(value) else None
