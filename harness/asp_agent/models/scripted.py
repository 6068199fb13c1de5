"""A model that is a file: its turns are played one by one, and no API is called.

For demos, and for tests of everything but the model: the loop, the tools and the sandbox are the real ones. The file is a
regular one of at most 16 MiB::

    {"turns": [
        {"text": "I look.", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]},
        {"fault": "interrupted"},
        {"text": "Done.", "usage": {"input_tokens": 10, "output_tokens": 2}}
    ]}

Of a turn: ``text``; ``tool_calls``, each with ``name``, either ``arguments`` (an object) or ``raw_arguments`` (the
exact text, which may be wrong on purpose), and ``id`` (``call_1``, ``call_2``... if left out); ``usage``, the fields of
:class:`~asp_agent.messages.Usage`; ``stop``, a value of :class:`~asp_agent.messages.Stop` (``tool_calls`` if there are
calls, else ``done``); ``fault``:

``interrupted``  the stream ends before its terminal event: nothing of the turn counts, the next try plays the next turn
``unavailable``  the API failed for good after its retries (ModelUnavailable); nothing else may stand in the turn
``refused``      the API refused the request (ModelRefused); nothing else may stand in the turn
"""

import asyncio
import json
import os
import stat
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, cast

from asp.errors import quoted
from asp.terminal import printable
from asp_agent.errors import ModelRefused, ModelSetupError, ModelUnavailable
from asp_agent.messages import AssistantTurn, ModelEvent, Request, Stop, TextDelta, ToolCall, TurnDone, Usage
from asp_agent.models.retry import AttemptFailed, RetryPolicy

_TURN_KEYS = ("text", "tool_calls", "usage", "stop", "fault")
_CALL_KEYS = ("id", "name", "arguments", "raw_arguments")
_USAGE_KEYS = ("input_tokens", "cache_read_tokens", "cache_write_tokens", "output_tokens")
_FAULTS = ("interrupted", "unavailable", "refused")
MAX_SCRIPT_BYTES = 16 << 20
_PIECES = 4  # so that a script streams as a model does


@dataclass(frozen=True, slots=True)
class _Step:
    turn: AssistantTurn
    fault: str | None


class ScriptedModel:
    """Plays a script. Each request takes the next turn, whatever it asks; see the module for the file."""

    def __init__(self, file: str, *, retry: RetryPolicy | None = None) -> None:
        """Read and check the whole script. ``file`` is a path on this machine, relative to the working directory.

        Raises ModelSetupError with one line that names the file and the place in it.
        """
        self.name = f"scripted/{file}"
        self.scripted = True
        self._shown = printable(file, newlines=False)
        self._steps = _Script(file).steps()
        self._next = 0
        self._retry = retry or RetryPolicy()

    def secrets(self) -> Sequence[str]:
        """Return nothing: a script has no key."""
        return ()

    def stream(self, request: Request) -> AsyncGenerator[ModelEvent, None]:
        """Play the next turn: its text in a few pieces, then TurnDone.

        Raises ModelRefused when the script is over or says "refused", ModelUnavailable when it says "unavailable" or
        when as many turns as the retry policy has tries are "interrupted".
        """
        del request  # a script answers without reading the question
        return self._retry.stream(self.name, self._attempt)

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""

    async def _attempt(self) -> AsyncGenerator[TextDelta | TurnDone, None]:
        if self._next == len(self._steps):
            message = f"the script {self._shown} has no more turns ({self._next} played)"
            raise ModelRefused(message)
        step = self._steps[self._next]
        self._next += 1
        place = f"turn {self._next} of the script {self._shown}"
        if step.fault == "refused":
            message = f"{place} is a refusal"
            raise ModelRefused(message)
        if step.fault == "unavailable":
            message = f"{place} is an outage"
            raise ModelUnavailable(message)
        for piece in _pieces(step.turn.text):
            yield TextDelta(piece)
            await asyncio.sleep(0)  # a script must be as cancellable as a network stream
        if step.fault == "interrupted":
            message = f"{place} is an interrupted stream"
            raise AttemptFailed(message)
        yield TurnDone(step.turn)


