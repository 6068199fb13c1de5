"""What is tried from inside the sandbox: what the caller names, what the sandbox itself shows, and what nobody should reach."""

import ipaddress
import re
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from asp.errors import UsageError, quoted

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

DNS_PORT: Final = 53
MAX_PORT: Final = 65535
MAX_TARGETS: Final = 2000
_UNIX_NAME_LIMIT: Final = 107
_FORM = (
    "name it tcp:ADDR:PORT, udp:ADDR:PORT, dns:ADDR[:PORT], icmp:ADDR (an IPv6 address in brackets), abstract:NAME or unix:PATH"
)
_WITH_PORT = re.compile(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::([0-9]{1,5}))?")


class Origin(Enum):
    """Where a target comes from."""

    GIVEN = "given"
    """The caller named it, so the caller knows that somebody listens there: then silence means something."""
    FOUND = "found"
    """The sandbox shows it: a gateway, a name server, a neighbour."""
    DEFAULT = "default"
    """Places that a block must hold against everywhere; nobody need listen there."""


@dataclass(frozen=True, slots=True)
class Target:
    """One place to reach. ``kind``: tcp, udp, icmp, dns, abstract or unix; ``scope``: the index of an interface, or 0."""

    kind: str
    address: Address | None = None
    port: int = 0
    scope: int = 0
    name: bytes = b""
    origin: Origin = Origin.GIVEN

    @property
    def control(self) -> str:
        """Which control must have worked for a failure here to mean something."""
        if self.address is None:
            return self.kind
        kind = "udp" if self.kind == "dns" else self.kind
        return f"{kind}{6 if self.address.version == 6 else ''}"  # noqa: PLR2004 - IPv6

    @property
    def is_own_loopback(self) -> bool:
        """Whether only the sandbox's own processes can answer there."""
        return self.address is not None and self.address.is_loopback

    def __str__(self) -> str:
        """Return it as :func:`parse` takes it."""
        if self.address is None:
            return f"{self.kind}:{self.name.decode('utf-8', 'backslashreplace')}"
        host = str(self.address) + (f"%{self.scope}" if self.scope else "")
        if self.kind == "icmp":
            return f"icmp:{host}"
        return f"{self.kind}:[{host}]:{self.port}" if ":" in host else f"{self.kind}:{host}:{self.port}"

    def sockaddr(self) -> bytes:
        """Return the address as the kernel takes it."""
        if self.address is None:
            name = self.name if self.kind == "unix" else b"\0" + self.name
            return struct.pack("<H", socket.AF_UNIX) + name
        # A ping socket has no port, but one that names 0 counts as not connected.
        return sockaddr(self.address, self.port or 1, self.scope)


def sockaddr(address: Address, port: int, scope: int = 0) -> bytes:
    """Return struct sockaddr_in or sockaddr_in6, with Linux's family numbers: the sandbox is a Linux, we need not be."""
    if address.version == 4:  # noqa: PLR2004 - IPv4
        return struct.pack("<H", 2) + struct.pack(">H", port) + address.packed + bytes(8)
    return struct.pack("<H", 10) + struct.pack(">HI", port, 0) + address.packed + struct.pack("<I", scope)


def parse(text: str) -> Target:
    """Read a target. Only addresses: a name would be looked up somewhere. Raises UsageError."""
    kind, colon, rest = text.partition(":")
    if kind in {"abstract", "unix"} and rest:
        name = rest.encode("utf-8", "surrogateescape")
        if len(name) > _UNIX_NAME_LIMIT or b"\0" in name:
            msg = f"{quoted(text)} cannot be a unix socket: at most {_UNIX_NAME_LIMIT} bytes, none of them zero"
            raise UsageError(msg)
        return Target(kind, name=name)
    if kind not in {"tcp", "udp", "dns", "icmp"} or not colon:
        msg = f"{quoted(text)} is no target; {_FORM}"
        raise UsageError(msg)
    match = _WITH_PORT.fullmatch(rest)
    if kind == "icmp" and rest.count(":") > 1 and "[" not in rest:
        match = _WITH_PORT.fullmatch(f"[{rest}]")
    if match is None:
        msg = f"{quoted(text)} is no target; {_FORM}"
        raise UsageError(msg)
    host, _, scope = (match[1] or match[2]).partition("%")
    port = match[3] or (str(DNS_PORT) if kind == "dns" else None)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        msg = f"{quoted(text)}: {quoted(host)} is not an address (names are not looked up)"
        raise UsageError(msg) from None
    if (kind == "icmp") != (port is None) or (port is not None and not 0 < int(port) <= MAX_PORT):
        msg = f"{quoted(text)} needs {'no port' if kind == 'icmp' else f'a port from 1 to {MAX_PORT}'}"
        raise UsageError(msg)
    if scope and not re.fullmatch(r"[0-9]{1,9}", scope):
        msg = f"{quoted(text)}: name the interface by its number inside the sandbox (cat /proc/net/if_inet6)"
        raise UsageError(msg)
    return Target(kind, address, int(port or 0), int(scope or 0))


_NOWHERE = ("192.0.2.1", "198.51.100.1", "2001:db8::1")  # RFC 5737, RFC 3849: addresses of nobody
_METADATA = ("169.254.169.254", "fd00:ec2::254")
_ENGINES = ("172.17.0.1", "10.88.0.1", "10.0.2.2", "192.168.64.1", "192.168.65.254")  # Docker, Podman, slirp, Apple, Desktop
_ONE_HOST = 0xFFFFFFFF
_NO_INTERFACE = 0x7FFFFFFF
_STUB_RESOLVERS = ("127.0.0.11", "127.0.0.53")  # Docker's, systemd's
ENGINE_SOCKETS: Final = (
    "/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/podman/podman.sock",
    "/run/crio/crio.sock", "/run/buildkit/buildkitd.sock", "/run/dbus/system_bus_socket", "/run/systemd/private",
)  # fmt: skip


