"""What a probe found: one check a line, and one verdict."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Verdict(Enum):
    """What a check means."""

    REACHED = "reached"
    BLOCKED = "blocked"
    NOT_PROVEN = "not proven"


class Outcome(Enum):
    """What happened."""

    REACHED = "reached"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    DENIED = "denied"
    ABSENT = "absent"
    TIMED_OUT = "timed out"
    NOT_TRIED = "not tried"


class Evidence(Enum):
    """How much it proves: the kernel said so; only silence; nothing."""

    STRONG = "strong"
    WEAK = "weak"
    NONE = "none"


# The numbers of Linux on both architectures: the sandbox is one, the machine that reads this need not be.
_ERRORS = {
    1: "EPERM", 2: "ENOENT", 3: "ESRCH",
    9: "EBADF", 11: "EAGAIN", 13: "EACCES", 19: "ENODEV", 20: "ENOTDIR", 22: "EINVAL", 28: "ENOSPC", 30: "EROFS",
    38: "ENOSYS", 91: "EPROTOTYPE",
    92: "ENOPROTOOPT", 93: "EPROTONOSUPPORT", 94: "ESOCKTNOSUPPORT", 95: "EOPNOTSUPP", 97: "EAFNOSUPPORT",
    98: "EADDRINUSE", 99: "EADDRNOTAVAIL", 100: "ENETDOWN", 101: "ENETUNREACH", 104: "ECONNRESET", 110: "ETIMEDOUT",
    111: "ECONNREFUSED", 113: "EHOSTUNREACH", 115: "EINPROGRESS",
}  # fmt: skip
UNREACHABLE = frozenset({"ENETUNREACH", "EHOSTUNREACH", "ENETDOWN", "EADDRNOTAVAIL", "ENODEV"})
DENIED = frozenset({
    "EPERM", "EACCES", "ENOSYS", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "EOPNOTSUPP", "ENOSPC", "EROFS", "SIGSYS",
})  # fmt: skip
ABSENT = frozenset({"ENOENT", "ENOTDIR"})


def error_name(number: int) -> str:
    """Return the name of a Linux error number."""
    return _ERRORS.get(number, f"error {number}")


@dataclass(frozen=True, slots=True)
class Check:
    """One attempt. ``error``: the kernel's name for why it failed; ``why``: one sentence."""

    kind: str
    target: str
    verdict: Verdict
    outcome: Outcome
    evidence: Evidence
    why: str
    origin: str = "default"
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {
            "kind": self.kind, "target": self.target, "origin": self.origin, "verdict": self.verdict.value,
            "outcome": self.outcome.value, "evidence": self.evidence.value, "error": self.error, "why": self.why,
        }  # fmt: skip

    def __str__(self) -> str:
        """Return it as one line for a person; names in it may be foreign, so show it through asp.terminal."""
        return f"{self.verdict.value:<10}  {self.target}: {self.why}"


@dataclass(frozen=True, slots=True)
class Control:
    """Whether the probe could do in the sandbox what a kind of check needs, where nothing forbids it."""

    kind: str
    worked: bool
    how: str


@dataclass(frozen=True, slots=True)
class Report:
    """All checks, and the controls that give them their meaning."""

    machine: str | None
    interfaces: tuple[str, ...] = ()
    controls: tuple[Control, ...] = ()
    checks: tuple[Check, ...] = field(default=())

    @property
    def blocked(self) -> bool:
        """Whether every check is blocked, and there was at least one."""
        return bool(self.checks) and all(check.verdict is Verdict.BLOCKED for check in self.checks)

    def with_verdict(self, verdict: Verdict) -> list[Check]:
        """Return the checks with one verdict."""
        return [check for check in self.checks if check.verdict is verdict]

    def as_json(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {
            "type": "result", "version": 1, "blocked": self.blocked, "machine": self.machine,
            "interfaces": list(self.interfaces),
            "controls": {control.kind: {"worked": control.worked, "how": control.how} for control in self.controls},
            "counts": {verdict.value: len(self.with_verdict(verdict)) for verdict in Verdict},
            "checks": [check.as_json() for check in self.checks],
        }  # fmt: skip
