"""How one target is tried, and how the probe shows first that it could: system calls added to a program, and their meaning.

All targets are started before any is waited for, and all waits share one time limit (the kernel writes the rest of it back).
"""

import ipaddress
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from asp.probe.program import Answer, Cell, Program, Returned
from asp.probe.report import ABSENT, DENIED, UNREACHABLE, Outcome, error_name
from asp.probe.targets import Target, sockaddr

_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_STREAM, _DGRAM, _RAW = 1, 2, 3
_FLAGS = 0o4000 | 0o2000000  # SOCK_NONBLOCK, SOCK_CLOEXEC
_SOL_SOCKET, _SO_ERROR, _SO_PEERCRED = 1, 4, 17
_NOSIGNAL = 0x4000
_POLLIN, _POLLOUT = 1, 4
_ICMP, _ICMP6 = 1, 58
_AT_CWD = -100
_EINPROGRESS, _EAGAIN, _EPROTOTYPE = -115, -11, -91
_PAYLOAD: Final = b"asp-probe"

QUESTION: Final = b"asp-probe.invalid"
"""What name servers are asked for: a name of nobody (RFC 2606)."""


@dataclass(frozen=True, slots=True)
class Happened:
    """What became of a target. ``at_once``: the sandbox's own kernel said so, nothing was sent. ``peer``: a process's number."""

    outcome: Outcome
    error: str | None = None
    at_once: bool = False
    peer: int | None = None


class Attempt(Protocol):
    """One way to try one target."""

    def start(self, program: Program) -> None:
        """Add the calls that begin it."""
        ...

    def finish(self, program: Program, limit: Cell) -> None:
        """Add the calls that wait for it, at most as long as ``limit`` (struct timespec) still says."""
        ...

    def happened(self, answer: Answer) -> Happened:
        """Say what became of it."""
        ...


def attempt(target: Target) -> Attempt:
    """Return the way to try a target."""
    match target.kind:
        case "tcp":
            return _Stream(target)
        case "udp":
            return _Datagram(target, _PAYLOAD)
        case "dns":
            return _Datagram(target, dns_query(QUESTION))
        case "icmp":
            return _Ping(target)
        case _:
            return _Local(target)


def timespec(seconds: float) -> bytes:
    """Return struct timespec."""
    return struct.pack("<qq", int(seconds), int(seconds % 1 * 1e9))


def dns_query(name: bytes) -> bytes:
    """Return a recursive question for the address of ``name`` (RFC 1035 4.1)."""
    labels = b"".join(bytes([len(label)]) + label for label in name.split(b"."))
    return struct.pack(">6H", 0x4153, 0x0100, 1, 0, 0, 0) + labels + struct.pack(">BHH", 0, 1, 1)


def _failed(error: int, *, at_once: bool) -> Happened:
    name = error_name(-error)
    if name in UNREACHABLE:
        return Happened(Outcome.UNREACHABLE, name, at_once)
    if name == "ECONNREFUSED":
        return Happened(Outcome.REFUSED, name, at_once)
    if name in DENIED:
        return Happened(Outcome.DENIED, name, at_once)
    if name in ABSENT:
        return Happened(Outcome.ABSENT, name, at_once)
    if name in {"ETIMEDOUT", "EAGAIN"}:
        return Happened(Outcome.TIMED_OUT, name)
    return Happened(Outcome.NOT_TRIED, name, at_once)


def _family(target: Target) -> int:
    return _AF_INET6 if target.address is not None and target.address.version == 6 else _AF_INET  # noqa: PLR2004 - IPv6