def defaults() -> list[Target]:
    """Return what a block must hold against everywhere: addresses of nobody, metadata, engines, resolvers, engine sockets."""
    found: list[Target] = []
    for host in _NOWHERE:
        found += [_at("tcp", host, 80), _at("udp", host, 443), _at("dns", host, DNS_PORT), _at("icmp", host)]
    for host in (*_METADATA, *_ENGINES):
        found.append(_at("tcp", host, 80))
    found += [_at("dns", host, DNS_PORT) for host in _STUB_RESOLVERS]
    found += [Target("unix", name=path.encode(), origin=Origin.DEFAULT) for path in ENGINE_SOCKETS]
    return found


def _at(kind: str, host: str, port: int = 0, origin: Origin = Origin.DEFAULT, scope: int = 0) -> Target:
    return Target(kind, ipaddress.ip_address(host), port, scope, origin=origin)


def of_host(addresses: Iterable[Address]) -> list[Target]:
    """Return targets for every address of one host: whether a packet gets there at all; refused is an answer, too."""
    return [
        Target(kind, address, port, origin=Origin.DEFAULT)
        for address in addresses
        if not address.is_loopback and not address.is_link_local
        for kind, port in (("tcp", 22), ("udp", 9), ("dns", DNS_PORT), ("icmp", 0))
    ]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the sandbox shows of its network: texts of /proc/net and /etc/resolv.conf, as far as they were readable."""

    route: bytes = b""
    arp: bytes = b""
    if_inet6: bytes = b""
    dev: bytes = b""
    resolv: bytes = b""
    unix: bytes = b""
    version: bytes = b""

    @property
    def is_gvisor(self) -> bool:
        """Whether the kernel inside is gVisor's, which says so by a version that no Linux has: it names no compiler."""
        return self.version.strip() == b"Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016"

    @property
    def interfaces(self) -> list[str]:
        """Return the names of all interfaces but the loopback."""
        names = [line.partition(b":")[0].strip() for line in self.dev.splitlines() if b":" in line]
        return [name.decode("utf-8", "replace") for name in names if name != b"lo"]

    def targets(self) -> list[Target]:
        """Return the gateways, name servers, neighbours and link-local addresses that these texts show."""
        hosts: list[str] = []
        for line in self.route.splitlines()[1:]:
            words = line.split()
            if len(words) > 7 and re.fullmatch(rb"(?:[0-9A-F]{8} ?){3}", b" ".join((words[1], words[2], words[7]))):  # noqa: PLR2004
                network, gateway, mask = (int.from_bytes(bytes.fromhex(words[i].decode())[::-1]) for i in (1, 2, 7))
                if gateway:
                    hosts.append(str(ipaddress.IPv4Address(gateway)))
                elif 0 < mask < _ONE_HOST:  # a network of ours: its first address is the gateway, mostly
                    hosts.append(str(ipaddress.IPv4Address(network & mask | 1)))
        hosts += [line.split()[0].decode("ascii", "replace") for line in self.arp.splitlines()[1:] if line.split()]
        found = [_at("tcp", host, 22, Origin.FOUND) for host in _valid(hosts)]
        found += [_at("icmp", host, 0, Origin.FOUND) for host in _valid(hosts)]
        servers = [
            words[1] for words in map(bytes.split, self.resolv.splitlines()) if len(words) > 1 and words[0] == b"nameserver"
        ]
        found += [
            _at("dns", host, DNS_PORT, Origin.FOUND, scope=self._scope(scope) if scope else 0)
            for host, _, scope in (one.partition("%") for one in _valid(server.decode("ascii", "replace") for server in servers))
        ]
        for line in self.if_inet6.splitlines():
            words = line.split()
            if len(words) == 6 and words[5] != b"lo" and words[0].startswith(b"fe80"):  # noqa: PLR2004
                # All neighbours on that link; ping is answered by whoever is there.
                found.append(_at("icmp", "ff02::1", 0, Origin.FOUND, scope=_index(words[1])))
        return found

    def _scope(self, name: str) -> int:
        """Return the index of an interface; of one that is not here, an index that nobody has."""
        for line in self.if_inet6.splitlines():
            words = line.split()
            if len(words) == 6 and words[5] == name.encode("utf-8", "replace"):  # noqa: PLR2004
                return _index(words[1])
        return _NO_INTERFACE

    def abstract_listeners(self) -> list[bytes]:
        """Return the name of each abstract socket that accepts connections in this network namespace."""
        found: list[bytes] = []
        for line in self.unix.splitlines()[1:]:
            words = line.split(None, 7)
            # Num RefCount Protocol Flags Type St Inode Path; flag 00010000: listens
            if len(words) == 8 and words[3] == b"00010000" and words[7].startswith(b"@"):  # noqa: PLR2004
                found.append(words[7][1:])
        return found


def _index(hexadecimal: bytes) -> int:
    return int(hexadecimal, 16) if re.fullmatch(rb"[0-9a-f]{1,7}", hexadecimal) else _NO_INTERFACE


def _valid(hosts: Iterable[str]) -> list[str]:
    found: dict[str, None] = {}
    for host in hosts:
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            continue
        found[host] = None
    return list(found)
