"""Real listeners that write down whoever comes, and a sandbox that is no more than a command in front of ``sh``."""

import asyncio
import contextlib
import ctypes
import os
import random
import secrets
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from asp.transport import ExecResult

WAIT_S = 50
_SO_REUSEADDR = 1


class Listeners:
    """Sockets that accept, answer and log. Each is made where the caller says (in another network namespace, too)."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._servers: list[asyncio.Server] = []
        self._datagrams: list[asyncio.DatagramTransport] = []
        self._where: list[tuple[str, Callable[[], socket.socket]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(
        self, kind: str, address: str | bytes, name: str, inside: Callable[[Callable[[], Any]], Any] | None = None
    ) -> int:
        """Listen; return the port."""

        def make() -> socket.socket:
            unix = isinstance(address, bytes) or address.startswith("/")
            family = socket.AF_UNIX if unix else socket.AF_INET6 if ":" in str(address) else socket.AF_INET
            made = socket.socket(family, socket.SOCK_DGRAM if kind in {"udp", "dns"} else socket.SOCK_STREAM)
            try:
                if family == socket.AF_INET6:
                    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                made.bind(address if unix else socket.getaddrinfo(str(address), 0, family)[0][4])  # with the scope
            except OSError:
                made.close()
                raise
            made.setblocking(False)
            return made

        made = make() if inside is None else inside(make)
        port = 0 if made.family == socket.AF_UNIX else int(made.getsockname()[1])
        loop = asyncio.get_running_loop()
        if made.type & 0xF == socket.SOCK_DGRAM:
            seen = self.seen

            class Answer(asyncio.DatagramProtocol):
                def connection_made(self, transport: Any) -> None:
                    self.transport = transport

                def datagram_received(self, data: bytes, addr: Any) -> None:
                    seen.append(f"{name} {dns_name(data)}" if kind == "dns" else name)
                    self.transport.sendto(data, addr)

            transport, _ = await loop.create_datagram_endpoint(Answer, sock=made)
            self._datagrams.append(transport)
        else:

            async def accepted(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                self.seen.append(name)
                writer.close()

            self._servers.append(
                await asyncio.start_server(accepted, sock=made)
                if made.family != socket.AF_UNIX
                else await asyncio.start_unix_server(accepted, sock=made)
            )
        return port

    async def has_seen(self, name: str) -> bool:
        """Wait until a listener was reached."""
        for _ in range(WAIT_S * 20):
            if any(line.split()[0] == name for line in self.seen):
                return True
            await asyncio.sleep(0.05)
        return False

    async def aclose(self) -> None:
        for server in self._servers:
            server.close()
        for transport in self._datagrams:
            transport.close()
        for _ in range(5):
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def dns_name(question: bytes) -> str:
    """Return the name that a DNS question asks for."""
    at, labels = 12, []
    while question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode("ascii", "replace"))
        at += 1 + question[at]
    return ".".join(labels)


class Command:
    """The one verb of a transport that the probe uses, through a command that runs ``sh``: bwrap, docker exec."""

    def __init__(self, prefix: Sequence[str], *, pass_fds: Sequence[int] = (), cwd: Path | str = "/") -> None:
        self._prefix, self._pass_fds, self._cwd = list(prefix), list(pass_fds), cwd

    async def exec(self, script: str | bytes, *, stdin: bytes | None = None, **_options: Any) -> ExecResult:
        text = script.decode() if isinstance(script, bytes) else script
        # In a thread, by subprocess: asyncio's own complains where a program ends before it has read its stdin.
        done = await asyncio.to_thread(
            subprocess.run, [*self._prefix, "sh", "-c", text], input=stdin or b"", capture_output=True, pass_fds=self._pass_fds,
            cwd=self._cwd, timeout=5 * WAIT_S, check=False,
        )  # fmt: skip
        status, out, err = done.returncode, done.stdout, done.stderr
        return ExecResult(status if status >= 0 else 128 - status, None, out, err, len(out), len(err))


class Namespace:
    """A network namespace behind a pair of wires: what stands in for the internet and for metadata. Needs root and ip(8)."""

    def __init__(self) -> None:
        """Choose addresses that are nobody's (RFC 2544, 3849, 3927): ``here`` is this side, the others are on the other."""
        taken = run("ip", "route")
        one = next(one for one in random.sample(range(1, 251), 250) if f"198.18.{one}.0/" not in taken)
        two = 1 + secrets.randbelow(250)
        self.name = f"asp-{secrets.token_hex(3)}"
        self.wire = f"{self.name}h"
        self.here, self.there = f"198.18.{one}.1", f"198.18.{one}.10"
        self.here6, self.there6 = f"2001:db8:{one:x}:{two:x}::1", f"2001:db8:{one:x}:{two:x}::10"
        self.metadata = f"169.254.{one}.{two}"
        self.link_local = f"fe80::a5b:{one:x}:{two:x}"

    def __enter__(self) -> Self:
        run("ip", "netns", "add", self.name)
        try:
            run("ip", "link", "add", self.wire, "type", "veth", "peer", "name", "far", "netns", self.name)
            for address in (f"{self.here}/24", f"{self.here6}/64"):
                run("ip", "addr", "add", address, "dev", self.wire, *(("nodad",) if ":" in address else ()))
            run("ip", "link", "set", self.wire, "up")
            for address in (f"{self.there}/24", f"{self.metadata}/32", f"{self.there6}/64", f"{self.link_local}/64"):
                self.ip("addr", "add", address, "dev", "far", *(("nodad",) if ":" in address else ()))
            self.ip("link", "set", "far", "up")
            self.ip("link", "set", "lo", "up")
            self.ip("route", "add", "default", "via", self.here)
            run("ip", "route", "add", f"{self.metadata}/32", "dev", self.wire)
            self.index = int(Path(f"/sys/class/net/{self.wire}/ifindex").read_text())
            self._has_own_link_local()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        run("ip", "netns", "del", self.name)

    def ip(self, *words: str) -> str:
        return run("ip", "-n", self.name, *words)

    def _has_own_link_local(self) -> None:
        """Wait until this side may use its link-local address: the kernel looks for another owner first."""
        for _ in range(WAIT_S * 20):
            lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
            if any(words[5] == self.wire and words[0].startswith("fe80") and not int(words[4], 16) & 0x40 for words in lines):
                return
            threading.Event().wait(0.05)
        raise AssertionError("no link-local address")

    def inside(self, make: Callable[[], Any]) -> Any:
        """Call something in a thread that is in the namespace."""
        return in_namespace(f"/run/netns/{self.name}", make)

    def pings(self) -> int:
        """Return how many echo requests have come, of both versions."""
        counted = run("ip", "netns", "exec", self.name, "cat", "/proc/net/snmp", "/proc/net/snmp6")
        lines = [line.split() for line in counted.splitlines()]
        names, values = [words for words in lines if words[0] == "Icmp:"]
        six = next(int(words[1]) for words in lines if words[0] == "Icmp6InEchos")
        return int(values[names.index("InEchos")]) + six


def in_namespace(path: str, make: Callable[[], Any]) -> Any:
    """Call something in a thread that has entered a network namespace, and return what it returned."""
    results: list[Any] = []

    def run_there() -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0x40000000) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(descriptor)
            results.append(make())
        except OSError as error:
            results.append(error)

    thread = threading.Thread(target=run_there)
    thread.start()
    thread.join(WAIT_S)
    if isinstance(results[0], OSError):
        raise results[0]
    return results[0]


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=WAIT_S).stdout


@contextlib.contextmanager
def held_tcp_listener() -> Iterator[socket.socket]:
    """A listening TCP socket of this network namespace, to be handed to a process inside: the leak of facts 2.3."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        yield made


def checksum(data: bytes) -> int:
    """Return the internet checksum (RFC 1071) of an even number of bytes."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
