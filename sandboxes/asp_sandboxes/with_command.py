"""``asp-sandbox with PROVIDER [options] -- COMMAND``: a sandbox for one command, and what it changed as a patch.

up, push, the command, diff, pull, down: each is the command that a person would type, run as a process of its own, so that
one step is the same by hand and from here. What came out is never lost: the patch is kept on this side before the sandbox
goes, unless it was applied, and a sandbox whose changes could not be fetched stays.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO, TextIO

from asp.contract import CONTRACT_NAME
from asp.errors import AspError, UsageError
from asp.state import state_dir
from asp.terminal import printable

USAGE = (
    "asp-sandbox with PROVIDER [options of up, such as --image NAME --setup CMD] [--exclude GLOB] [--apply|--no-apply] [--keep] "
    "-- COMMAND..."
)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COMMANDS = {"asp": "asp.cli", "asp-sandbox": "asp_sandboxes.cli"}
_MAX_SHOWN_BYTES = 1 << 20


@dataclass(frozen=True)
class Order:
    """What was asked for: the words for ``up`` and ``push``, the command, and what becomes of its changes."""

    up: tuple[str, ...]
    push: tuple[str, ...]
    command: tuple[str, ...]
    folder: Path
    apply: bool | None
    keep: bool


def parse(words: Sequence[str]) -> Order:
    """Read the words after ``with``. What is not ours is for ``up``, which knows its options. Raises UsageError."""
    if "--" not in words or not words[words.index("--") + 1 :]:
        msg = f"say what to run in the sandbox, after --: {USAGE}"
        raise UsageError(msg)
    place = words.index("--")
    own, command = list(words[:place]), tuple(words[place + 1 :])
    up: list[str] = []
    push: list[str] = []
    choices: set[str] = set()
    folder = Path()
    while own:
        word = own.pop(0)
        if word in {"--apply", "--no-apply", "--keep"}:
            choices.add(word)
        elif word == "--exclude" and own:
            push += [word, own.pop(0)]
        elif word.startswith("--exclude="):
            push.append(word)
        else:
            up.append(word)
            if word == "--repo" and own:
                folder = Path(own[0])
            elif word.startswith("--repo="):
                folder = Path(word.partition("=")[2])
    if {"--apply", "--no-apply"} <= choices:
        msg = "--apply and --no-apply exclude each other"
        raise UsageError(msg)
    wanted = True if "--apply" in choices else False if "--no-apply" in choices else None
    return Order(tuple(up), tuple(push), command, folder, wanted, keep="--keep" in choices)


class With:
    """One run of the command. Signals are passed on to what runs, and end what is left in order."""

    def __init__(self, order: Order) -> None:
        """Nothing runs yet."""
        self._order = order
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = 0

    def run(self) -> int:
        """Run all of it and return the exit status: the command's own, or that of the step that failed."""
        before = {number: signal.signal(number, self._signalled) for number in _SIGNALS}
        try:
            return self._steps()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _steps(self) -> int:
        status = self._run(_ours("asp-sandbox", "up", *self._order.up))
        if status or self._stopped:
            if self._stopped and not status:
                self._down(self._name())
            return status or 128 + self._stopped
        name = self._name()
        status = self._run(_ours("asp", "push", *self._order.push), cwd=self._order.folder)
        if status or self._stopped:
            self._down(name)
            return status or 128 + self._stopped
        status = self._run(self._order.command)
        try:
            kept = self._fetch(name)
        except AspError as error:
            _tell(f"{error}; the sandbox {name} stays as it is: look with asp diff, remove it with asp-sandbox down {name}")
            return status or error.exit_code
        applied = self._offer(kept) if kept is not None else 0
        if self._order.keep:
            _tell(f"the sandbox {name} stays; remove it with: asp-sandbox down {name}")
            return status or applied
        gone = self._down(name)
        return status or applied or gone

    def _fetch(self, name: str) -> Path | None:
        """Keep the patch of what changed; None if nothing did. Raises AspError."""
        path = state_dir("patches") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.patch"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as patch:
            # Apart from the terminal: a second Ctrl-C must not lose what the first one was meant to stop.
            status = self._run(_ours("asp", "diff"), cwd=self._order.folder, stdout=patch, apart=True)
        if status:
            path.unlink()
            msg = f"what changed could not be fetched (asp diff: status {status})"
            raise AspError(msg)
        if not path.stat().st_size:
            path.unlink()
            _tell("nothing was changed")
            return None
        return path

    def _offer(self, patch: Path) -> int:
        """Apply, ask, or only show the patch; return what is wrong about that as an exit status."""
        apply = self._order.apply
        person = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
        if apply or (apply is None and person and not self._stopped):
            status = self._run(_ours("asp", "pull", *(["--apply"] if apply else [])), cwd=self._order.folder)
            if status == 0:
                patch.unlink()
                return 0
            self._name_patch(patch)
            return status if apply else 0
        shown = patch.read_bytes()[:_MAX_SHOWN_BYTES].decode("utf-8", "replace")
        _write(sys.stderr, printable(shown) + ("" if shown.endswith("\n") else "\n"))
        self._name_patch(patch)
        return 0

    def _name_patch(self, patch: Path) -> None:
        _tell(f"not applied; the patch is kept: {patch} (git apply takes it)")

    def _down(self, name: str) -> int:
        return self._run(_ours("asp-sandbox", "down", name), apart=True)

    def _name(self) -> str:
        """Return the name of the sandbox that wrote the folder's contract. Raises AspError."""
        words = _ours("asp-sandbox", "list", "--json")
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)  # noqa: S603 - ours
        contract = str(self._order.folder.resolve() / CONTRACT_NAME)
        with contextlib.suppress(ValueError):
            for row in json.loads(done.stdout):
                if row["contract"] == contract:
                    return str(row["name"])
        msg = f"the sandbox of {contract} cannot be found; see: asp-sandbox list"
        raise AspError(msg)

    def _run(self, words: Sequence[str], *, cwd: Path | None = None, stdout: BinaryIO | None = None, apart: bool = False) -> int:
        """Run a process to its end; return its status as a shell shows it."""
        try:
            self._child = subprocess.Popen(  # noqa: S603 - the person's own command, or ours
                words, cwd=cwd, stdout=stdout, stdin=subprocess.DEVNULL if apart else None, start_new_session=apart
            )
        except OSError as error:
            _tell(f"{printable(words[0], newlines=False)}: {error.strerror}")
            return 126 if isinstance(error, PermissionError) else 127
        try:
            code = self._child.wait()
        finally:
            self._child = None
        return code if code >= 0 else 128 - code

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        """Remember it; what runs got a Ctrl-C by itself, anything else is passed on."""
        self._stopped = number
        if number != signal.SIGINT and self._child is not None:
            self._child.send_signal(number)


def _ours(name: str, *words: str) -> list[str]:
    """Return the command line of one of our commands, with this very interpreter. -P: nothing of the repository is imported."""
    return [sys.executable, "-P", "-c", f"import sys; from {_COMMANDS[name]} import main; sys.exit(main())", *words]


def _tell(text: str) -> None:
    _write(sys.stderr, f"asp-sandbox: {printable(text, newlines=False)}\n")


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError):
        stream.write(text)
        stream.flush()
