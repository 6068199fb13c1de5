"""The run folder (L3): what a run was told, frozen, and what happened, append-only and chained.

``run.json`` holds what was decided before the first event. ``events.jsonl`` holds one JSON object a line: ``seq``
counts from 0, ``prev`` is the SHA-256 (hex) of the exact bytes of the line before it, its LF included, and 64 zeros in
the first. A line that is changed, taken out or put in breaks the chain; a cut tail shows as a missing ``final``. Whoever
may write the file can build a new chain: this finds accidents and edits, it is no signature.

Event types: message_delta, tool_call, tool_result, security_decision, artifact_created, approval_requested, usage,
final (the timeline of AgentOS), and ours: start, turn, tool_started, turn_dropped, retrying, approval_answered, shortened.
All text is redacted. What decides how a killed run goes on (a call's start, its result, a turn) is on the disk before
anything follows from it. The process that writes holds a lock on the file for as long as it lives.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from asp.errors import AspError, UsageError
from asp.state import state_dir, write_private
from asp_agent.history import History
from asp_agent.messages import AssistantTurn, Stop, ToolCall, ToolResult, Turn, Usage, UserTurn
from asp_agent.redact import Redactor

FORMAT = 1
MAX_STRING_CHARACTERS = 1 << 20
"""The longest text in one event: 1 MiB. A longer one is cut and the event says ``"cut": true`` (P16)."""

_FIRST = "0" * 64
_DURABLE = frozenset({"turn", "tool_result", "tool_started", "shortened"})
T = TypeVar("T")


class RunFolderFailed(AspError):
    """The run folder cannot be written or read, or it is not what was written."""


class RunFolder:
    """The record of one run, written as it happens."""

    def __init__(self, run_id: str, path: Path, descriptor: int, redact: Redactor) -> None:
        """Use :meth:`create`."""
        self.run_id, self.path = run_id, path
        self._descriptor, self._redact = descriptor, redact
        self._seq, self._previous = 0, _FIRST
        self._recorded: set[str] = set()  # results of the turn that is answered now

    @classmethod
    def create(cls, frozen: Mapping[str, Any], redact: Redactor) -> "RunFolder":
        """Make a new folder below the user's state directory and write ``run.json``. Raises UsageError if it cannot."""
        run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{secrets.token_hex(3)}"  # names sort by time
        path = state_dir("runs", run_id)
        record = {"format": FORMAT, "run": run_id, "started": _now(), **frozen}
        try:
            write_private(path / "run.json", json.dumps(redact.tree(record), indent=1).encode() + b"\n")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path / "events.jsonl", flags, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            msg = f"{path}: cannot write the run folder ({error.strerror})"
            raise UsageError(msg) from error
        return cls(run_id, path, descriptor, redact)

    def event(self, kind: str, **fields: object) -> None:
        """Append one event as one line by one write, redacted and bounded. Raises RunFolderFailed."""
        record = self._redact.tree(fields)
        bounded = _bounded(record)
        if bounded != record:
            bounded["cut"] = True
        line = json.dumps({"seq": self._seq, "prev": self._previous, "time": _now(), "type": kind, **bounded}).encode() + b"\n"
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            msg = f"{self.path}: cannot write the run folder ({error.strerror})"
            raise RunFolderFailed(msg) from error
        if written != len(line):
            msg = f"{self.path}: cannot write the run folder (the disk is full)"
            raise RunFolderFailed(msg)
        self._seq += 1
        self._previous = hashlib.sha256(line).hexdigest()
        if kind in _DURABLE:
            with contextlib.suppress(OSError):  # a file system that cannot; what is written survives our own death all the same
                os.fdatasync(self._descriptor)

    def result(self, result: ToolResult) -> None:
        """Append the result of one call, as soon as it is there. A picture is recorded by its digest only."""
        images = [
            {"media_type": image.media_type, "bytes": len(image.data), "sha256": hashlib.sha256(image.data).hexdigest()}
            for image in result.images
        ]
        fields = {"tool_call_id": result.tool_call_id, "name": result.name, "content": result.content, "images": images}
        self.event("tool_result", **fields, is_error=result.is_error)
        self._recorded.add(result.tool_call_id)

    def turn(self, turn: Turn) -> None:
        """Append a turn of the history, so that :func:`load_history` can build it again."""
        if isinstance(turn, UserTurn):
            for result in turn.results:
                if result.tool_call_id not in self._recorded:
                    self.result(result)
            self._recorded.clear()
            self.event("turn", role="user", text=turn.text, results=[result.tool_call_id for result in turn.results])
        else:
            self.event("turn", role="assistant", **{**asdict(turn), "stop": turn.stop.value})

    def shortened(self, summary: Turn, kept: int) -> None:
        """Append that the history is now ``summary`` and the last ``kept`` turns."""
        if isinstance(summary, UserTurn):
            self.event("shortened", text=summary.text, kept=kept)

    def final(self, **fields: object) -> None:
        """Append the last event and make everything durable. Raises RunFolderFailed."""
        try:
            self.event("final", **fields)
            os.fsync(self._descriptor)
        except OSError as error:
            msg = f"{self.path}: cannot write the run folder ({error.strerror})"
            raise RunFolderFailed(msg) from error
        finally:
            os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain that holds: how many events, the hash of the last line, and whether the run was finished."""

    events: int
    head: str
    complete: bool


def verify(path: Path) -> Chain:
    """Check every link of ``events.jsonl`` in the run folder ``path``. Raises RunFolderFailed for a wrong line."""
    previous, count, kind = _FIRST, 0, ""
    for number, line in enumerate(_lines(path), 1):
        event = _event(path, number, line)
        if event.get("seq") != count or event.get("prev") != previous:
            msg = f"{path}: line {number} of events.jsonl does not follow the line before it; the record was changed"
            raise RunFolderFailed(msg)
        if kind == "final":
            msg = f"{path}: line {number} of events.jsonl comes after the end of the run"
            raise RunFolderFailed(msg)
        previous, count, kind = hashlib.sha256(line).hexdigest(), count + 1, str(event.get("type"))
    return Chain(count, previous, complete=kind == "final")


@dataclass
class Loaded:
    """What a record says of a conversation: its turns, and of the last turn's calls which have begun and which have results."""

    history: History
    started: set[str]
    results: dict[str, ToolResult]


