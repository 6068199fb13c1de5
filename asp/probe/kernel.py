"""Ways out that are not an address.

Socket families without namespaces, io_uring, new namespaces, the kernel's own files, and sockets of another network
namespace that a process inside holds.

Each way is a program of its own, since a filter may kill the process that tries. Nothing is changed: sockets are made and not
connected, files are opened and not written, a namespace that could be made ends with the program.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from asp.probe.program import Answer, Cell, Machine, Program, Returned
from asp.probe.report import ABSENT, DENIED, Check, Control, Evidence, Outcome, Verdict, error_name

_STREAM, _DGRAM, _RAW, _SEQPACKET = 1, 2, 3, 5
_AT_CWD, _WRITE_ONLY = -100, 1
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SOL_SOCKET, _SO_DOMAIN, _SO_NETNS_COOKIE = 1, 39, 71
_UNIX = 1
_INHERITED = range(32)
MAX_SOCKETS = 500
HELD = "sockets held inside"

KERNEL_FILES = (
    "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/vm/drop_caches",
    "/proc/sys/fs/binfmt_misc/register", "/sys/kernel/uevent_helper", "/dev/mem",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """One way out: the last of ``calls`` must fail. A text argument is put into the program's memory."""

    kind: str
    target: str
    calls: tuple[tuple[str, ...] | tuple[str | int, ...], ...]

    def program(self, machine: Machine) -> tuple[Program, int]:
        """Return the program, and which of its calls decides. A descriptor that the first call returns goes to the second."""
        program = Program(machine)
        last = -1
        for name, *arguments in self.calls:
            words: list[int | Cell | Returned] = [
                program.data(argument.encode() + b"\0") if isinstance(argument, str) else argument for argument in arguments
            ]
            if last >= 0:
                words[0] = Returned(last)
            last = program.call(str(name), *words)
        return program, last

    def check(self, result: int | None, *, killed: bool, gvisor: bool = False) -> Check:
        """Say what the deciding call's result means; ``killed``: the filter ended the process (SIGSYS)."""
        error = "SIGSYS" if killed else None if result is None or result >= 0 else error_name(-result)
        if killed or error in DENIED:
            return Check(
                self.kind, self.target, Verdict.BLOCKED, Outcome.DENIED, Evidence.STRONG, f"the kernel says {error}", error=error,
            )  # fmt: skip
        if error in ABSENT | {"ENODEV", "EBADF"} and self.kind in {"kernel", "vsock"}:
            return Check(
                self.kind, self.target, Verdict.BLOCKED, Outcome.ABSENT, Evidence.STRONG, f"not there ({error})", error=error,
            )  # fmt: skip
        if result is not None and result >= 0 and gvisor and self.kind in {"io_uring", "namespace"}:
            return Check(
                self.kind, self.target, Verdict.BLOCKED, Outcome.DENIED, Evidence.WEAK, "allowed, in gVisor's own kernel only",
            )  # fmt: skip
        if result is not None and result >= 0:
            return Check(
                self.kind, self.target, Verdict.REACHED, Outcome.REACHED, Evidence.STRONG, "the kernel allows it to this process",
            )  # fmt: skip
        why = "the program gave no answer" if error is None else f"the kernel says {error}, which decides nothing"
        return Check(self.kind, self.target, Verdict.NOT_PROVEN, Outcome.NOT_TRIED, Evidence.NONE, why, error=error)


