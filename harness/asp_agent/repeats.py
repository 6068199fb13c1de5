"""Notice a model that goes round in circles: the same call with the same result, again and again.

The result is compared too, since waiting for something by asking again is no circle. First the model is told, later the
run ends (facts/models.md 3, row 4: others stop at three and stop what only polls).
"""

import hashlib
import json
from collections import deque
from enum import Enum

from asp_agent.messages import ToolCall

HINT_AT = 3
STOP_AT = 6
WINDOW = 12
"""So many of the last calls are looked at: a circle can have several steps."""

HINT = "\n\n[This call has given this same result {count} times. Do something else, or say what is in the way.]"


class Repeat(Enum):
    """What a call is, seen with those before it."""

    NEW = "new"
    HINT = "hint"
    STOP = "stop"


class Repeats:
    """The last calls of a run, as digests."""

    def __init__(self) -> None:
        """Nothing was called yet."""
        self._last: deque[bytes] = deque(maxlen=WINDOW)
        self.count = 0

    def note(self, call: ToolCall, content: str) -> Repeat:
        """Add a call and its result (as it is without a hint), and say whether it repeats. ``count`` is how often."""
        digest = _digest(call, content)
        self._last.append(digest)
        self.count = self._last.count(digest)
        if self.count >= STOP_AT:
            return Repeat.STOP
        return Repeat.HINT if self.count >= HINT_AT else Repeat.NEW

    def hint(self) -> str:
        """Return what is added to the result of a call that repeats."""
        return HINT.format(count=self.count)


def _digest(call: ToolCall, content: str) -> bytes:
    try:  # spaces and the order of keys make no other call
        arguments = json.dumps(json.loads(call.raw_arguments), sort_keys=True)
    except (ValueError, RecursionError):
        arguments = call.raw_arguments
    text = json.dumps([call.name, arguments, content])  # ASCII: a lone surrogate has no UTF-8
    return hashlib.sha256(text.encode()).digest()
