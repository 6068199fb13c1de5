"""Read a pinned host key, name it as OpenSSH does, and say what is wrong when the server shows another (C6).

Nothing here opens a connection or a file.
"""

import base64
import binascii
import hashlib
import ipaddress
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from asp.errors import HostKeyError, HostKeyMismatch, HostKeyMissing
from asp.terminal import printable

# The second part of each entry: the sizes in bytes that the fields after the type may have (RFC 8709 4, RFC 5656 3.1:
# an uncompressed point is 04 X Y). RSA is looked at apart, its numbers have no fixed size (RFC 4253 6.6).
_FIELD_SIZES: dict[str, tuple[int, ...]] = {
    "ssh-ed25519": (32,),
    "ssh-ed448": (57,),
    "ecdsa-sha2-nistp256": (8, 65),
    "ecdsa-sha2-nistp384": (8, 97),
    "ecdsa-sha2-nistp521": (8, 133),
    "ssh-rsa": (),
}
KEY_TYPES = tuple(_FIELD_SIZES)
"""The types of host keys that can be pinned. ssh-dss is not among them: OpenSSH 10 no longer knows it."""

_MIN_RSA_BITS = 1024  # OpenSSH RequiredRSASize
_WRITE = 'write "TYPE BASE64", the first two words of the server\'s /etc/ssh/ssh_host_ed25519_key.pub'
_ONE = "write one key; a server that has several needs only one pinned"
_HOST_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*")
_ZONE = re.compile(r"[a-zA-Z0-9._~-]+")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_FINGERPRINT = re.compile(r"(SHA256:|MD5:|([0-9a-f]{2}:){15}[0-9a-f]{2})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PinnedKey:
    """A public host key: its type as in RFC 4253 6.6 and its blob as the server sends it."""

    algorithm: str
    blob: bytes

    def fingerprint(self) -> str:
        """Return ``SHA256:`` and unpadded base64, as ``ssh-keygen -l`` prints it."""
        return fingerprint(self.blob)

    def line(self) -> str:
        """Return ``TYPE BASE64``, the form that ``host_key`` takes."""
        return f"{self.algorithm} {base64.b64encode(self.blob).decode()}"

    def algorithms(self) -> tuple[str, ...]:
        """Return the host key algorithms to offer, so that the server cannot show a key of another type.

        An RSA key signs with SHA-2 (RFC 8332); ``ssh-rsa`` with SHA-1 is not offered.
        """
        if self.algorithm == "ssh-rsa":
            return ("rsa-sha2-512", "rsa-sha2-256")
        return (self.algorithm,)


def fingerprint(blob: bytes) -> str:
    """Return the SHA-256 fingerprint of a public key blob in OpenSSH's form."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def parse(text: str) -> PinnedKey:
    """Read ``TYPE BASE64``; a trailing comment, as ``.pub`` files have it, is dropped.

    Raises HostKeyError for all else: ``what is wrong; what to write instead``. The text itself is never repeated,
    somebody may have put a private key there.
    """
    words = text.split()
    _refuse_other_forms(text.strip(), words)
    algorithm = words[0]
    if len(words) == 1:
        raise _wrong("has a type but no key", _WRITE)
    try:
        blob = base64.b64decode(words[1], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong("has a key that is damaged or cut off", _WRITE) from error
    fields = ssh_strings(blob)
    if not fields:
        raise _wrong("has a key that is damaged or cut off", _WRITE)
    inner = fields[0].decode("ascii", "replace")
    if inner != algorithm:
        shown = inner if inner in _FIELD_SIZES else "something else"
        raise _wrong(f"says {algorithm}, but its key is {shown}", "copy both words from the same line")
    if not _well_formed(algorithm, fields[1:]):
        raise _wrong(f"has a key that is not a usable {algorithm} key", _WRITE)
    return PinnedKey(algorithm, blob)


def ssh_strings(blob: bytes) -> list[bytes]:
    """Split a blob into its length-prefixed strings (RFC 4251 5); empty if it is not exactly made of such."""
    fields: list[bytes] = []
    at = 0
    while at < len(blob):
        if at + 4 > len(blob):
            return []
        (size,) = struct.unpack_from(">I", blob, at)
        at += 4
        if size > len(blob) - at:
            return []
        fields.append(blob[at : at + size])
        at += size
    return fields


def endpoint(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets (RFC 3986 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_brackets(host: str) -> str:
    """Return ``::1`` for ``[::1]``, as URLs write it; all else unchanged."""
    inner = host[1:-1]
    return inner if host == f"[{inner}]" and ":" in inner else host


def is_host(host: str) -> bool:
    """Whether ``host`` is an IP address (IPv6 without brackets, with or without a zone) or can be a host name.

    No name starts with ``-`` or holds ``@``, a space or a non-ASCII letter (Harbor's rule, before it connects).
    """
    address, percent, zone = host.partition("%")
    try:
        ipaddress.ip_address(address)
    except ValueError:
        if len(host) > 253 or not _HOST_NAME.fullmatch(host):  # noqa: PLR2004 - RFC 1035 2.3.4
            return False
        # Labels of RFC 1035 2.3.4: getaddrinfo answers an empty or a long one with UnicodeError, not "no such host".
        return all(1 <= len(label) <= 63 for label in host.removesuffix(".").split("."))  # noqa: PLR2004
    return not percent or (":" in address and _ZONE.fullmatch(zone) is not None)


def is_loopback(host: str) -> bool:
    """Whether ``host``, as written, can only mean this machine: 127/8 in any notation, ::1, localhost, 0.0.0.0, ::.

    No name is looked up, so a name that somebody's DNS sends to 127.0.0.1 is not seen here.
    """
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761 6.3
        return True
    try:
        address: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(name)
    except ValueError:
        try:
            address = ipaddress.IPv4Address(socket.inet_aton(name))  # 127.1, 0x7f000001: getaddrinfo takes them too
        except (OSError, UnicodeError):
            return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    return address.is_loopback or address.is_unspecified


def mismatch(pin: PinnedKey, offered_fingerprint: str, host: str, port: int) -> HostKeyMismatch:
    """Return the error for a server that showed another key than ``pin``, with both fingerprints (P54).

    On loopback the usual cause is not an attack: the sandbox ended and something else got its port.
    """
    where = printable(endpoint(host, port), newlines=False)
    offered = printable(offered_fingerprint, newlines=False)
    if is_loopback(host):
        cause = "the sandbox that had this port is probably gone: make a new one with asp-sandbox up local"
    else:
        cause = "if the sandbox was made anew, pin its new key in connection.host_key; else somebody may sit in between"
    return HostKeyMismatch(
        f"{where}: the contract pins host key {pin.fingerprint()}, the server showed {offered}; "
        f"refused before authentication; {cause}",
    )


class NamesServer(Protocol):
    """What :func:`missing` needs of a contract, which is a layer above this module."""

    @property
    def path(self) -> Path:
        """The file that should hold the pin."""
        ...

    @property
    def host(self) -> str:
        """The server's name or address."""
        ...

    @property
    def port(self) -> int:
        """The server's port."""
        ...


def missing(contract: NamesServer) -> HostKeyMissing:
    """Return the error for a contract that pins no key where one is needed (C6), with the line that mends it."""
    place = printable(str(contract.path), newlines=False)
    where = endpoint(contract.host, contract.port)
    return HostKeyMissing(
        f"{place}: connection.host_key: no host key is pinned, so whoever holds {where} passes for the sandbox; "
        'add "host_key": "TYPE BASE64" (the first two words of the server\'s ssh_host_ed25519_key.pub), '
        "or accept what answers this time with --accept-new",
    )


def _wrong(what: str, instead: str) -> HostKeyError:
    return HostKeyError(f"{what}; {instead}")


def _refuse_other_forms(text: str, words: list[str]) -> None:
    """Raise for everything that people put here instead of one public key line, each with its own hint."""
    key_file = "-----BEGIN" in text or "PuTTY" in text
    is_fingerprint = any(_FINGERPRINT.match(word) for word in words[:2])
    certificate = any(word.endswith("-cert-v01@openssh.com") for word in words[:2])
    types = [at for at, word in enumerate(words) if word in _FIELD_SIZES]
    forms = [
        (not words, "is empty", _WRITE + ", or leave it out"),
        (key_file, "holds a key file", "a private key never belongs here; " + _WRITE),
        (_CONTROL.search(text), "has more than one line or a control character", _ONE),
        (text.startswith("@"), "is a known_hosts marker", "certificate authorities are not supported; " + _WRITE),
        (is_fingerprint, "is a fingerprint, and no key can be made from it", _WRITE),
        (certificate, "is a certificate", "pin the plain key: " + _WRITE),
        (text.startswith("AAAA"), "lacks the type in front of the key", _WRITE),
        (types[:1] == [1], "is a known_hosts line", "leave out its first word, the host, and " + _WRITE),
        (types[:1] != [0], "does not begin with a known key type", f"{_WRITE}; types: {', '.join(KEY_TYPES)}"),
        (len(types) > 1, "holds several keys", _ONE),
    ]
    for applies, what, instead in forms:
        if applies:
            raise _wrong(what, instead)


def _well_formed(algorithm: str, fields: list[bytes]) -> bool:
    if algorithm == "ssh-rsa":  # mpint e, mpint n (RFC 4253 6.6)
        bits = [int.from_bytes(number, "big").bit_length() for number in fields]
        return len(bits) == 2 and bits[0] > 1 and bits[1] >= _MIN_RSA_BITS  # noqa: PLR2004
    if tuple(map(len, fields)) != _FIELD_SIZES[algorithm]:
        return False
    if algorithm.startswith("ecdsa-"):
        curve = algorithm.removeprefix("ecdsa-sha2-").encode()
        return fields[0] == curve and fields[1][:1] == b"\x04"
    return True
