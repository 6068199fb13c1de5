"""Read the private key that a contract names, and say in one line why it cannot be used (C5).

The key comes from the one file or variable of the contract, never from an agent, ``~/.ssh`` or a prompt. What is read
is only sorted here (private or public, encrypted, cut off); whether the server takes it, the connection finds out.
"""

import base64
import binascii
import contextlib
import os
import re
import shlex
import stat
from pathlib import Path

from asp import hostkey
from asp.contract import Contract, is_plain_account, shown_path
from asp.errors import IdentityError
from asp.terminal import printable

MAX_KEY_BYTES = 64 << 10  # a 16384 bit RSA key is 12 KiB of text
MIN_REDACTED_CHARACTERS = 8
"""Shorter values are not redacted: they would hit ordinary text all over a tool result."""

_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)
_BEGIN = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----")
_OPENSSH_MAGIC = b"openssh-key-v1\0"  # OpenSSH PROTOCOL.key
_LINE = 70  # characters of base64 a line, as ssh-keygen writes
_READABLE = {"OPENSSH PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY", "PRIVATE KEY"}
_NEW_KEY = "make one without passphrase: ssh-keygen -t ed25519 -N '' -f NEWKEY"


def load_identity(contract: Contract) -> bytes | None:
    """Return the text of the contract's private key, or None if it names none: then no key is offered (C5).

    A missing last newline, CRLF, backslash and n instead of a line break, indentation, quotes and lost line breaks are
    repaired. A file that is the caller's must be readable by the caller alone, as for OpenSSH.

    Raises IdentityError: one line that names the file or the variable and the cause, and never the value. Nothing
    waits: an encrypted key is refused, not asked about.
    """
    identity = contract.identity
    if identity is None:
        return None
    if identity.env is not None:
        return _key_text(_variable(identity.env), f"the variable {identity.env}", variable=True)
    path = identity_path(contract)
    return _key_text(_read_key_file(path), shown_path(path), variable=False)


def identity_path(contract: Contract) -> Path:
    """Return the absolute path of ``identity.file``: ``~`` expanded, else relative to the folder of ``.asp.json`` (C5).

    Raises IdentityError if the contract names no file, or a ``~user`` who has no home.
    """
    if contract.identity is None or contract.identity.file is None:
        msg = "the contract names no identity file"
        raise IdentityError(msg)
    try:
        return contract.path.parent / Path(contract.identity.file).expanduser()
    except RuntimeError as error:
        shown = printable(contract.identity.file, newlines=False)
        msg = f"{shown}: no home directory is known for ~; write an absolute path in connection.identity.file"
        raise IdentityError(msg) from error


def redaction_values(contract: Contract) -> list[str]:
    """Return the secrets that we hold because of this contract, longest first, for L5: what may not reach a model.

    These are the key's text, each line of it that holds private parts, the variable's value, and ``user`` if it does
    not look like an account name (C7). Values under 8 characters are left out. A key that cannot be read is not held.
    """
    found: set[str] = set()
    if contract.user is not None and not is_plain_account(contract.user):
        found.add(contract.user)
    if contract.identity is not None:
        with contextlib.suppress(IdentityError):
            if contract.identity.env is not None:
                source = _variable(contract.identity.env)
                found.add(source.strip())
            else:
                source = _read_key_file(identity_path(contract))
            key = (load_identity(contract) or b"").decode()
            found |= {key.strip(), source.strip(), *_private_lines(key), *_private_lines(_with_line_breaks(source))}
    return sorted((value for value in found if len(value) >= MIN_REDACTED_CHARACTERS), key=len, reverse=True)