class _Stream:
    """TCP: connect, and ask how it went."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def start(self, program: Program) -> None:
        self._poll = program.data(struct.pack("<ihh", -1, _POLLOUT, 0))
        self._socket = program.call("socket", _family(self._target), _STREAM | _FLAGS, 0, store=self._poll)
        with program.only_after(self._socket):
            address = program.data(self._target.sockaddr())
            self._connect = program.call("connect", Returned(self._socket), address, address.size)

    def finish(self, program: Program, limit: Cell) -> None:
        self._error, size = program.space(8), program.data(struct.pack("<i", 4))
        # Before the wait: an error that is there already is taken, and a socket that could not be made is not waited for.
        early = program.call("getsockopt", Returned(self._socket), _SOL_SOCKET, _SO_ERROR, self._error, size)
        self._late, size = program.space(8), program.data(struct.pack("<i", 4))
        with program.only_after(early):
            self._wait = program.call("ppoll", self._poll, 1, limit, 0, 8)
            program.call("getsockopt", Returned(self._socket), _SOL_SOCKET, _SO_ERROR, self._late, size)

    def happened(self, answer: Answer) -> Happened:
        made, connected = answer.result(self._socket), answer.result(self._connect)
        if made is None or made < 0:
            return _failed(made or 0, at_once=True)
        if connected is None or (connected < 0 and connected != _EINPROGRESS):
            return _failed(connected or 0, at_once=True)
        if connected == 0:
            return Happened(Outcome.REACHED)
        error = answer.integer(self._error) or answer.integer(self._late)
        if error:
            return _failed(-error, at_once=False)
        return Happened(Outcome.REACHED if (answer.result(self._wait) or 0) > 0 else Outcome.TIMED_OUT)


class _Datagram:
    """UDP: send, and wait for an answer or an error."""

    def __init__(self, target: Target, payload: bytes, kind: int = _DGRAM, protocol: int = 0) -> None:
        self._target, self._payload, self._kind, self._protocol = target, payload, kind, protocol

    def start(self, program: Program) -> None:
        self._poll = program.data(struct.pack("<ihh", -1, _POLLIN, 0))
        family = _family(self._target)
        with ExitStack() as nested:
            self._socket = program.call("socket", family, self._kind | _FLAGS, self._protocol, store=self._poll)
            nested.enter_context(program.only_after(self._socket))
            address, payload = program.data(self._target.sockaddr()), program.data(self._payload)
            self._connect = program.call("connect", Returned(self._socket), address, address.size)
            nested.enter_context(program.only_after(self._connect))
            self._send = program.call("sendto", Returned(self._socket), payload, payload.size, _NOSIGNAL, 0, 0)
            self._received = program.space(64)

    def finish(self, program: Program, limit: Cell) -> None:
        peer, size = program.space(32), program.data(struct.pack("<i", 32))
        with ExitStack() as nested:
            connected = program.call("getpeername", Returned(self._socket), peer, size)
            nested.enter_context(program.only_after(connected))
            program.call("ppoll", self._poll, 1, limit, 0, 8)
            self._receive = program.call("recvfrom", Returned(self._socket), self._received, 64, 0, 0, 0)

    def happened(self, answer: Answer) -> Happened:
        for call in (self._socket, self._connect, self._send):
            result = answer.result(call)
            if result is None or result < 0:
                return _failed(result or 0, at_once=True)
        received = answer.result(self._receive)
        if received is None:
            return Happened(Outcome.TIMED_OUT)
        return Happened(Outcome.REACHED) if received >= 0 else _failed(received, at_once=False)


class _Ping:
    """ICMP: an echo request by a ping socket and by a raw one, whichever may be made."""

    def __init__(self, target: Target) -> None:
        six = _family(target) == _AF_INET6
        protocol, echo = (_ICMP6, 128) if six else (_ICMP, 8)
        body = struct.pack(">BBHHH", echo, 0, 0, 0x4153, 1) + _PAYLOAD + b"!"
        total = sum(struct.unpack(f">{len(body) // 2}H", body))
        checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
        body = body[:2] + struct.pack(">H", checksum) + body[4:]
        self._ways = [_Datagram(target, body, kind, protocol) for kind in (_DGRAM, _RAW)]

    def start(self, program: Program) -> None:
        for way in self._ways:
            way.start(program)

    def finish(self, program: Program, limit: Cell) -> None:
        for way in self._ways:
            way.finish(program, limit)

    def happened(self, answer: Answer) -> Happened:
        both = [way.happened(answer) for way in self._ways]
        # The way that came further says more; being denied one of them is worth nothing if the other is open.
        order = [Outcome.REACHED, Outcome.REFUSED, Outcome.TIMED_OUT, Outcome.UNREACHABLE, Outcome.NOT_TRIED, Outcome.DENIED]
        return min(both, key=lambda one: order.index(one.outcome) if one.outcome in order else len(order))


class _Local:
    """A unix socket, by abstract name or by path; and who is at the other end."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def start(self, program: Program) -> None:
        address = self._target.sockaddr() + (b"\0" if self._target.kind == "unix" else b"")
        self._peer, size = program.space(16), program.data(struct.pack("<i", 12))
        with ExitStack() as nested:
            self._socket = program.call("socket", _AF_UNIX, _STREAM | _FLAGS, 0)
            nested.enter_context(program.only_after(self._socket))
            self._connect = program.call("connect", Returned(self._socket), program.data(address), len(address))
            nested.enter_context(program.only_after(self._connect))
            self._asked = program.call("getsockopt", Returned(self._socket), _SOL_SOCKET, _SO_PEERCRED, self._peer, size)

    def finish(self, program: Program, limit: Cell) -> None:
        pass

    def happened(self, answer: Answer) -> Happened:
        made, connected = answer.result(self._socket), answer.result(self._connect)
        if made is None or made < 0:
            return _failed(made or 0, at_once=True)
        if connected in {_EAGAIN, _EPROTOTYPE}:  # its queue is full, or it is of another type: somebody is there
            return Happened(Outcome.REACHED, error_name(-connected))
        if connected is None or connected < 0:
            found = _failed(connected or 0, at_once=True)
            return Happened(Outcome.ABSENT, found.error, at_once=True) if found.outcome is Outcome.REFUSED else found
        return Happened(Outcome.REACHED, peer=answer.integer(self._peer) if answer.ok(self._asked) else None)


