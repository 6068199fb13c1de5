"""Ask the person at the terminal whether an action that needs an approval is taken (L4)."""

import asyncio
import os
import sys

from asp.terminal import printable
from asp_agent.decide import Action, Approve, Decision, nobody_approves
from asp_agent.display import Display

_MAX_SHOWN = 2000
_QUESTION = "take this action? y: once, a: this same call always in this run, n: no [n] "


class TerminalApproval:
    """Shows an action on stderr and reads the answer from stdin. One question at a time; a Ctrl-C ends the wait."""

    def __init__(self, display: Display) -> None:
        """The display leaves the terminal alone meanwhile."""
        self._display = display
        self._one_at_a_time = asyncio.Lock()
        self._always: set[str] = set()

    async def __call__(self, action: Action, decision: Decision) -> bool:
        """Return whether the person said yes. The end of input, and anything but y or a, is no."""
        same = repr((action.tool, sorted(action.arguments.items())))
        async with self._one_at_a_time:
            if same in self._always:
                return True
            with self._display.asking():
                sys.stderr.write(f"approval needed: {printable(decision.reason, newlines=False)}\n{_shown(action)}{_QUESTION}")
                sys.stderr.flush()
                answer = (await _line()).strip().lower()
            if answer in {"a", "always"}:
                self._always.add(same)
            return answer in {"y", "yes", "a", "always"}


def approver(display: Display, *, programs: bool) -> Approve:
    """Return who approves: the person, if stdin and stderr are a terminal and the output is not for ``programs``."""
    if programs or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return nobody_approves
    return TerminalApproval(display)


def _shown(action: Action) -> str:
    """Return the tool and every argument, whole lines, cut in the middle of nothing that would run: a cut one says so."""
    lines = [f"  {printable(action.tool, newlines=False)}"]
    for name, value in action.arguments.items():
        text = value if isinstance(value, str) else repr(value)
        cut = f"\n    ... and {len(text) - _MAX_SHOWN} more characters" if len(text) > _MAX_SHOWN else ""
        body = printable(text[:_MAX_SHOWN]).replace("\n", "\n    ")
        lines.append(f"  {printable(name, newlines=False)}: {body}{cut}")
    return "\n".join(lines) + "\n"


async def _line() -> str:
    """Read one line of stdin without holding up the event loop; cancellable. "" at the end of input."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    descriptor = sys.stdin.fileno()

    def arrived() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, arrived)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)
    try:
        return os.read(descriptor, 4096).decode("utf-8", "replace")  # a terminal gives whole lines
    except OSError:
        return ""
