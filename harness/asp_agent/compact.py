"""Make a conversation shorter when it no longer fits: the model writes a summary, and the last turns stay as they are.

The cut is always before a turn of the model, so that no call is parted from its result (P80). One attempt for each
overflow; a conversation that does not fit after it ends the run (facts/models.md 3, row 10: others loop for ever).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from asp_agent.messages import AssistantTurn, ToolResult, Turn, UserTurn

FULL_AT = 0.85
"""The part of the context window above which the conversation is made shorter before the next request."""

KEEP_PART = 0.25
"""The part of the window that the turns which stay may take."""

CHARACTERS_PER_TOKEN = 3
"""A cautious guess; what a conversation really takes is what the API says."""

UNKNOWN_WINDOW_TOKENS = 100_000
"""Assumed for how much may stay when the window is not known and the API said that it is full."""

SHORT_RESULT_CHARACTERS = 2000
"""To this length tool results are cut for the summary, since the whole did not fit."""

ASK = (
    "The conversation has become too long. Write a summary with which you can go on without it: the task and every "
    "wish of the user, word for word where it matters; what was found out; which files were read and changed, and how; "
    "what has been checked and with what result; what is still to be done, and the next step. No tool calls."
)
HEAD = "What came before was too long and is gone. This is your own summary of it:\n\n"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for the summary, and how many turns at the end stay."""

    question: tuple[Turn, ...]
    keep: int


def is_full(input_tokens: int | None, output_tokens: int | None, window: int | None) -> bool:
    """Whether the next request should not be made with the conversation as it is; never if something is not known."""
    if window is None or input_tokens is None:
        return False
    return input_tokens + (output_tokens or 0) > FULL_AT * window


def plan(turns: Sequence[Turn], window: int | None) -> Plan | None:
    """Return how to make ``turns`` shorter, None if nothing can be left out: then it is only one turn that is too long."""
    allowed = int(KEEP_PART * (window or UNKNOWN_WINDOW_TOKENS)) * CHARACTERS_PER_TOKEN
    if len(turns) <= 1:
        return None
    keep = size = 0
    for number, turn in enumerate(reversed(turns), 1):
        size += _size(turn)
        if size > allowed or len(turns) - number <= 1:  # the task alone is no conversation
            break
        if isinstance(turn, AssistantTurn):
            keep = number
    question = [_shortened(turn) for turn in turns]
    while question and isinstance(question[-1], AssistantTurn) and question[-1].tool_calls:
        question.pop()
    last = question[-1] if question else None
    if isinstance(last, UserTurn):  # two turns of the user in a row are not taken by every API
        question[-1] = replace(last, text=f"{last.text}\n\n{ASK}".strip())
    else:
        question.append(UserTurn(text=ASK))
    return Plan(tuple(question), keep)


def shortened(turns: Sequence[Turn], made: Plan, summary: str) -> list[Turn]:
    """Return the conversation with ``summary`` in the place of what is left out."""
    rest = list(turns[len(turns) - made.keep :]) if made.keep else []
    last = turns[-1]
    text = HEAD + summary.strip()
    if not rest and isinstance(last, UserTurn) and last.text:
        text += f"\n\n{last.text}"
    return [UserTurn(text=text), *rest]


def _size(turn: Turn) -> int:
    if isinstance(turn, UserTurn):
        return len(turn.text) + sum(len(result.content) for result in turn.results)
    return len(turn.text) + sum(len(call.raw_arguments) for call in turn.tool_calls)


def _shortened(turn: Turn) -> Turn:
    if isinstance(turn, AssistantTurn):
        return turn
    return replace(turn, results=tuple(_short(result) for result in turn.results))


def _short(result: ToolResult) -> ToolResult:
    if len(result.content) <= SHORT_RESULT_CHARACTERS:
        return replace(result, images=())
    return replace(result, content=result.content[:SHORT_RESULT_CHARACTERS] + "\n[cut]", images=())
