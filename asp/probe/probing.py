"""Probe a sandbox over any transport: run the programs, and say what their answers mean."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from asp.errors import UsageError
from asp.probe.attempts import Attempt, Happened, SelfControl, attempt, self_controls, timespec
from asp.probe.kernel import HELD, WAYS, SocketCheck, held_sockets
from asp.probe.program import MACHINES, Answer, Cell, Machine, Program, Returned, script
from asp.probe.report import Check, Control, Evidence, Outcome, Report, Verdict
from asp.probe.targets import MAX_TARGETS, Origin, Surroundings, Target, defaults, parse
from asp.transport import ExecResult, Transport

DEFAULT_WAIT_S: Final = 3.0
MAX_WAIT_S: Final = 60.0
_EXTRA_S = 60.0
_CONTROL_WAIT_S = 10.0
_KEEP_BYTES = 1 << 20
_NO_FOLDER, _NOT_RUN, _KILLED_BY_FILTER = 125, 126, 128 + 31
_KILLED = "a filter killed the program (SIGSYS) before it could tell anything"
_AT_CWD = -100
_SHOWN_BYTES = 40
_AT_ONCE = 100  # a program of so many targets fits into its memory, and two sockets each into most limits

# The shell alone: the machine from uname, or what /proc/cpuinfo says; then the sockets that its processes hold.
_LOOK: Final = (
    "m=$(uname -m 2>/dev/null || busybox uname -m 2>/dev/null || /bin/busybox uname -m 2>/dev/null)\n"
    '[ -n "$m" ] || while read -r a b; do case "$a $b" in vendor_id*) m=x86_64; break;; "CPU implementer"*) m=aarch64; break;;'
    " esac; done 2>/dev/null </proc/cpuinfo\n"
    'printf "%s\\n" "$m"\n'
    '[ -d /proc/self ] || printf "%s\\n" no-proc\n'
    'for f in /proc/[0-9]*/fd/*; do [ -S "$f" ] && printf "%s\\n" "$f"; done\n'
    "exit 0\n"
)
_TEXTS: Final = {
    "route": ("/proc/net/route", 16384), "arp": ("/proc/net/arp", 16384), "if_inet6": ("/proc/net/if_inet6", 8192),
    "dev": ("/proc/net/dev", 16384), "resolv": ("/etc/resolv.conf", 4096), "unix": ("/proc/net/unix", 131072),
    "version": ("/proc/version", 4096),
}  # fmt: skip
_SMALL_READ = 4096  # /proc/net answers a read with at most a page or so


async def probe(
    transport: Transport, targets: Sequence[Target] = (), *, found: bool = True, wait_s: float = DEFAULT_WAIT_S,
) -> Report:  # fmt: skip
    """Try to get out of a sandbox, and report what was reached.

    ``targets`` are what the caller knows to listen. With ``found`` also what the sandbox shows (gateways, name servers,
    neighbours, abstract sockets) and what a block must hold against everywhere. ``wait_s``: how long answers are waited for,
    in seconds, for all targets together. The sandbox needs sh, printf and chmod, and a folder that programs may run from;
    without them nothing is proven.

    Run it before anybody else uses the sandbox: a shell that lies makes a probe that lies (S7).
    Raises TransportError, UsageError (too many targets).
    """
    wanted = [*targets, *(defaults() if found else ())]
    if len(wanted) > MAX_TARGETS:
        msg = f"{len(wanted)} targets are too many; at most {MAX_TARGETS} at a time"
        raise UsageError(msg)
    looked = await transport.exec(_LOOK, timeout_s=_EXTRA_S, keep_bytes=_KEEP_BYTES)
    name, _, listing = looked.stdout.partition(b"\n")
    name = b"aarch64" if name == b"arm64" else b"x86_64" if name == b"amd64" else name
    machine = next((one for one in MACHINES if one.name.encode() == name.strip()), None)
    if machine is None:
        said = name[:_SHOWN_BYTES].decode("ascii", "backslashreplace") or "nothing known"
        return _nothing_proven(None, wanted, f"there is no program for this machine ({said})")
    runner = _Runner(transport, machine)
    shown = await runner.look_around()
    if found:
        wanted += shown.targets()
        wanted += [Target("abstract", name=name, origin=Origin.FOUND) for name in shown.abstract_listeners()]
    wanted = list(dict.fromkeys(wanted))
    left_out = wanted[MAX_TARGETS:]
    wanted = wanted[:MAX_TARGETS]
    controls: list[Control] = []
    checks: list[Check] = []
    for first in range(0, max(1, len(wanted)), _AT_ONCE):
        controls, judged = await runner.try_sockets(wanted[first : first + _AT_ONCE], wait_s)
        checks += judged
    if runner.why_not is not None:
        return _nothing_proven(machine.name, wanted, runner.why_not)
    checks += [_not_tried(target, f"more than {MAX_TARGETS} targets") for target in left_out]
    if found and not shown.dev:
        why = "/proc/net cannot be read, so gateways, neighbours and abstract names are not known"
        checks.append(Check("found", "/proc/net", Verdict.NOT_PROVEN, Outcome.NOT_TRIED, Evidence.NONE, why, "found"))
    ways = await runner.try_ways(gvisor=shown.is_gvisor)
    held_control, held = await runner.try_held_sockets(listing)
    return Report(
        machine.name, tuple(shown.interfaces), (*controls, held_control), (*checks, *ways, *held),
    )  # fmt: skip


def _not_tried(target: Target, why: str) -> Check:
    kind = "dns" if target.kind == "dns" else target.control
    return Check(kind, str(target), Verdict.NOT_PROVEN, Outcome.NOT_TRIED, Evidence.NONE, why, target.origin.value)


def _nothing_proven(machine: str | None, wanted: Sequence[Target], why: str) -> Report:
    checks = [_not_tried(target, why) for target in wanted]
    others = [(way.kind, way.target, "default") for way in WAYS] + [("inherited", HELD, "found")]
    checks += [
        Check(kind, target, Verdict.NOT_PROVEN, Outcome.NOT_TRIED, Evidence.NONE, why, origin) for kind, target, origin in others
    ]
    return Report(machine, checks=tuple(checks))


class _Runner:
    """Runs programs in one sandbox. ``why_not`` is set once none could be run."""

    def __init__(self, transport: Transport, machine: Machine) -> None:
        self._transport = transport
        self._machine = machine
        self._script = script(machine)
        self.why_not: str | None = None

    async def _run(self, program: Program, wait_s: float = 0.0) -> tuple[Answer | None, bool]:
        """Run a program; return its answer, and whether a filter killed it."""
        done = await self._transport.exec(
            self._script, stdin=program.image(), timeout_s=wait_s + _EXTRA_S, keep_bytes=_KEEP_BYTES,
        )  # fmt: skip
        answer = program.answer(done.stdout) if done.status == 0 else None
        if answer is None and done.status != _KILLED_BY_FILTER:
            self.why_not = _why_not(done)
        return answer, done.status == _KILLED_BY_FILTER

    async def look_around(self) -> Surroundings:
        """Read what the sandbox shows of its network."""
        program = Program(self._machine)
        pieces: dict[str, list[tuple[Cell, int]]] = {}
        for name, (path, size) in _TEXTS.items():
            file = program.call("openat", _AT_CWD, program.data(path.encode() + b"\0"), 0)
            pieces[name] = []
            with program.only_after(file):
                for _ in range(size // _SMALL_READ):
                    cell = program.space(_SMALL_READ)
                    pieces[name].append((cell, program.call("read", Returned(file), cell, _SMALL_READ)))
        answer, _ = await self._run(program)
        if answer is None:
            self.why_not = self.why_not or _KILLED
            return Surroundings()
        return Surroundings(
            **{name: b"".join(answer.read_into(cell, call) for cell, call in reads) for name, reads in pieces.items()},
        )

    async def try_sockets(self, targets: Sequence[Target], wait_s: float) -> tuple[list[Control], list[Check]]:
        """Run the controls and all targets, in one program."""
        program = Program(self._machine)
        limit = program.data(timespec(_CONTROL_WAIT_S))
        mine = self_controls(secrets.token_hex(6).encode())
        for control in mine:
            control.add(program, limit)
        pings = {kind: attempt(parse(target)) for kind, target in (("icmp", "icmp:127.0.0.1"), ("icmp6", "icmp:[::1]"))}
        for one in pings.values():
            one.start(program)
            one.finish(program, limit)
        limit = program.data(timespec(wait_s))
        attempts = [attempt(target) for target in targets]
        for one in attempts:
            one.start(program)
        for one in attempts:
            one.finish(program, limit)
        answer, _ = await self._run(program, wait_s + 2 * _CONTROL_WAIT_S)
        if answer is None:
            self.why_not = self.why_not or _KILLED
            return [], []
        controls = _controls(answer, mine, pings)
        return list(controls.values()), [
            _judge(target, one.happened(answer), controls[target.control]) for target, one in zip(targets, attempts, strict=True)
        ]

    async def try_ways(self, *, gvisor: bool) -> list[Check]:
        """Try each way out that is not an address, in a program of its own; one at a time, as some kernels need [ran: gVisor]."""
        checks: list[Check] = []
        for way in WAYS:
            program, last = way.program(self._machine)
            answer, killed = await self._run(program)
            checks.append(way.check(None if answer is None else answer.result(last), killed=killed, gvisor=gvisor))
        return checks

    async def try_held_sockets(self, listing: bytes) -> tuple[Control, list[Check]]:
        """Look for sockets of another network namespace."""
        looking = SocketCheck(self._machine, held_sockets(listing), sees_others=b"no-proc" not in listing.splitlines())
        answer, killed = await self._run(looking.program)
        if answer is None:
            why = _KILLED if killed else self.why_not or "the program gave no answer"
            control = Control("inherited", worked=False, how=why)
            return control, [Check("inherited", HELD, Verdict.NOT_PROVEN, Outcome.NOT_TRIED, Evidence.NONE, why, "found")]
        control = looking.control(answer)
        return control, looking.checks(answer, control)


def _why_not(done: ExecResult) -> str:
    match done.status:
        case 0:
            return "what came back is not from the probe's program"
        case _ if done.status == _NO_FOLDER:
            return "no folder of the sandbox can be written to, so the probe's program could not be put there"
        case _ if done.status == _NOT_RUN:
            return "no folder of the sandbox lets the probe's program run (noexec, no chmod, or another architecture)"
        case status:
            return f"the probe's program ended with status {status}"


def _controls(answer: Answer, mine: Sequence[SelfControl], pings: dict[str, Attempt]) -> dict[str, Control]:
    """Return the controls by kind. What may not even be made is denied by name, which needs no listener to show."""
    found: dict[str, Control] = {}
    for control in mine:
        if control.kind not in found or not found[control.kind].worked:
            worked, denied = control.worked(answer), control.denied(answer)
            how = control.how if worked else f"no such socket may be made ({denied})" if denied else f"failed: {control.how}"
            found[control.kind] = Control(control.kind, worked or denied is not None, how)
    for kind, one in pings.items():
        happened = one.happened(answer)
        if happened.outcome is Outcome.REACHED:
            found[kind] = Control(kind, worked=True, how="the sandbox's own loopback answered")
        elif happened.outcome is Outcome.DENIED:
            found[kind] = Control(kind, worked=True, how=f"no such socket may be made ({happened.error})")
        elif kind == "icmp6" and happened.outcome is Outcome.UNREACHABLE and happened.at_once and found["icmp"].worked:
            found[kind] = Control(kind, worked=True, how=f"IPv6 is off here ({happened.error}); the same over IPv4 was answered")
        else:
            found[kind] = Control(kind, worked=False, how=f"the sandbox's own loopback: {happened.outcome.value}")
    return found


@dataclass(frozen=True, slots=True)
class _Meaning:
    verdict: Verdict
    evidence: Evidence
    why: str


def _judge(target: Target, happened: Happened, control: Control) -> Check:
    """Say what an outcome means: blocked only if the kernel or a known listener's silence says so, and the control worked."""
    meaning = _meaning(target, happened)
    if meaning.verdict is Verdict.BLOCKED and not control.worked:
        why = f"{meaning.why}; but the probe could not show that it would have got there ({control.how})"
        meaning = _Meaning(Verdict.NOT_PROVEN, Evidence.NONE, why)
    return Check(
        target.control if target.kind != "dns" else "dns", str(target), meaning.verdict, happened.outcome, meaning.evidence,
        meaning.why, target.origin.value, happened.error,
    )  # fmt: skip


