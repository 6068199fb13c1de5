"""The verb ``asp probe``."""

import argparse
import asyncio
import ipaddress
import itertools
import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from asp import trust
from asp.contract import Contract
from asp.errors import quoted
from asp.probe.listening import HostListeners
from asp.probe.probing import DEFAULT_WAIT_S, MAX_WAIT_S, probe
from asp.probe.report import Report, Verdict
from asp.probe.targets import Address, Target, of_host, parse
from asp.terminal import printable

if TYPE_CHECKING:
    from asp.stdio import Parser

EXIT_NOT_BLOCKED = 1
_INET6_NAMES = Path("/proc/net/if_inet6")
_FIB_TRIE = Path("/proc/net/fib_trie")


def add_to(commands: "argparse._SubParsersAction[Parser]") -> None:  # pyright: ignore[reportPrivateUsage]
    """Register the subcommand."""
    parser = commands.add_parser(
        "probe", help="try to get out of the sandbox, and say what was reached",
        description="Try to reach other machines, this one, name servers, metadata, engines and the kernel from inside. A kind "
        "of check counts as blocked only if the probe has shown in the same sandbox that it works. Needs sh in the sandbox, "
        "nothing else. Run it before the agent: a sandbox that an agent has used may lie.",
        epilog="exit status: 0 all is blocked; 1 something was reached, or is not proven; 2 configuration; 4 sandbox not reached",
    )  # fmt: skip
    parser.add_argument(
        "--target", action="append", default=[], metavar="KIND:ADDR",
        help="also try this; say it only if somebody listens there: tcp:ADDR:PORT, udp:ADDR:PORT, dns:ADDR[:PORT], icmp:ADDR, "
        "abstract:NAME, unix:PATH",
    )  # fmt: skip
    parser.add_argument("--only-targets", action="store_true", help="of addresses, try only those that --target names")
    parser.add_argument(
        "--listen", action="store_true",
        help="meanwhile listen on every address of this machine, try to reach that from inside, and say what came",
    )  # fmt: skip
    parser.add_argument(
        "--wait", type=_wait, default=DEFAULT_WAIT_S, metavar="S", help="seconds to wait for answers (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line: every check, its evidence, the controls")
    parser.add_argument("--contract", metavar="FILE", help="use this contract; naming it is trusting it")
    parser.add_argument("--allow-same-host", action="store_true", help="the sandbox may be this machine")
    parser.set_defaults(run=cmd_probe)


def _wait(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_WAIT_S:
        msg = f"{quoted(text)} is not a number of seconds above 0, at most {MAX_WAIT_S:g}"
        raise argparse.ArgumentTypeError(msg)
    return value


def cmd_probe(args: argparse.Namespace) -> int:
    """Probe, print, and say by the exit status whether all is blocked."""
    targets = [parse(text) for text in args.target]
    trusted = trust.resolve(args.contract, Path())
    if not args.only_targets:
        targets += this_host(trusted.contract)

    async def run() -> Report:
        from asp.ssh import open_transport  # noqa: PLC0415 - asyncssh takes a third of a second to import

        async with (
            open_transport(trusted, allow_same_host=args.allow_same_host) as transport,
            HostListeners(host_addresses() if args.listen else ()) as listeners,
        ):
            report = await probe(transport, [*targets, *listeners.targets], found=not args.only_targets, wait_s=args.wait)
            return await listeners.judged(report)

    report = asyncio.run(run())
    print(json.dumps(report.as_json()) if args.json else shown(report))
    if not args.json:
        print(_summary(report), file=sys.stderr)
    return 0 if report.blocked else EXIT_NOT_BLOCKED


def shown(report: Report) -> str:
    """Return the report for a person: what was reached first, then what is not proven, then what is blocked by kind."""
    lines = [printable(str(check), newlines=False) for verdict in (Verdict.REACHED, Verdict.NOT_PROVEN)
             for check in report.with_verdict(verdict)]  # fmt: skip
    by_kind: dict[str, list[str]] = {}
    for check in report.with_verdict(Verdict.BLOCKED):
        by_kind.setdefault(check.kind, []).append(check.error or check.outcome.value)
    for kind, causes in by_kind.items():
        counted = ", ".join(f"{causes.count(cause)} {cause}" for cause in dict.fromkeys(causes))
        lines.append(f"{Verdict.BLOCKED.value:<10}  {kind}: {counted}")
    return "\n".join(lines)


def _summary(report: Report) -> str:
    counts = ", ".join(f"{len(report.with_verdict(verdict))} {verdict.value}" for verdict in Verdict)
    return f"asp: {'all is blocked' if report.blocked else 'not blocked'} ({counts})"


def this_host(contract: Contract) -> list[Target]:
    """Return this machine's own addresses as targets, if the sandbox is on it: its endpoint is on the loopback."""
    try:
        if not ipaddress.ip_address(contract.host).is_loopback:
            return []
    except ValueError:
        if contract.host != "localhost":
            return []
    return of_host(host_addresses())


def host_addresses() -> list[Address]:
    """Return the addresses of this machine: from /proc where there is one, else what its own name resolves to."""
    found: dict[Address, None] = {}
    try:
        lines = _FIB_TRIE.read_text(encoding="ascii").splitlines()
        for before, line in itertools.pairwise(lines):
            if "host LOCAL" in line:
                found[ipaddress.ip_address(before.split()[-1])] = None
        for line in _INET6_NAMES.read_text(encoding="ascii").splitlines():
            found[ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))] = None
    except (OSError, ValueError):
        try:
            names = socket.getaddrinfo(socket.gethostname(), None)
        except OSError:
            names = []
        found |= {ipaddress.ip_address(str(one[4][0]).partition("%")[0]): None for one in names}
    return list(found)
