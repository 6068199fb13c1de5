"""The four tools as an MCP server over stdio, so that any MCP host can have its hands in the sandbox.

The server is called ``workspace``, since hosts show its name to the model. Errors are tool errors with the same texts as
in our own loop; text is sent once (no structured copy). A long call reports progress to a caller that asked for it, and a
cancelled call is killed in the sandbox. stdout carries the protocol and nothing else.
"""

import asyncio
import base64
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, cast

import anyio
from mcp import types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from asp.transport import Transport
from asp_agent import wording
from asp_agent.redact import Redactor
from asp_agent.tools import DEFAULT_TOOLS
from asp_agent.tools.arguments import ArgumentsInvalid, parse
from asp_agent.tools.tool import Produced, Tool, perform

NAME = "workspace"
PROGRESS_EVERY_S = 2.0
"""How often a call that runs tells so, in seconds."""

MAX_LINE_BYTES = 64 << 20
"""The longest message of the host. 64 MiB: a file of that size can be written whole."""

KILL_WAIT_S = 30.0
"""How long the end waits for calls that are being killed in the sandbox, in seconds."""

_READ_ONLY = frozenset({"read"})


class Workspace:
    """The tools over one transport."""

    def __init__(self, transport: Transport, redact: Redactor, tools: Sequence[Tool] = DEFAULT_TOOLS) -> None:
        """Offer ``tools``; results are redacted as those of the loop are (L5)."""
        self._transport, self._redact = transport, redact
        self._tools = {tool.schema.name: tool for tool in tools}
        self._running: set[asyncio.Task[Produced]] = set()

    def server(self) -> Server[Any]:
        """Return the MCP server."""
        return Server(
            NAME, version=version("asp-agent"), on_list_tools=self._list, on_call_tool=self._call,
            instructions=f"The working directory of these tools is {self._transport.workspace}.",
        )  # fmt: skip

    async def aclose(self) -> None:
        """Kill what still runs, and wait for that for at most 30 s."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=KILL_WAIT_S)

    async def _list(
        self, _context: ServerRequestContext[Any], _params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(tool) for tool in self._tools.values()])

    async def _call(self, context: ServerRequestContext[Any], params: types.CallToolRequestParams) -> types.CallToolResult:
        tool = self._tools.get(params.name)
        if tool is None:
            return _result(Produced(wording.unknown_tool(params.name, list(self._tools)), is_error=True))
        try:
            arguments = parse(json.dumps(params.arguments or {}), tool.schema.parameters)
        except ArgumentsInvalid as fault:
            return _result(Produced(f"{fault} Nothing was run.", is_error=True))
        return _result(await self._perform(tool, arguments, context))

    async def _perform(self, tool: Tool, arguments: Mapping[str, Any], context: ServerRequestContext[Any]) -> Produced:
        # A task of its own: the SDK cancels by anyio's scopes, which cancel every later await as well, and then the
        # transport could not finish killing in the sandbox.
        task = asyncio.create_task(perform(tool, arguments, self._transport, self._redact))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        began = time.monotonic()
        try:
            while not (await asyncio.wait({task}, timeout=PROGRESS_EVERY_S))[0]:
                seconds = time.monotonic() - began
                # Does nothing for a caller that gave no token; one that is gone does not end the call.
                with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await context.session.report_progress(seconds, message=f"running for {seconds:.0f} s")
        except asyncio.CancelledError:
            task.cancel()
            raise
        produced = task.result()
        return Produced(self._redact(produced.content), produced.is_error, produced.failure)


async def serve(transport: Transport, redact: Redactor) -> None:
    """Serve stdin and stdout until stdin ends. What runs then is killed in the sandbox."""
    workspace = Workspace(transport, redact)
    server = workspace.server()
    try:
        # Only iteration is asked of it. The SDK's own reader sits in a thread that no cancelling ends.
        lines = cast("anyio.AsyncFile[str] | None", await _stdin_lines())
        async with stdio_server(stdin=lines) as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())
    finally:
        await workspace.aclose()


async def _stdin_lines() -> AsyncIterator[str] | None:
    """Return the lines of stdin, read by the event loop; None if that cannot wait for it (a file, /dev/null: they end)."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    try:
        pipe = os.fdopen(os.dup(0), "rb", 0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    except (OSError, ValueError):
        return None

    async def lines() -> AsyncIterator[str]:
        while line := await reader.readline():
            yield line.decode("utf-8", "replace")

    return lines()


def _described(tool: Tool) -> types.Tool:
    schema = tool.schema
    hints = types.ToolAnnotations(read_only_hint=schema.name in _READ_ONLY, open_world_hint=False)
    return types.Tool(name=schema.name, description=schema.description, input_schema=dict(schema.parameters), annotations=hints)


def _result(produced: Produced) -> types.CallToolResult:
    content: list[Any] = [types.TextContent(type="text", text=_sendable(produced.content))]
    content += [
        types.ImageContent(type="image", data=base64.b64encode(image.data).decode(), mime_type=image.media_type)
        for image in getattr(produced, "images", ())
    ]
    return types.CallToolResult(content=content, is_error=produced.is_error)


def _sendable(text: str) -> str:
    """A lone surrogate has no UTF-8, and would end the server."""
    return text.encode("utf-8", "replace").decode()