def _meaning(target: Target, happened: Happened) -> _Meaning:
    strong, weak = Evidence.STRONG, Evidence.WEAK
    says = f"the sandbox's kernel says {happened.error}"
    match happened.outcome:
        case Outcome.REACHED if target.kind == "abstract" and target.origin is Origin.FOUND and happened.peer:
            return _Meaning(Verdict.BLOCKED, strong, "its listener is a process of this sandbox")
        case Outcome.REACHED:
            return _Meaning(Verdict.REACHED, strong, "it answered")
        case Outcome.DENIED | Outcome.ABSENT if happened.at_once:
            return _Meaning(Verdict.BLOCKED, strong, says)
        case Outcome.UNREACHABLE if happened.at_once:
            return _Meaning(Verdict.BLOCKED, strong, f"{says}, nothing was sent")
        case Outcome.REFUSED if target.is_own_loopback:
            return _Meaning(Verdict.BLOCKED, strong, "nothing listens there on the sandbox's own loopback")
        case Outcome.REFUSED:
            return _Meaning(Verdict.NOT_PROVEN, weak, "refused: packets get out and somebody answers for that address")
        case Outcome.TIMED_OUT | Outcome.UNREACHABLE if target.kind == "tcp" and target.origin is Origin.GIVEN:
            return _Meaning(Verdict.BLOCKED, weak, "no answer, though you say that somebody listens")
        case Outcome.TIMED_OUT | Outcome.UNREACHABLE | Outcome.DENIED:
            return _Meaning(Verdict.NOT_PROVEN, weak, "a packet was sent and not answered; ask the listener whether it came")
        case _:
            return _Meaning(Verdict.NOT_PROVEN, Evidence.NONE, f"{says}, which decides nothing")
