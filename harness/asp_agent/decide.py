"""The one question between the loop and a tool: may this action be taken (L4)? The default policy allows all."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias


class Verdict(Enum):
    """What a policy says of an action, from the mildest to the strictest."""

    ALLOW = "allow"
    WARN = "warn"
    REQUIRE_APPROVAL = "require_approval"
    BLOCK = "block"

    @property
    def strictness(self) -> int:
        """0 for allow to 3 for block."""
        return list(Verdict).index(self)


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
        """Whether the action is taken without asking anybody."""
        return self.verdict in {Verdict.ALLOW, Verdict.WARN}


Decide: TypeAlias = Callable[[Action], Awaitable[Decision]]
"""A policy. It may look at the sandbox (where does a path lead?), so it is awaited; it never raises but AspError."""

Approve: TypeAlias = Callable[[Action, Decision], Awaitable[bool]]
"""Asks a person whether an action that needs an approval is taken. Without one it is not."""


async def allow_all(action: Action) -> Decision:  # noqa: ARG001 - a policy is given the action, and awaited
    """Allow every action: the sandbox is the boundary, not this."""
    return Decision(Verdict.ALLOW)


async def nobody_approves(action: Action, decision: Decision) -> bool:  # noqa: ARG001 - it answers without looking
    """Approve nothing: there is no terminal to ask on, and a run never waits for somebody who is not there."""
    return False


def refusal(decision: Decision, *, asked: bool = False) -> str:
    """Return what the model is told of an action that was not taken; ``asked`` if a person said no."""
    why = "it is not allowed"
    if decision.verdict is Verdict.REQUIRE_APPROVAL:
        why = "the user was asked and said no" if asked else "it needs an approval that nobody can give during this run"
    return f"This was not run: {why}." + (f" Reason: {decision.reason}" if decision.reason else "")


async def permission(
    action: Action, decide: Decide, approve: Approve, record: Callable[..., None], warn: Callable[[str], None]
) -> str:
    """Return "" if the action is taken, else what the model is told. ``record`` writes events, ``warn`` shows a line.

    Raises what ``decide`` raises: AspError, when the sandbox could not be asked. Then the action is not taken.
    """
    decision = await decide(action)
    record("security_decision", tool_call_id=action.tool_call_id, verdict=decision.verdict.value, reason=decision.reason)
    if decision.verdict is Verdict.WARN:
        warn(f"warning: {decision.reason}")
    if decision.runs:
        return ""
    if decision.verdict is not Verdict.REQUIRE_APPROVAL:
        return refusal(decision)
    record("approval_requested", tool_call_id=action.tool_call_id, reason=decision.reason)
    if approve is nobody_approves:
        return refusal(decision)
    approved = await approve(action, decision)
    record("approval_answered", tool_call_id=action.tool_call_id, approved=approved)
    return "" if approved else refusal(decision, asked=True)
