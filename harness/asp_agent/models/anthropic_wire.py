"""What the events and the request bodies of the Messages API mean. Pure: no SDK, no I/O; the driver does both.

An :class:`Answer` collects one turn exactly as it streams. :func:`messages` writes a history back: a turn of the same
provider, API and model goes back as the API's own blocks, unchanged and in order; any other is rebuilt from its text
and calls, since foreign thinking blocks make every later request fail (facts/models.md 1.5).
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

from asp.errors import quoted
from asp_agent.messages import AssistantTurn, Stop, ToolCall, Turn, Usage

_STOPS = {
    "end_turn": Stop.DONE,
    "stop_sequence": Stop.DONE,
    "tool_use": Stop.TOOL_CALLS,
    "max_tokens": Stop.LENGTH,
    "model_context_window_exceeded": Stop.CONTEXT_FULL,
    "pause_turn": Stop.PAUSED,
    "refusal": Stop.REFUSAL,
}
_REFUSED_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
# A CR at the end may be half of CR LF, so it waits for what follows.
DONE = "[DONE]"
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")
_MAX_DEPTH = 100
_ITEM_DEPTH = 10  # an item is checked as if it stood this deep, so that it fits into a request as well (4 levels down)


class BadStream(Exception):
    """The stream holds no whole, readable turn; the text says why. Worth another try, never a turn."""


class EventLines:
    """Server-sent events out of bytes that are cut anywhere; see the WHATWG's "event stream interpretation"."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[Mapping[str, Any]]:
        """Yield the data of each event that is now complete, with its name as ``type`` if it has no type of its own.

        Raises BadStream: not UTF-8, not JSON, not an object.
        """
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        for line in lines:
            name, _, value = _utf8(line).partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self._name = value
            elif name == "data":
                self._data.append(value)
            elif not line:
                data, event = "\n".join(self._data), self._name
                self._data, self._name = [], ""
                if data == DONE:  # how OpenAI's Chat API ends a stream
                    yield {"type": DONE}
                elif data:
                    yield {"type": event, **_event(data)}


class Answer:
    """What has arrived of one turn."""

    def __init__(self, source: tuple[str, str, str]) -> None:
        self.ended = False
        self._source = source
        self._blocks: dict[int, dict[str, Any]] = {}
        self._json: dict[int, list[str]] = {}
        self._unknown: set[int] = set()  # blocks that got a delta we cannot apply
        self._usage: dict[str, Any] = {}
        self._stop_reason: object = None
        self._stop_details: object = None

    def add(self, event: Mapping[str, Any]) -> str:
        """Apply one event and return the text it adds. Unknown events change nothing. Raises BadStream."""
        kind = event.get("type")
        if kind == "message_start":
            self._count(_mapping(event.get("message")).get("usage"))
        elif kind == "content_block_start":
            return self._start(_index(event), _mapping(event.get("content_block")))
        elif kind == "content_block_delta":
            return self._delta(_index(event), _mapping(event.get("delta")))
        elif kind == "message_delta":
            delta = _mapping(event.get("delta"))
            self._stop_reason = delta.get("stop_reason") or self._stop_reason
            self._stop_details = delta.get("stop_details") or self._stop_details
            self._count(event.get("usage"))
        elif kind == "message_stop":
            self.ended = True
        return ""

    def _start(self, index: int, block: Mapping[str, Any]) -> str:
        if index in self._blocks:
            _unreadable("a content block began twice")
        self._blocks[index] = dict(block)
        self._json[index] = []
        return _text(block.get("text", "")) if block.get("type") == "text" else ""

    def _delta(self, index: int, delta: Mapping[str, Any]) -> str:
        block = self._blocks.get(index)
        if block is None:
            _unreadable("a content block goes on that never began")
        kind = delta.get("type")
        if kind == "text_delta":
            piece = _text(delta.get("text"))
            block["text"] = _text(block.get("text", "")) + piece
            return piece if block.get("type") == "text" else ""
        if kind == "input_json_delta":
            self._json[index].append(_text(delta.get("partial_json")))
        elif kind == "thinking_delta":
            block["thinking"] = _text(block.get("thinking", "")) + _text(delta.get("thinking"))
        elif kind == "signature_delta":
            block["signature"] = _text(block.get("signature", "")) + _text(delta.get("signature"))
        elif kind == "citations_delta":
            block["citations"] = [*(block.get("citations") or []), delta.get("citation")]
        else:
            self._unknown.add(index)
        return ""

    def _count(self, usage: object) -> None:
        # Cumulative: what message_delta names overwrites what message_start said.
        if isinstance(usage, dict):
            self._usage.update({k: v for k, v in cast("dict[str, Any]", usage).items() if type(v) is int})

    def turn(self) -> AssistantTurn:
        """Return the whole turn. Raises BadStream if it has not ended, or cannot be what the model meant.

        Fail-safe readings (L2): tool calls under ``end_turn`` and every stop reason that is not known are a REFUSAL
        with ``stop_detail``: nothing runs, and the run does not pass for done. ``tool_use`` without a call lost a call.
        """
        reason, calls, details = self._stop_reason, self._calls(), self._stop_details
        ids = [call.id for call in calls]
        if not self.ended or not isinstance(reason, str):
            raise BadStream("the stream was cut before the end of the turn" if self._blocks else "no answer came")
        if not all(ids) or len(set(ids)) < len(ids):
            _unreadable("tool calls without an id of their own")
        if reason == "tool_use" and not calls:
            raise BadStream("the turn announced tool calls and holds none")
        stop, detail = _STOPS.get(reason, Stop.REFUSAL), ""
        if reason not in _STOPS:
            detail = f"unknown stop reason {quoted(reason)}"
        elif stop is Stop.DONE and calls:
            stop, detail = Stop.REFUSAL, f"the turn ended with {quoted(reason)} although it holds tool calls"
        elif stop is Stop.REFUSAL and isinstance(details, dict):
            given = cast("dict[str, Any]", details)
            parts = (given.get("category"), given.get("explanation"))
            detail = ": ".join(quoted(str(part)) for part in parts if part)
        text = "".join(_text(block.get("text", "")) for _, block in self._ordered() if block.get("type") == "text")
        try:
            native = self._native()
        except ValueError:
            _unreadable("an item nested too deeply")
        return AssistantTurn(encodable(text), calls, stop, self._tokens(), self._source, native, detail)

    def _ordered(self) -> list[tuple[int, dict[str, Any]]]:
        return sorted(self._blocks.items())

    def _raw(self, index: int) -> str:
        given = self._blocks[index].get("input")
        return "".join(self._json[index]) or (json.dumps(given, ensure_ascii=False) if given else "{}")

    def _calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(_text(block.get("id", "")), _text(block.get("name", "")), encodable(self._raw(index)))
            for index, block in self._ordered()
            if block.get("type") == "tool_use"
        )

    def _native(self) -> tuple[Mapping[str, Any], ...]:
        native: list[Mapping[str, Any]] = []
        for index, block in self._ordered():
            if self._json[index] or block.get("type") == "tool_use":
                native.append(encodable({**block, "input": _input(self._raw(index))}, _ITEM_DEPTH))
            elif index not in self._unknown or block.get("type") == "text":
                native.append(encodable(block, _ITEM_DEPTH))
        return tuple(native)

    def _tokens(self) -> Usage:
        read, written = self._usage.get("cache_read_input_tokens"), self._usage.get("cache_creation_input_tokens")
        new = self._usage.get("input_tokens")
        # The API's own input_tokens leaves the cache out.
        total = None if new is None else new + (read or 0) + (written or 0)
        return Usage(total, read, written, self._usage.get("output_tokens"))


