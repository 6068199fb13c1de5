"""The one question between the loop and a tool: may this action be taken (L4)? The default policy allows all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias


class Verdict(Enum):
    """What a policy says of an action."""

    ALLOW = "allow"
    WARN = "warn"
    REQUIRE_APPROVAL = "require_approval"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Action:
    """One tool call with checked arguments, before it runs."""

    tool: str
    tool_call_id: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict, and why. The model is told ``reason`` when the action is not taken."""

    verdict: Verdict
    reason: str = ""

    @property
    def runs(self) -> bool:
        """Whether the action is taken. Nobody can approve within a run, so what needs approval is not (never wait)."""
        return self.verdict in {Verdict.ALLOW, Verdict.WARN}


Decide: TypeAlias = Callable[[Action], Decision]
"""A policy: a pure function of the action, so that the same action gives the same decision when it is asked again."""


def allow_all(action: Action) -> Decision:  # noqa: ARG001 - a policy is given the action
    """Allow every action: the sandbox is the boundary, not this."""
    return Decision(Verdict.ALLOW)


def refusal(decision: Decision) -> str:
    """Return what the model is told of an action that was not taken."""
    why = (
        "it needs an approval that nobody can give during this run"
        if decision.verdict is Verdict.REQUIRE_APPROVAL
        else "it is not allowed"
    )
    return f"This was not run: {why}." + (f" Reason: {decision.reason}" if decision.reason else "")
