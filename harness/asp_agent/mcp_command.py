"""``asp-agent mcp``: serve the sandbox's tools to an MCP host. Imported for ``--help`` too, so the SDK comes late."""

import argparse
import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from asp.errors import AspError, UsageError
from asp.terminal import printable

if TYPE_CHECKING:
    from asp.stdio import Parser

INTERRUPTED = 130


def add_to(commands: "argparse._SubParsersAction[Parser]") -> None:  # pyright: ignore[reportPrivateUsage]
    """Register the subcommand."""
    serve = commands.add_parser(
        "mcp", allow_abbrev=False, help="serve the tools to an MCP host over stdio",
        description="Serve the tools read, write, edit and bash to an MCP host over stdin and stdout; they work in the sandbox "
        "that .asp.json names. The host should have no other tools that reach this machine.",
        epilog="Exit: 0 when the host closes stdin, 2 configuration, 4 sandbox not reached or lost, 130 interrupted.",
    )  # fmt: skip
    serve.add_argument("--contract", metavar="PATH", help="use this contract, not the nearest .asp.json; naming it trusts it")
    serve.add_argument("--allow-same-host", action="store_true", help="go on although the sandbox is this machine")


def run(options: argparse.Namespace) -> int:
    """Serve until the host closes stdin; return the exit code. A failure is one line on stderr."""
    try:
        asyncio.run(_serve(options))
    except AspError as error:
        for line in str(error).splitlines():
            print(f"asp-agent: {printable(line, newlines=False)}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED
    return 0


async def _serve(options: argparse.Namespace) -> None:
    from asp import identity, ssh, trust  # noqa: PLC0415 - not for --help
    from asp_agent.redact import Redactor  # noqa: PLC0415 - not for --help

    try:
        from asp_agent import mcp_server  # noqa: PLC0415 - 0.5 s
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"mcp", "anyio"}:
            raise
        msg = "the MCP SDK is not installed; install with: pip install 'asp-agent[agent]'"
        raise UsageError(msg) from error
    trusted = trust.resolve(options.contract, Path())
    me = asyncio.current_task()
    with contextlib.suppress(NotImplementedError):
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, me.cancel if me is not None else sys.exit)
    async with ssh.open_transport(trusted, allow_same_host=options.allow_same_host) as transport:
        await mcp_server.serve(transport, Redactor(identity.redaction_values(trusted.contract)))