class SelfControl:
    """A listener and a client of the program's own, over the sandbox's loopback: shows that the program could reach one."""

    def __init__(self, kind: str, address: bytes, how: str, *, path: bytes | None = None) -> None:
        """Take the family from ``address`` (struct sockaddr); a ``path`` is removed again."""
        self.kind, self.how = kind, how
        self._address, self._path = address, path
        (self._family,) = struct.unpack_from("<H", address)
        self._type = _DGRAM if kind.startswith("udp") else _STREAM

    def add(self, program: Program, limit: Cell) -> None:
        """Add the calls."""
        named, size = program.space(128), program.data(struct.pack("<i", 128))
        poll, payload = program.data(struct.pack("<ihh", -1, _POLLIN, 0)), program.data(_PAYLOAD)
        address, received = program.data(self._address), program.space(64)
        with ExitStack() as nested:

            def then(name: str, *arguments: int | Cell | Returned, store: Cell | None = None) -> int:
                call = program.call(name, *arguments, store=store)
                nested.enter_context(program.only_after(call))
                return call

            self._listener = listener = then("socket", self._family, self._type | _FLAGS, 0, store=poll)
            then("bind", Returned(listener), address, address.size)
            if self._type == _STREAM:
                then("listen", Returned(listener), 1)
            then("getsockname", Returned(listener), named, size)
            client = then("socket", self._family, self._type | _FLAGS, 0)
            # A stream's connect on loopback may say EINPROGRESS: what counts is what the listener sees.
            connected = program.call("connect", Returned(client), named if self._path is None else address, address.size)
            if self._type == _DGRAM:
                nested.enter_context(program.only_after(connected))
                then("sendto", Returned(client), payload, payload.size, _NOSIGNAL, 0, 0)
            then("ppoll", poll, 1, limit, 0, 8)
            if self._type == _STREAM:
                self._seen = program.call("accept4", Returned(listener), 0, 0, _FLAGS)
            else:
                self._seen = program.call("recvfrom", Returned(listener), received, 64, 0, 0, 0)
        if self._path is not None:
            program.call("unlinkat", _AT_CWD, program.data(self._path + b"\0"), 0)

    def worked(self, answer: Answer) -> bool:
        """Whether the listener saw the client."""
        return answer.ok(self._seen)

    def denied(self, answer: Answer) -> str | None:
        """Return the kernel's name for why no such socket may be made at all, or None if one may."""
        made = answer.result(self._listener)
        name = error_name(-made) if made is not None and made < 0 else None
        return name if name in DENIED else None


def self_controls(nonce: bytes) -> list[SelfControl]:
    """Return the controls of all socket kinds; of two for one kind, one that works is enough. ``nonce`` makes names unique."""

    def at(host: str) -> bytes:
        return sockaddr(ipaddress.ip_address(host), 0)

    unix = struct.pack("<H", _AF_UNIX)
    path = b".probe-" + nonce
    found: list[SelfControl] = []
    for kind in ("tcp", "udp"):
        found += [
            SelfControl(kind, at("127.0.0.1"), "127.0.0.1 reached a listener of its own"),
            SelfControl(f"{kind}6", at("::1"), "::1 reached a listener of its own"),
            SelfControl(f"{kind}6", at("::ffff:127.0.0.1"), "an IPv6 socket reached a listener of its own at ::ffff:127.0.0.1"),
        ]
    found.append(SelfControl("abstract", unix + b"\0asp-probe-" + nonce, "an abstract name reached a listener of its own"))
    found.append(SelfControl("unix", unix + path + b"\0", "a socket file reached a listener of its own", path=path))
    return found