def messages(history: Sequence[Turn], source: tuple[str, str, str]) -> list[dict[str, Any]]:
    """Write the history as the API wants it: results before text, all in one message, and no empty text (P72, P76)."""
    written: list[dict[str, Any]] = []
    ids: dict[str, str] = {}  # of the calls of the last assistant turn, where the API would refuse the id as it is
    for turn in history:
        content: list[Mapping[str, Any]]
        if isinstance(turn, AssistantTurn):
            role, ids = "assistant", {}
            if turn.source == source and turn.native:
                content = list(turn.native)
            else:
                ids = {call.id: _REFUSED_IN_NAMES.sub("_", call.id) or "_" for call in turn.tool_calls}
                content = [{"type": "text", "text": turn.text}, *(_tool_use(call, ids) for call in turn.tool_calls)]
        else:
            role = "user"
            content = [
                {"type": "tool_result", "tool_use_id": ids.get(result.tool_call_id, result.tool_call_id)}
                | ({"content": result.content} if result.content else {})
                | {"is_error": result.is_error}
                for result in turn.results
            ]
            content.append({"type": "text", "text": turn.text})
        content = [block for block in content if _replayable(block)]
        if content:
            written.append({"role": role, "content": content})
    return written


def _replayable(block: Mapping[str, Any]) -> bool:
    """Tell whether the API takes the block back: it refuses blank text, and thinking cut before its signature."""
    if block.get("type") == "text":
        return bool(str(block.get("text", "")).strip())
    return block.get("type") != "thinking" or bool(block.get("signature"))


def _tool_use(call: ToolCall, ids: Mapping[str, str]) -> dict[str, Any]:
    name = _REFUSED_IN_NAMES.sub("_", call.name) or "_"
    return {"type": "tool_use", "id": ids[call.id], "name": name, "input": _input(call.raw_arguments)}


def _input(raw: str) -> dict[str, Any]:
    """Return the arguments as the object that the API insists on, or ``{}``: the result says what was wrong."""
    try:
        value = encodable(_strict_json(raw), _ITEM_DEPTH + 1)
    except ValueError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _strict_json(text: str) -> object:
    """Parse what can be sent again: no NaN, no number that overflows to one. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        problem = "nested too deeply"
    raise ValueError(problem)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def encodable(value: Any, depth: int = 0) -> Any:  # noqa: ANN401 - any JSON value, and the same kind comes back
    r"""Return the JSON value with lone surrogates replaced: one of them in any text would make the request unsendable.

    They come from ``\ud800`` in a model's JSON and from undecodable bytes on a command line; pairs are joined.
    """
    if depth > _MAX_DEPTH:
        problem = "nested too deeply"
        raise ValueError(problem)
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {encodable(key, depth + 1): encodable(item, depth + 1) for key, item in items}
    if isinstance(value, list | tuple):
        return [encodable(item, depth + 1) for item in cast("Sequence[Any]", value)]
    return value


def _utf8(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        problem = "an event that is not UTF-8"
    return _unreadable(problem)


def _event(data: str) -> Mapping[str, Any]:
    try:
        return _mapping(_strict_json(data))
    except ValueError:
        problem = "an event that is not JSON"
    return _unreadable(problem)


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _unreadable("an event of an unknown form")
    return cast("dict[str, Any]", value)


def _index(event: Mapping[str, Any]) -> int:
    index = event.get("index")
    if not isinstance(index, int):
        _unreadable("a content block without a number")
    return index


def _text(value: object) -> str:
    if not isinstance(value, str):
        _unreadable("a content block of an unknown form")
    return value


def _unreadable(what: str) -> NoReturn:
    message = f"the answer was not readable: {what}"
    raise BadStream(message)
