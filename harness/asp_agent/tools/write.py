"""The ``write`` tool: a whole file."""

from asp.transport import Transport
from asp_agent.messages import ToolSchema
from asp_agent.tools.tool import Arguments, Produced, Redact, Tool

SCHEMA = ToolSchema(
    name="write",
    description="Write a file: make it, or replace all that it holds. Missing directories are made.",
    parameters={
        "type": "object",
        "properties": {
            "path": {
                "type": "string",
                "minLength": 1,
                "description": "File to write, absolute or relative to the working directory",
            },
            "content": {"type": "string", "description": "All that the file shall hold"},
        },
        "required": ["path", "content"],
        "additionalProperties": False,
    },
)


async def write(arguments: Arguments, transport: Transport, _: Redact) -> Produced:
    """Make the file hold exactly ``content`` in UTF-8. Raises what ``Transport.write`` raises."""
    path: str = arguments["path"]
    if "\0" in path:
        return Produced("The path holds a NUL character, which no file name can have.", is_error=True)
    data = str(arguments["content"]).encode()
    await transport.write(path, data)
    return Produced(f"Wrote {len(data):,} bytes to {path}.")


WRITE = Tool(SCHEMA, summary="path", run=write)
