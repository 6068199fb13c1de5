"""What the events and bodies of OpenAI's two APIs mean: Chat Completions (and every server that speaks it) and Responses.

Pure: no SDK, no I/O. As with Anthropic, a turn counts only when its end was seen, arguments are kept as the exact text, and
what cannot be what the model meant is an error or a refusal, never a guess (L2). The quirks of other servers are those that
users reported (facts/models.md 1.2): fragments without an index or an id, arguments as an object, a stream without ``[DONE]``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from asp.errors import quoted
from asp_agent.messages import AssistantTurn, Stop, ToolCall, Turn, Usage
from asp_agent.models.anthropic_wire import DONE, BadStream, encodable

_FINISH = {"stop": Stop.DONE, "tool_calls": Stop.TOOL_CALLS, "function_call": Stop.TOOL_CALLS, "length": Stop.LENGTH,
           "content_filter": Stop.REFUSAL}  # fmt: skip
_INCOMPLETE = {"max_output_tokens": Stop.LENGTH, "content_filter": Stop.REFUSAL}


class ErrorEvent(Exception):
    """The API said that it failed, in a stream that had begun with status 200."""

    def __init__(self, error: object) -> None:
        given = cast("dict[str, Any]", error) if isinstance(error, dict) else {"message": error}
        super().__init__("error event")
        code = given.get("code")
        self.code = str(code or given.get("type") or "")
        self.status = code if isinstance(code, int) else None
        self.said = given.get("message")


@dataclass
class _Call:
    id: str = ""
    name: str = ""
    arguments: str = ""


class ChatAnswer:
    """What has arrived of one turn over Chat Completions."""

    def __init__(self, source: tuple[str, str, str]) -> None:
        self.ended = False
        self._source = source
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._calls: list[_Call] = []
        self._at: dict[object, _Call] = {}
        self._finish: object = None
        self._usage: Mapping[str, Any] = {}
        self._began = False

    def add(self, event: Mapping[str, Any]) -> str:
        """Apply one chunk and return the text that it adds. Raises BadStream, ErrorEvent."""
        if event.get("type") == DONE:
            self.ended = True
            return ""
        if event.get("error"):
            raise ErrorEvent(event["error"])
        if isinstance(event.get("usage"), dict):
            self._usage = event["usage"]
        added = ""
        for choice in _list(event.get("choices")):
            if choice.get("index") not in {None, 0}:
                continue
            self._began = True
            for delta in _list([choice.get("delta"), choice.get("message")]):
                added += self._delta(delta)
            self._finish = choice.get("finish_reason") or self._finish
        return added

    def _delta(self, delta: Mapping[str, Any]) -> str:
        for fragment in _list(delta.get("tool_calls")):
            self._fragment(fragment)
        if isinstance(delta.get("refusal"), str):
            self._refusal.append(delta["refusal"])
        text = delta.get("content")
        if not isinstance(text, str):
            return ""
        self._text.append(text)
        return text

    def _fragment(self, fragment: Mapping[str, Any]) -> None:
        """Add a piece of a call: to the call of its index, unless it brings an id that this one does not have."""
        function = fragment.get("function")
        function = cast("dict[str, Any]", function) if isinstance(function, dict) else {}
        place, call_id = fragment.get("index"), fragment.get("id")
        call = self._at.get(place) if place is not None else (self._calls[-1] if self._calls else None)
        if call is None or (call_id and call.id and call_id != call.id):
            call = _Call()
            self._calls.append(call)
            self._at[place] = call
        call.id = call.id or (call_id if isinstance(call_id, str) else "")
        name, arguments = function.get("name"), function.get("arguments")
        call.name = call.name or (name if isinstance(name, str) else "")
        call.arguments += (
            arguments if isinstance(arguments, str) else json.dumps(arguments) if isinstance(arguments, dict) else ""
        )

    def turn(self) -> AssistantTurn:
        """Return the whole turn. Raises BadStream if its end was not seen, or calls were announced and none came."""
        if self._finish is None and not (self.ended and (self._text or self._calls)):
            raise BadStream("the stream was cut before the end of the turn" if self._began else "no answer came")
        calls = tuple(
            ToolCall(encodable(call.id) or f"call_{number}", encodable(call.name), encodable(call.arguments) or "{}")
            for number, call in enumerate(self._calls, 1)
        )
        finish = self._finish if isinstance(self._finish, str) else "stop"
        stop, detail = _FINISH.get(finish, Stop.REFUSAL), ""
        if finish not in _FINISH:
            detail = f"unknown finish reason {quoted(finish)}"
        elif stop is Stop.DONE and calls:
            stop = Stop.TOOL_CALLS  # Ollama and others say "stop"
        elif stop is Stop.TOOL_CALLS and not calls:
            raise BadStream("the turn announced tool calls and holds none")
        if self._refusal:
            stop, detail = Stop.REFUSAL, quoted("".join(self._refusal))
        return AssistantTurn(encodable("".join(self._text)), calls, stop, self._tokens(), self._source, (), detail)

    def _tokens(self) -> Usage:
        cached = self._usage.get("prompt_tokens_details")
        read = _int(cast("dict[str, Any]", cached).get("cached_tokens")) if isinstance(cached, dict) else None
        return Usage(_int(self._usage.get("prompt_tokens")), read, None, _int(self._usage.get("completion_tokens")))


class ResponsesAnswer:
    """What has arrived of one turn over the Responses API."""

    def __init__(self, source: tuple[str, str, str]) -> None:
        self.ended = False
        self._source = source
        self._items: dict[int, Mapping[str, Any]] = {}
        self._response: Mapping[str, Any] = {}
        self._began = False

    def add(self, event: Mapping[str, Any]) -> str:
        """Apply one event and return the text that it adds. Raises BadStream, ErrorEvent."""
        self._began = True
        match event.get("type"):
            case "response.output_text.delta":
                return event["delta"] if isinstance(event.get("delta"), str) else ""
            case "response.output_item.done":
                item, place = event.get("item"), event.get("output_index")
                if not isinstance(item, dict) or not isinstance(place, int):
                    raise BadStream("the answer was not readable: an item of an unknown form")
                self._items[place] = cast("dict[str, Any]", item)
            case "response.completed" | "response.incomplete":
                response = event.get("response")
                if not isinstance(response, dict):
                    raise BadStream("the answer was not readable: an end of an unknown form")
                self._response, self.ended = cast("dict[str, Any]", response), True
            case "response.failed":
                response = event.get("response")
                raise ErrorEvent(cast("dict[str, Any]", response).get("error") if isinstance(response, dict) else None)
            case "error":
                raise ErrorEvent(event.get("error") or event)
            case _:
                pass
        return ""

    def turn(self) -> AssistantTurn:
        """Return the whole turn. Raises BadStream."""
        if not self.ended:
            raise BadStream("the stream was cut before the end of the turn" if self._began else "no answer came")
        items = [item for _, item in sorted(self._items.items())]
        calls = tuple(
            ToolCall(encodable(str(item.get("call_id") or "")), encodable(str(item.get("name") or "")),
                     encodable(str(item.get("arguments") or "{}")))
            for item in items if item.get("type") == "function_call"
        )  # fmt: skip
        if not all(call.id for call in calls):
            raise BadStream("the answer was not readable: tool calls without an id of their own")
        parts = [part for item in items if item.get("type") == "message" for part in _list(item.get("content"))]
        text = "".join(str(part.get("text") or "") for part in parts if part.get("type") == "output_text")
        refusal = "".join(str(part.get("refusal") or "") for part in parts if part.get("type") == "refusal")
        stop, detail = (Stop.TOOL_CALLS if calls else Stop.DONE), ""
        if self._response.get("status") == "incomplete":
            given = self._response.get("incomplete_details")
            reason = str(cast("dict[str, Any]", given).get("reason")) if isinstance(given, dict) else ""
            stop, detail = _INCOMPLETE.get(reason, Stop.REFUSAL), "" if reason == "max_output_tokens" else quoted(reason)
        if refusal:
            stop, detail = Stop.REFUSAL, quoted(refusal)
        native = tuple(cast("Mapping[str, Any]", encodable(item)) for item in items)
        return AssistantTurn(encodable(text), calls, stop, self._tokens(), self._source, native, detail)

    def _tokens(self) -> Usage:
        usage = self._response.get("usage")
        counted = cast("dict[str, Any]", usage) if isinstance(usage, dict) else {}
        details = counted.get("input_tokens_details")
        caches = cast("dict[str, Any]", details) if isinstance(details, dict) else {}
        return Usage(
            _int(counted.get("input_tokens")), _int(caches.get("cached_tokens")), _int(caches.get("cache_write_tokens")),
            _int(counted.get("output_tokens")),
        )  # fmt: skip


def chat_messages(system: str, history: Sequence[Turn]) -> list[dict[str, Any]]:
    """Write the history for Chat Completions: one message a result, right after the turn that called."""
    written: list[dict[str, Any]] = [{"role": "system", "content": system}] if system.strip() else []
    for turn in history:
        if isinstance(turn, AssistantTurn):
            message: dict[str, Any] = {"role": "assistant", "content": turn.text or None}
            if turn.tool_calls:
                message["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
                    for call in turn.tool_calls
                ]
            if turn.text or turn.tool_calls:
                written.append(message)
        else:
            written += [{"role": "tool", "tool_call_id": r.tool_call_id, "content": r.content} for r in turn.results]
            if turn.text.strip():
                written.append({"role": "user", "content": turn.text})
    return written


def responses_input(history: Sequence[Turn], source: tuple[str, str, str]) -> list[dict[str, Any]]:
    """Write the history for the Responses API: a turn of the same model goes back as its own items, unchanged (P76)."""
    written: list[dict[str, Any]] = []
    for turn in history:
        if not isinstance(turn, AssistantTurn):
            written += [{"type": "function_call_output", "call_id": r.tool_call_id, "output": r.content} for r in turn.results]
            if turn.text.strip():
                written.append({"role": "user", "content": [{"type": "input_text", "text": turn.text}]})
        elif turn.source == source and turn.native:
            written += [dict(item) for item in turn.native]
        else:
            if turn.text.strip():
                written.append({"role": "assistant", "content": [{"type": "output_text", "text": turn.text}]})
            written += [
                {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": _arguments(call)}
                for call in turn.tool_calls
            ]
    return written


def _arguments(call: ToolCall) -> str:
    """Return the arguments as text that the API takes: what is no JSON object goes back as ``{}``; its result says why."""
    try:
        value: Any = json.loads(call.raw_arguments)
    except (ValueError, RecursionError):
        return "{}"
    return call.raw_arguments if isinstance(value, dict) else "{}"


def _list(value: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - any JSON value
    given: list[Any] = value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType] - JSON
    return [item for item in given if isinstance(item, dict)]


def _int(value: object) -> int | None:
    return value if type(value) is int else None
