"""``asp-agent runs``, ``show RUN`` and ``watch RUN``: what the run folders say, for people.

Everything here was written by us, but it holds the model's and the sandbox's text: shown, never obeyed (L8).
"""

import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from asp.errors import UsageError, quoted
from asp.state import state_dir
from asp.terminal import printable
from asp_agent import figures
from asp_agent.display import summarise
from asp_agent.messages import Usage
from asp_agent.run import RunFolderFailed

POLL_S = 0.2
"""How often a record that still grows is looked at, in seconds: a file cannot be waited for in a portable way."""

_TAIL_BYTES = 1 << 16
_SHOWN_LINES = 3


@dataclass(frozen=True, slots=True)
class Summary:
    """One run folder at a glance. ``state`` is running, ended without its last line (lost), or how it ended."""

    run: str
    started: str
    state: str
    exit_code: int | None
    turns: int | None
    cost_usd: float | None
    model: str
    task: str


def listed() -> list[Summary]:
    """Return the runs of this user, the newest first. A folder that is no run is left out."""
    folders = sorted(state_dir("runs").iterdir(), key=lambda folder: folder.name, reverse=True)
    return [found for folder in folders if (found := _summary(folder)) is not None]


def find(name: str) -> Path:
    """Return the folder of the run that ``name`` says: its id, the beginning of one, or ``last``. Raises UsageError."""
    folders = sorted(folder for folder in state_dir("runs").iterdir() if (folder / "run.json").is_file())
    if name == "last" and folders:
        return folders[-1]
    found = [folder for folder in folders if folder.name == name] or [f for f in folders if name and f.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    what = "no run has the name" if not found else f"{len(found)} runs begin with"
    msg = f"{what} {quoted(name)}; see: asp-agent runs"
    raise UsageError(msg)


def read_run(folder: Path) -> dict[str, Any]:
    """Return what ``run.json`` says. Raises RunFolderFailed."""
    try:
        return _object((folder / "run.json").read_bytes())
    except OSError as error:
        msg = f"{folder}: cannot read run.json ({error.strerror})"
        raise RunFolderFailed(msg) from error
    except ValueError as error:
        msg = f"{folder}: run.json is not the record of a run"
        raise RunFolderFailed(msg) from error


def is_running(folder: Path) -> bool:
    """Whether a process still writes the record: it holds a lock on it for as long as it lives."""
    try:
        with (folder / "events.jsonl").open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def table(found: list[Summary]) -> Iterator[str]:
    """Yield the lines of ``asp-agent runs``."""
    for one in found:
        cost = figures.money(one.cost_usd) if one.cost_usd is not None else ""
        turns = f"{one.turns} turns" if one.turns is not None else ""
        yield printable(
            f"{one.run}  {one.state:<14}  {turns:>9}  {cost:>8}  {one.model}  {' '.join(one.task.split())[:200]}", newlines=False
        )


def shown(folder: Path) -> Iterator[str]:
    """Yield the lines of ``asp-agent show RUN``, as far as the record goes. Raises RunFolderFailed."""
    yield from _header(folder)
    for line in _lines(folder):
        yield from _event_lines(line)


def watched(folder: Path) -> Iterator[str]:
    """Yield what :func:`shown` does and go on as the record grows, until the run has ended. Raises RunFolderFailed."""
    yield from _header(folder)
    rest = b""
    try:
        with (folder / "events.jsonl").open("rb") as opened:
            while True:
                running = is_running(folder)  # before the read: what was written until the lock went is then seen
                rest += opened.read()
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    yield from _event_lines(line)
                if not running:
                    return
                if not lines:
                    time.sleep(POLL_S)
    except OSError as error:
        msg = f"{folder}: cannot read events.jsonl ({error.strerror})"
        raise RunFolderFailed(msg) from error


def _summary(folder: Path) -> Summary | None:
    try:
        run = _object((folder / "run.json").read_bytes())
        end = _last(folder)
        model = run["model"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    ended = end.get("type") == "final"
    state = str(end.get("reason")) if ended else "running" if is_running(folder) else "lost"
    return Summary(
        folder.name, str(run.get("started", "")), state, end.get("exit_code") if ended else None,
        end.get("turns") if ended else None, end.get("cost_usd") if ended else None, str(model), str(run.get("task", "")),
    )  # fmt: skip


def _last(folder: Path) -> dict[str, Any]:
    """Return the last whole event; an empty one if there is none that can be read."""
    with (folder / "events.jsonl").open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - _TAIL_BYTES))
        lines = opened.read().splitlines()
    for line in reversed(lines):
        try:
            return _object(line)
        except ValueError:
            continue
    return {}


def _header(folder: Path) -> Iterator[str]:
    run = read_run(folder)
    try:
        model, contract = run["model"]["name"], run["contract"]
        yield printable(f"{folder.name}: {model} in {contract['workspace']} ({contract['path']})", newlines=False)
    except (KeyError, TypeError) as error:
        msg = f"{folder}: run.json is not the record of a run"
        raise RunFolderFailed(msg) from error


def _lines(folder: Path) -> Iterator[bytes]:
    try:
        with (folder / "events.jsonl").open("rb") as opened:
            yield from opened
    except OSError as error:
        msg = f"{folder}: cannot read events.jsonl ({error.strerror})"
        raise RunFolderFailed(msg) from error


def _event_lines(line: bytes) -> Iterator[str]:
    try:
        event = _object(line)
    except ValueError:
        yield "(a line that was not written whole)"
        return
    try:
        for text in _told(event):
            yield from printable(text).split("\n")
    except (KeyError, TypeError, AttributeError):
        yield f"({printable(str(event.get('type')), newlines=False)}: not as it is written today)"


def _told(event: Mapping[str, Any]) -> Iterator[str]:
    match event["type"], event.get("role"):
        case "turn", "user" if event["text"]:
            yield f"user: {event['text'].strip()}"
        case "turn", "assistant":
            yield from [event["text"].strip()] if event["text"].strip() else []
            yield from (f"> {call['name']}  {_argument(call['raw_arguments'])}" for call in event["tool_calls"])
        case "tool_result", _:
            lines = [text for text in event["content"].split("\n") if text.strip()]
            yield from (f"  {text}" for text in lines[-_SHOWN_LINES:] if event["is_error"])
            yield f"  {'error' if event['is_error'] else 'ok'}, {len(lines)} line{'s' if len(lines) != 1 else ''}"
        case "retrying", _:
            yield f"  try {event['attempt']} failed ({event['reason']})"
        case "approval_requested", _:
            yield f"  approval needed: {event['reason']}"
        case "approval_answered", _:
            yield f"  {'approved' if event['approved'] else 'not approved'}"
        case "final", _:
            usage = figures.usage(Usage(**event["usage"]))
            cost = f", {figures.money(event['cost_usd'])}" if event.get("cost_usd") is not None else ""
            yield from [event["message"]] if event["message"] else []
            yield f"{event['reason']}: {event['turns']} turns, {usage}{cost}, exit {event['exit_code']}"
        case _:
            pass


def _argument(raw_arguments: str) -> str:
    return next(filter(None, (summarise(raw_arguments, name) for name in ("command", "path", "pattern"))), "")


def _object(data: bytes) -> dict[str, Any]:
    value: Any = json.loads(data)
    if not isinstance(value, dict):
        msg = "not an object"
        raise ValueError(msg)  # noqa: TRY004 - to the callers both are text that is no record
    return cast("dict[str, Any]", value)
