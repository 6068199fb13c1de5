"""What a tool is, and how one call of it becomes the text that the model reads, whatever happens to it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from asp.errors import (
    AspError,
    CommandRefused,
    ConnectionLost,
    NotStarted,
    RemotePathError,
    TransportError,
    WorkspaceMissing,
)
from asp.transport import Transport
from asp_agent.messages import Image, ToolSchema

Redact: TypeAlias = Callable[[str], str]
"""Takes out the values that the harness must not give away. Tools apply it before they cut: no value is cut in two."""

Arguments: TypeAlias = Mapping[str, Any]
"""Arguments that passed the tool's JSON Schema."""

LOST = "The environment stopped responding while this ran; its outcome is unknown and it may have taken effect."
NOT_RUN = "This was not run: the environment cannot be used any more."


@dataclass(frozen=True, slots=True)
class Produced:
    """What one call gave: the text for the model, and the failure behind it when there was one."""

    content: str
    is_error: bool = False
    failure: AspError | None = None
    images: tuple[Image, ...] = ()


class Interrupted(asyncio.CancelledError):
    """A call was cancelled and has something to tell: ``content`` is what it gave before, cut and redacted as a result is."""

    def __init__(self, content: str) -> None:
        """Keep the text for the model."""
        super().__init__()
        self.content = content


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. ``summary`` names the argument that says most about a call, for people.

    ``reads_only``: it changes nothing, so calls of it may run side by side.
    """

    schema: ToolSchema
    summary: str
    run: Callable[[Arguments, Transport, Redact], Awaitable[Produced]]
    reads_only: bool = False


async def perform(tool: Tool, arguments: Arguments, transport: Transport, redact: Redact) -> Produced:
    """Run one call and say in the model's words what came of it. Only bugs and cancellation are raised.

    A failure of the sandbox is in ``failure``; the loop decides from it whether the run goes on.
    """
    try:
        return await tool.run(arguments, transport, redact)
    except RemotePathError as error:
        return Produced(path_failed(str(arguments.get("path", "")), error), is_error=True)
    except WorkspaceMissing as error:
        return Produced(f"The working directory {transport.workspace} does not exist any more, so this was not run. "
                        "Writing a file below it makes it again.", is_error=True, failure=error)  # fmt: skip
    except ConnectionLost as error:
        return Produced(LOST, is_error=True, failure=error)
    except NotStarted as error:
        return Produced(NOT_RUN, is_error=True, failure=error)
    except TransportError as error:
        return Produced(LOST, is_error=True, failure=error)
    except CommandRefused:
        return Produced("This is not a command that can be run; nothing was run.", is_error=True)
    except AspError as error:  # refused before anything was sent, as for another host key
        return Produced(NOT_RUN, is_error=True, failure=error)


def path_failed(path: str, error: RemotePathError) -> str:
    """Say why ``path`` cannot be used: the kind only, since a server's own words could name the transport."""
    return f"{path}: {error.reason}"