WAYS: tuple[Way, ...] = (
    Way("vsock", "AF_VSOCK stream", (("socket", 40, _STREAM, 0),)),
    Way("vsock", "AF_VSOCK datagram", (("socket", 40, _DGRAM, 0),)),
    Way("packet", "AF_PACKET raw", (("socket", 17, _RAW, 0x0300),)),
    Way("family", "AF_BLUETOOTH", (("socket", 31, _SEQPACKET, 0),)),
    Way("family", "AF_NFC", (("socket", 39, _SEQPACKET, 0),)),
    Way("family", "AF_QIPCRTR", (("socket", 42, _DGRAM, 0),)),
    Way("io_uring", "io_uring_setup", (("io_uring_setup", 1, "\0" * 120),)),
    Way("namespace", "a new user namespace", (("unshare", _CLONE_NEWUSER),)),
    Way("namespace", "a new network namespace", (("unshare", _CLONE_NEWNET),)),
    Way(
        "namespace", "joining the network of process 1",
        (("openat", _AT_CWD, "/proc/1/ns/net", 0), ("setns", 0, _CLONE_NEWNET)),
    ),
    *(Way("kernel", f"writing {path}", (("openat", _AT_CWD, path, _WRITE_ONLY),)) for path in KERNEL_FILES),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeldSocket:
    """A socket that a process inside holds: its number there."""

    pid: int
    descriptor: int


def held_sockets(listing: bytes) -> list[HeldSocket]:
    """Read lines like ``/proc/12/fd/3``; others are skipped."""
    matches = map(re.compile(rb"/proc/([0-9]{1,9})/fd/([0-9]{1,9})").fullmatch, listing.splitlines())
    return [HeldSocket(int(match[1]), int(match[2])) for match in matches if match is not None]


class SocketCheck:
    """Whether a socket that is inside belongs to another network namespace: with one, a process leaves the block.

    A socket keeps the namespace that it was made in; connected anew, it connects from there. The program takes copies as any
    process of the same user can (pidfd_getfd) and asks for their namespace; it does not use them.
    """

    def __init__(self, machine: Machine, held: Sequence[HeldSocket], *, sees_others: bool = True) -> None:
        """Take what was listed in /proc, if there is one; the program looks at what it inherits itself besides."""
        self._sees_others = sees_others
        self.program = Program(machine)
        self._made = self.program.call("socket", _UNIX, _STREAM, 0)
        own = Returned(self._made)
        self._own = self._ask(own)
        pid = self.program.call("getpid")
        self._myself = self.program.call("pidfd_open", Returned(pid), 0)
        self._taken = self.program.call("pidfd_getfd", Returned(self._myself), own, 0)
        self._asked = [(f"inherited descriptor {number}", self._ask(number)) for number in _INHERITED]
        self._left_out = max(0, len(held) - MAX_SOCKETS)
        for socket in held[:MAX_SOCKETS]:
            process = self.program.call("pidfd_open", socket.pid, 0)
            with self.program.only_after(process):
                copy = self.program.call("pidfd_getfd", Returned(process), socket.descriptor, 0)
                with self.program.only_after(copy):
                    asked = self._ask(Returned(copy))
                    self.program.call("close", Returned(copy))
                self.program.call("close", Returned(process))
            self._asked.append((f"descriptor {socket.descriptor} of process {socket.pid}", asked))

    def _ask(self, descriptor: int | Returned) -> tuple[Cell, Cell, int]:
        """Ask for family and namespace of a socket."""
        domain, cookie = self.program.data(struct.pack("<i", -1)), self.program.space(8)
        size, cookie_size = self.program.data(struct.pack("<i", 4)), self.program.data(struct.pack("<i", 8))
        self.program.call("getsockopt", descriptor, _SOL_SOCKET, _SO_DOMAIN, domain, size)
        asked = self.program.call("getsockopt", descriptor, _SOL_SOCKET, _SO_NETNS_COOKIE, cookie, cookie_size)
        return domain, cookie, asked

    def control(self, answer: Answer) -> Control:
        """Say whether a copy of a socket could be taken and its namespace told."""
        if not self._sees_others:
            return Control("inherited", worked=False, how="/proc is not there to show what other processes hold")
        if answer.integer(self._own[0]) != _UNIX:
            return Control("inherited", worked=False, how="the kernel does not tell a socket's family")
        if answer.ok(self._taken):
            return Control("inherited", worked=True, how="a copy of a socket of its own was taken and told from others")
        failed = self._taken if answer.ok(self._myself) else self._myself
        error = error_name(-(answer.result(failed) or 0))
        return Control("inherited", worked=error in DENIED, how=f"no process may take another's sockets here ({error})")

    def checks(self, answer: Answer, control: Control) -> list[Check]:
        """Return one check for each socket of another namespace, or one for all that were looked at."""
        found: list[Check] = []
        told, own = answer.ok(self._own[2]), answer.memory(self._own[1])
        mine = {f"inherited descriptor {answer.result(call)}" for call in (self._made, self._myself, self._taken)}
        for target, (domain, cookie, asked) in self._asked:
            family = answer.integer(domain)
            if family in {-1, _UNIX} or target in mine:
                continue  # gone, no socket, or one that connects by file system and not by network
            if not told:
                why = f"a socket (family {family}), and the kernel does not tell its network namespace"
                found.append(Check("inherited", target, Verdict.NOT_PROVEN, Outcome.NOT_TRIED, Evidence.NONE, why, "found"))
            elif not answer.ok(asked) or answer.memory(cookie) != own:
                why = f"a socket of another network namespace (family {family}): connected anew, it leaves the block"
                found.append(Check("inherited", target, Verdict.REACHED, Outcome.REACHED, Evidence.STRONG, why, "found"))
        if self._left_out:
            why = f"{self._left_out} sockets more than the {MAX_SOCKETS} that are looked at"
            found.append(Check("inherited", HELD, Verdict.NOT_PROVEN, Outcome.NOT_TRIED, Evidence.NONE, why, "found"))
        if found:
            return found
        if not control.worked:
            return [
                Check("inherited", HELD, Verdict.NOT_PROVEN, Outcome.NOT_TRIED, Evidence.NONE, control.how, "found"),
            ]
        why = f"{len(self._asked)} descriptors looked at, none of another network namespace"
        return [Check("inherited", HELD, Verdict.BLOCKED, Outcome.ABSENT, Evidence.STRONG, why, "found")]
