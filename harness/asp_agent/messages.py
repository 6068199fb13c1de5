"""The records that the loop, the models and the history share. Neutral between providers; no I/O."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypeAlias


class Stop(Enum):
    """Why a model ended its turn, the same for every provider. Only TOOL_CALLS lets tools run (L2)."""

    DONE = "done"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    REFUSAL = "refusal"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. ``input_tokens`` counts all input, also what came from or went to the cache; None is unknown."""

    input_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it. ``raw_arguments`` is its exact text; it is parsed strictly and later (see tools)."""

    id: str
    name: str
    raw_arguments: str


@dataclass(frozen=True, slots=True)
class Image:
    """A picture as a model takes it: ``media_type`` such as ``image/png``, and the file's bytes."""

    media_type: str
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The exact text that the model is given for one call, and the pictures that go with it."""

    tool_call_id: str
    name: str
    content: str
    is_error: bool = False
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What the user side says: the results of the previous turn's calls, in call order, then text."""

    text: str = ""
    results: tuple[ToolResult, ...] = ()


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """One complete turn of the model (its terminal event was seen).

    ``native`` holds the provider's own content items, replayed untouched to the same (provider, api, model) only.
    """

    text: str
    tool_calls: tuple[ToolCall, ...]
    stop: Stop
    usage: Usage
    source: tuple[str, str, str]
    native: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    stop_detail: str = ""


Turn: TypeAlias = UserTurn | AssistantTurn


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """What a model is told of a tool: ``parameters`` is a JSON Schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a model."""

    system: str
    history: Sequence[Turn]
    tools: Sequence[ToolSchema]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer as it streams. Only for display: a turn counts when TurnDone arrives."""

    text: str


@dataclass(frozen=True, slots=True)
class Retrying:
    """The request failed and is tried again after ``wait_s`` seconds. What streamed before does not count."""

    reason: str
    wait_s: float
    attempt: int


@dataclass(frozen=True, slots=True)
class TurnDone:
    """The terminal event: the whole turn."""

    turn: AssistantTurn


ModelEvent: TypeAlias = TextDelta | Retrying | TurnDone


class Model(Protocol):
    """One model behind one API."""

    @property
    def name(self) -> str:
        """``provider/model`` as the user named it."""
        ...

    @property
    def scripted(self) -> bool:
        """True if no model is called at all: the turns come from a file, and the output says so."""
        ...

    def secrets(self) -> Sequence[str]:
        """Values that must never be shown, logged or sent to the sandbox (keys). May be empty."""
        ...

    def stream(self, request: Request) -> AsyncGenerator[ModelEvent, None]:
        """Ask, and yield events; the last one is TurnDone. Retries inside, visibly (Retrying). Cancellable at any await.

        Raises ModelSetupError (2: no key, unknown model, SDK not installed), ModelRefused (1: the API says no, or
        the script is over), ModelUnavailable (4: still failing after the last try).
        """
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...
