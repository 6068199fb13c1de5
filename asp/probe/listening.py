"""Listeners on this machine's own addresses while a sandbox is probed: what they saw outweighs what the sandbox says.

Only while ``asp probe --listen`` runs, on ports that the system chooses. A listener is knocked at from here before it is
believed: one that a firewall hides from everybody proves nothing by its silence.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from asp.probe.report import Check, Evidence, Outcome, Report, Verdict
from asp.probe.targets import Address, Target

_KNOCK_WAIT_S = 10.0
_V6 = 6
_KNOCK_BYTES = 16


class HostListeners:
    """TCP and UDP sockets on each address: ``async with HostListeners(addresses) as listeners``; then probe, then judge."""

    def __init__(self, addresses: Iterable[Address]) -> None:
        """Remember where to listen; link-local addresses are left out, since their interface has another number inside."""
        self._addresses = [address for address in addresses if not address.is_link_local]
        self._closers: list[asyncio.Server | asyncio.DatagramTransport] = []
        self._seen: dict[Target, _Log] = {}
        self._writers: list[asyncio.StreamWriter] = []
        self._knock = secrets.token_bytes(_KNOCK_BYTES)

    @property
    def targets(self) -> list[Target]:
        """Return what listens, as targets that somebody is known to listen at."""
        return list(self._seen)

    async def __aenter__(self) -> Self:
        """Listen. An address that cannot be listened at any more is left out."""
        for address in self._addresses:
            for kind in ("tcp", "udp"):
                with contextlib.suppress(OSError):
                    await self._listen(kind, address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """Close all."""
        for one in self._closers:
            one.close()
        for writer in self._writers:
            writer.close()
        for writer in self._writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _listen(self, kind: str, address: Address) -> None:
        made = _socket(kind, address)
        try:
            made.bind((str(address), 0))
        except OSError:
            made.close()
            raise
        target = Target(kind, address, int(made.getsockname()[1]))
        seen = _Log()
        if kind == "tcp":

            async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                visit = seen.add(writer.get_extra_info("peername"))
                self._writers.append(writer)
                with contextlib.suppress(OSError):
                    seen.said(visit, await reader.read(_KNOCK_BYTES))
                writer.close()

            self._closers.append(await asyncio.start_server(accepted, sock=made))
        else:
            transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: _Datagrams(seen), sock=made)
            self._closers.append(transport)
        self._seen[target] = seen

    async def judged(self, report: Report) -> Report:
        """Return the report with what the listeners saw: come is reached, whatever the sandbox said; not come is proof, too."""
        heard = {str(target): await self._hears(target) for target in self._seen}
        came = {str(target): seen.but(self._knock) for target, seen in self._seen.items()}
        return replace(
            report, checks=tuple(_judged(check, came[check.target], works=heard[check.target]) if check.target in came else check
                                 for check in report.checks),
        )  # fmt: skip

    async def _hears(self, target: Target) -> bool:
        """Knock from here; what came before is in the log when the knock is."""
        with _socket(target.kind, target.address) as knock:
            try:
                async with asyncio.timeout(_KNOCK_WAIT_S):
                    await asyncio.get_running_loop().sock_connect(knock, (str(target.address), target.port))
                    # Known by what it says: address translation may have changed where it seems to come from.
                    await asyncio.get_running_loop().sock_sendall(knock, self._knock)
                    await self._seen[target].has(self._knock)
            except (OSError, TimeoutError):
                return False
        return True


class _Log:
    """Who came to one listener, in order."""

    def __init__(self) -> None:
        self._visits: list[_Visit] = []
        self._more = asyncio.Event()

    def add(self, peer: Sequence[Any]) -> "_Visit":
        """Note somebody who has said nothing yet."""
        self._visits.append(_Visit(f"{peer[0]} port {peer[1]}"))
        return self._visits[-1]

    def said(self, visit: "_Visit", data: bytes) -> None:
        """Note what somebody said."""
        visit.data = data
        self._more.set()

    async def has(self, data: bytes) -> None:
        """Wait until somebody has said this."""
        while all(visit.data != data for visit in self._visits):
            self._more.clear()
            await self._more.wait()

    def but(self, data: bytes) -> list[str]:
        """Return where all came from but who said this."""
        return [visit.peer for visit in self._visits if visit.data != data]


@dataclass(slots=True)
class _Visit:
    peer: str
    data: bytes = b""


class _Datagrams(asyncio.DatagramProtocol):
    """Writes down who sent something."""

    def __init__(self, seen: _Log) -> None:
        self._seen = seen

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        self._seen.said(self._seen.add(addr), data)


def _socket(kind: str, address: Address | None) -> socket.socket:
    family = socket.AF_INET6 if address is not None and address.version == _V6 else socket.AF_INET
    made = socket.socket(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM)
    made.setblocking(False)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return made


def _judged(check: Check, came: list[str], *, works: bool) -> Check:
    if came:
        why = f"a listener on this machine saw it, from {came[0]}"
        return replace(check, verdict=Verdict.REACHED, outcome=Outcome.REACHED, evidence=Evidence.STRONG, why=why)
    if check.verdict is Verdict.NOT_PROVEN and check.outcome is Outcome.TIMED_OUT and works:
        why = "a packet was sent, and the listener on this machine did not see it"
        return replace(check, verdict=Verdict.BLOCKED, evidence=Evidence.STRONG, why=why)
    if check.verdict is Verdict.BLOCKED and check.evidence is Evidence.WEAK and not works:
        why = "no answer, but the listener on this machine does not hear us either (a firewall?)"
        return replace(check, verdict=Verdict.NOT_PROVEN, evidence=Evidence.NONE, why=why)
    return check