def load_history(path: Path) -> History:
    """Build the history of a run again from its events. Raises RunFolderFailed; HistoryBroken if it was never valid."""
    return load(path).history


def load(path: Path, *, cut_tail: bool = False) -> Loaded:
    """Build what a run knew from its events. ``cut_tail``: leave out a last line that was not written whole (a killed run).

    Raises RunFolderFailed, and HistoryBroken if the history was never valid.
    """
    loaded = Loaded(History(), set(), {})
    lines = _lines(path)
    if cut_tail and lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    for number, line in enumerate(lines, 1):
        event = _event(path, number, line)
        try:
            _apply(loaded, event)
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{path}: line {number} of events.jsonl is not as this version writes it"
            raise RunFolderFailed(msg) from error
    return loaded


def _apply(loaded: Loaded, event: Mapping[str, Any]) -> None:
    match event.get("type"), event.get("role"):
        case "tool_started", _:
            loaded.started.add(event["tool_call_id"])
        case "tool_result", _:
            call_id = event["tool_call_id"]
            loaded.results[call_id] = ToolResult(call_id, event["name"], event["content"], event["is_error"])
        case "turn", "user":
            loaded.history.append(UserTurn(event["text"], tuple(loaded.results.pop(call_id) for call_id in event["results"])))
            loaded.started.clear()
        case "turn", _:
            loaded.history.append(_assistant(event))
            loaded.started.clear()
            loaded.results.clear()
        case "shortened", _:
            turns = loaded.history.turns
            kept = turns[len(turns) - event["kept"] :] if event["kept"] else ()
            loaded.history = History([UserTurn(event["text"]), *kept])
        case _:
            pass


def _assistant(event: Mapping[str, Any]) -> AssistantTurn:
    provider, api, model = event["source"]
    return AssistantTurn(
        text=event["text"],
        tool_calls=tuple(ToolCall(**call) for call in event["tool_calls"]),
        stop=Stop(event["stop"]),
        usage=Usage(**event["usage"]),
        source=(provider, api, model),
        native=tuple(event["native"]),
        stop_detail=event["stop_detail"],
    )


def _lines(path: Path) -> list[bytes]:
    try:
        return (path / "events.jsonl").read_bytes().splitlines(keepends=True)
    except OSError as error:
        msg = f"{path}: cannot read events.jsonl ({error.strerror})"
        raise RunFolderFailed(msg) from error


def _event(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        event: Any = json.loads(line)
    except ValueError as error:
        event = error
    if not isinstance(event, dict) or not line.endswith(b"\n"):
        msg = f"{path}: line {number} of events.jsonl is not a whole event"
        raise RunFolderFailed(msg)
    return event  # pyright: ignore[reportUnknownVariableType] - a JSON object has string keys


def identify(call: ToolCall) -> dict[str, str]:
    """Return the fields that name a call in an event; ``input_digest`` is over its exact arguments."""
    digest = hashlib.sha256(call.raw_arguments.encode("utf-8", "surrogatepass")).hexdigest()
    return {"tool_call_id": call.id, "name": call.name, "input_digest": f"sha256:{digest}"}


def _bounded(value: T) -> T:
    """Return a JSON value with every string in it cut to the limit."""
    if isinstance(value, str):
        return value[:MAX_STRING_CHARACTERS]  # type: ignore[return-value]
    if isinstance(value, dict):
        return {key: _bounded(item) for key, item in value.items()}  # type: ignore[return-value]
    if isinstance(value, list):
        return [_bounded(item) for item in value]  # type: ignore[return-value]
    return value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