def _pieces(text: str) -> Iterator[str]:
    size = max(1, -(-len(text) // _PIECES))
    return (text[start : start + size] for start in range(0, len(text), size))


class _Script:
    """The check of one file; every complaint is ``FILE: PLACE: what is wrong``."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._ids: set[str] = set()
        self._counter = count(1)

    def steps(self) -> tuple[_Step, ...]:
        top = self._object(self._json(), "", ("turns",))
        if "turns" not in top:
            self._fail("", 'the key "turns" is missing')
        items = self._array(top["turns"], "turns")
        turns = [self._object(item, f"turns[{n}]", _TURN_KEYS) for n, item in enumerate(items)]
        calls = [self._calls(turn, f"turns[{n}]") for n, turn in enumerate(turns)]
        # Before any id is made up: it must not equal one that is given later in the same script.
        self._ids.update(call["id"] for turn in calls for call in turn if "id" in call)
        return tuple(self._step(turn, calls[n], f"turns[{n}]") for n, turn in enumerate(turns))

    def _step(self, turn: Mapping[str, Any], calls: Sequence[Mapping[str, str]], place: str) -> _Step:
        fault = self._one_of(turn["fault"], f"{place}.fault", _FAULTS) if "fault" in turn else None
        if fault in {"unavailable", "refused"} and len(turn) > 1:
            self._fail(place, f'"fault": "{fault}" stands alone')
        text = self._text(turn.get("text", ""), f"{place}.text")
        tool_calls = tuple(
            ToolCall(call["id"] if "id" in call else self._new_id(), call["name"], call["raw_arguments"])
            for call in calls
        )
        stop = Stop.TOOL_CALLS if calls else Stop.DONE
        if "stop" in turn:
            stop = Stop(self._one_of(turn["stop"], f"{place}.stop", [known.value for known in Stop]))
        usage = self._usage(turn["usage"], f"{place}.usage") if "usage" in turn else Usage()
        source = ("scripted", "scripted", Path(self._file).name)
        return _Step(AssistantTurn(text, tool_calls, stop, usage, source), fault)

    def _calls(self, turn: Mapping[str, Any], place: str) -> list[dict[str, str]]:
        """Check the calls of a turn; each comes back with name, raw_arguments and, if it has one, id."""
        calls: list[dict[str, str]] = []
        ids: set[str] = set()
        for n, item in enumerate(self._array(turn.get("tool_calls", []), f"{place}.tool_calls")):
            here = f"{place}.tool_calls[{n}]"
            given = self._object(item, here, _CALL_KEYS)
            if "name" not in given:
                self._fail(here, 'the key "name" is missing')
            if ("arguments" in given) == ("raw_arguments" in given):
                self._fail(here, 'give either "arguments" (an object) or "raw_arguments" (text)')
            call = {"name": self._text(given["name"], f"{here}.name")}
            if "arguments" in given:
                arguments = self._object(given["arguments"], f"{here}.arguments")
                call["raw_arguments"] = json.dumps(arguments, ensure_ascii=False)
            else:
                call["raw_arguments"] = self._text(given["raw_arguments"], f"{here}.raw_arguments")
            if "id" in given:
                call["id"] = self._text(given["id"], f"{here}.id")
                if not call["id"] or call["id"] in ids:
                    self._fail(f"{here}.id", "must not be empty, nor used twice in a turn")
                ids.add(call["id"])
            calls.append(call)
        return calls

    def _new_id(self) -> str:
        return next(new for new in (f"call_{n}" for n in self._counter) if new not in self._ids)

    def _usage(self, value: object, place: str) -> Usage:
        given = self._object(value, place, _USAGE_KEYS)
        for key, tokens in given.items():
            if type(tokens) is not int or tokens < 0:  # not isinstance: a bool is an int, and no count
                self._fail(f"{place}.{key}", "must be an integer, 0 or more")
        return Usage(**given)

    def _json(self) -> object:
        try:
            text = self._bytes().decode()
            return json.loads(text, object_pairs_hook=self._pairs, parse_constant=self._constant)
        except OSError as error:
            problem = f"cannot be read ({error.strerror or type(error).__name__})"
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 (byte {error.start})"
        except json.JSONDecodeError as error:
            problem = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        except RecursionError:
            problem = "is nested too deeply"
        except ValueError as error:  # a NUL in the path, a number of more than 4300 digits
            problem = f"cannot be used: {error}"
        return self._fail("", problem)

    def _bytes(self) -> bytes:
        # Not blocking: to open a FIFO would wait for its writer, for ever.
        descriptor = os.open(self._file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                self._fail("", "is not a regular file (a directory, a FIFO or a device)")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_SCRIPT_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(data) > MAX_SCRIPT_BYTES:
            self._fail("", f"is larger than {MAX_SCRIPT_BYTES >> 20} MiB")
        return data

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for key, value in pairs:
            if key in given:
                self._fail("", f"the key {quoted(key)} stands twice in one object")
            given[key] = value
        return given

    def _constant(self, name: str) -> NoReturn:
        self._fail("", f"is not JSON: {name}")

    def _object(self, value: object, place: str, keys: Sequence[str] = ()) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._fail(place, f"must be an object, not {_kind(value)}")
        given = cast("dict[str, Any]", value)
        for key in given:
            if keys and key not in keys:
                self._fail(place, f"unknown key {quoted(key)}; known: {', '.join(keys)}")
        return given

    def _array(self, value: object, place: str) -> Sequence[Any]:
        if not isinstance(value, list):
            self._fail(place, f"must be an array, not {_kind(value)}")
        return cast("Sequence[Any]", value)

    def _text(self, value: object, place: str) -> str:
        if not isinstance(value, str):
            self._fail(place, f"must be a string, not {_kind(value)}")
        return value

    def _one_of(self, value: object, place: str, known: Sequence[str]) -> str:
        text = self._text(value, place)
        if text not in known:
            self._fail(place, f"unknown value {quoted(text)}; known: {', '.join(known)}")
        return text

    def _fail(self, place: str, problem: str) -> NoReturn:
        file = printable(self._file, newlines=False)
        message = f"{file}: {place}: {problem}" if place else f"{file}: {problem}"
        raise ModelSetupError(message)


def _kind(value: object) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "an array"
        case str():
            return "a string"
        case bool():
            return "a boolean"
        case None:
            return "null"
        case _:
            return "a number"