def _private_lines(text: str) -> list[str]:
    """Return the lines of base64 that hold private parts.

    The first line of an unencrypted OpenSSH key is the same in every key, and the next ones are public; redacting them
    would change text that has nothing to do with this key.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("-----")]
    public_bytes = 0
    if lines and lines[0].startswith(base64.b64encode(_OPENSSH_MAGIC).decode()[:16]):
        public_bytes = _openssh_public_bytes(_decoded("".join(lines)) or b"")
    kept: list[str] = []
    characters = 0
    for line in lines:
        characters += len(line)
        if characters * 3 // 4 > public_bytes and len(line) >= 2 * MIN_REDACTED_CHARACTERS:
            kept.append(line)
    return kept


def _with_line_breaks(text: str) -> str:
    """Undo what shells, YAML and CI secret stores do to line breaks; a backslash is no part of base64."""
    return text.replace("\\r", "").replace("\\n", "\n").replace("\r\n", "\n").replace("\r", "\n")


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        msg = f"the variable {name} is not set; put the text of a private key into it, or use identity.file"
        raise IdentityError(msg)
    return value


def _read_key_file(path: Path) -> str:
    shown = shown_path(path)
    try:
        # Looked at before it is opened: opening a device can act on it. Links are followed, as OpenSSH does.
        _refuse_kind(shown, path.stat().st_mode)
        with open(path, "rb", opener=_open_no_wait) as file:
            status = os.fstat(file.fileno())
            _refuse_kind(shown, status.st_mode)
            if status.st_uid == os.getuid() and status.st_mode & 0o077:  # OpenSSH sshkey_perm_ok
                typed = printable(shlex.quote(str(path)), newlines=False)
                msg = f"{shown}: others can use this key (mode {status.st_mode & 0o777:04o}); type: chmod 600 {typed}"
                raise IdentityError(msg)
            data = file.read(MAX_KEY_BYTES + 1)
    except FileNotFoundError as error:
        msg = f"{shown}: no such key file; relative paths in connection.identity.file start at the folder of .asp.json"
        raise IdentityError(msg) from error
    except OSError as error:
        msg = f"{shown}: the key cannot be read ({error.strerror})"
        raise IdentityError(msg) from error
    if len(data) > MAX_KEY_BYTES:
        msg = f"{shown}: is too large to be a private key"
        raise IdentityError(msg)
    return data.decode("utf-8", "replace")


def _open_no_wait(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _refuse_kind(shown: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a FIFO, device or socket"
        msg = f"{shown}: is {kind}, not a key file"
        raise IdentityError(msg)


def _key_text(source: str, where: str, *, variable: bool) -> bytes:
    """Return the private key in ``source``, its base64 in lines of 70 characters, or raise what is wrong with it."""
    text = _with_line_breaks(source)
    blocks = [(match[1], match[2]) for match in _BLOCK.finditer(text)]
    private = [block for block in blocks if block[0].endswith("PRIVATE KEY")]
    if not private:
        raise _no_key(text, where, [label for label, _ in blocks], variable=variable)
    label, body = private[0]
    if "ENCRYPTED" in label or "Proc-Type: 4,ENCRYPTED" in body:  # PKCS#8 (RFC 5958), PEM (RFC 1421 4.6.1.1)
        raise _encrypted(where)
    if label not in _READABLE:
        msg = f"{where}: a key of the kind {label} is not supported; {_NEW_KEY}"
        raise IdentityError(msg)
    joined = "".join(body.split())
    blob = _decoded(joined)
    if not blob:
        msg = f"{where}: the key is damaged or cut off; copy it again, with all its lines"
        raise IdentityError(msg)
    if label == "OPENSSH PRIVATE KEY":
        _check_openssh(blob, where)
    lines = [joined[at : at + _LINE] for at in range(0, len(joined), _LINE)]
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""]).encode()


def _check_openssh(blob: bytes, where: str) -> None:
    """Raise for an encrypted or damaged key in OpenSSH's own format (OpenSSH PROTOCOL.key)."""
    if not blob.startswith(_OPENSSH_MAGIC):
        msg = f"{where}: is not an OpenSSH key inside, though its first line says so; copy it again"
        raise IdentityError(msg)
    cipher = _ssh_string(blob, len(_OPENSSH_MAGIC))
    if cipher is not None and cipher != b"none":
        raise _encrypted(where)
    public_bytes = _openssh_public_bytes(blob)
    private = _ssh_string(blob, public_bytes) if public_bytes else None
    if not private or public_bytes + 4 + len(private) != len(blob):
        msg = f"{where}: the key is damaged or cut off; copy it again, with all its lines"
        raise IdentityError(msg)


def _openssh_public_bytes(blob: bytes) -> int:
    """Return where the private part of an OpenSSH key begins; 0 if the blob is too short."""
    at = len(_OPENSSH_MAGIC)
    for skipped in (0, 0, 0, 4):  # cipher, kdf, kdf options, then uint32 number of keys and the public key
        value = _ssh_string(blob, at + skipped)
        if value is None:
            return 0
        at += skipped + 4 + len(value)
    return at


def _ssh_string(blob: bytes, at: int) -> bytes | None:
    """Return the length-prefixed string at ``at`` (RFC 4251 5), or None if the blob ends before it does."""
    size = int.from_bytes(blob[at : at + 4], "big")
    value = blob[at + 4 : at + 4 + size]
    return value if len(blob) >= at + 4 and len(value) == size else None


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _encrypted(where: str) -> IdentityError:
    return IdentityError(f"{where}: the key is encrypted, and nobody is asked for a passphrase; {_NEW_KEY}")


def _no_key(text: str, where: str, labels: list[str], *, variable: bool) -> IdentityError:
    """Return the likeliest reason why a text holds no private key. The text itself is never shown."""
    bare = text.strip().strip("'\"").strip()
    words = bare.split(None, 2)
    begun = _BEGIN.search(text)
    if not bare:
        cause = "is empty; put the text of a private key into it"
    elif (words[0] in hostkey.KEY_TYPES or words[0].startswith(("ssh-", "ecdsa-", "sk-"))) and "PRIVATE" not in bare:
        cause = "is a public key; use the private one, which usually has the same name without .pub"
    elif any("PUBLIC" in label or label == "CERTIFICATE" for label in labels):
        cause = "is a public key or a certificate; use the private key"
    elif begun is not None:
        cause = f"has a first line of a key ({begun[1]}), but the matching last line is missing; copy the whole key"
    elif bare.startswith("PuTTY-User-Key-File"):
        cause = "is a PuTTY key; convert it: puttygen KEY.ppk -O private-openssh -o NEWKEY"
    elif bare.startswith("b3BlbnNzaC1rZXktdjE"):  # base64 of openssh-key-v1
        cause = "lacks the first and the last line of the key (-----BEGIN ... and -----END ...); copy the whole key"
    elif (_decoded("".join(bare.split())) or b"").lstrip().startswith(b"-----BEGIN"):
        cause = "is a key in base64 once more; decode it first: base64 -d"
    elif variable and _names_file(bare):
        cause = "holds the path of a file, not the text of a key; write that path as connection.identity.file instead"
    else:
        cause = "is not a private key; its first line must read -----BEGIN OPENSSH PRIVATE KEY-----"
    return IdentityError(f"{where}: {cause}")


def _names_file(text: str) -> bool:
    try:
        return len(text) < os.pathconf("/", "PC_PATH_MAX") and Path(text).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False
