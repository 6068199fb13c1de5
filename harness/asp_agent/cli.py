"""The command ``asp-agent``: read what was typed, do it, and return an exit code (L7).

Imported for ``--help`` too, so what costs time (SDKs, asyncssh, jsonschema) is imported where it is used.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from asp import stdio
from asp.errors import AspError
from asp.terminal import printable
from asp_agent import mcp_command
from asp_agent.display import Display, JsonDisplay
from asp_agent.options import build_parser
from asp_agent.session import INTERRUPTED, Session, export
from asp_agent.text_display import TextDisplay


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code (L7)."""
    stdio.ready()
    try:
        options = build_parser().parse_args(argv)
        status = mcp_command.run(options) if options.command == "mcp" else _command(options)
    except SystemExit as ended:  # argparse: --help, or a complaint
        status = ended.code if isinstance(ended.code, int) else 1
    written = _flush(sys.stdout)
    _flush(sys.stderr)
    return status if written else status or 1


def _command(options: argparse.Namespace) -> int:
    if options.command == "run":
        text = TextDisplay(sys.stdout, sys.stderr, quiet=options.quiet)
        display: Display = JsonDisplay(sys.stdout) if options.json else text
        return Session(options, display).run()
    try:
        _look(options)
    except AspError as error:
        print(f"asp-agent: {printable(str(error), newlines=False)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # who stopped reading has seen enough
        return 1
    return 0


def _look(options: argparse.Namespace) -> None:
    """Do ``runs``, ``show`` and ``watch``."""
    from asp_agent import runs  # noqa: PLC0415 - not for --help

    match options.command:
        case "runs" if options.json:
            print(json.dumps([dataclasses.asdict(found) for found in runs.listed()]))
        case "runs":
            _print(runs.table(runs.listed()))
        case "show" if options.export_atif is not None:
            export(runs.find(options.run), options.export_atif)
        case "show":
            _print(runs.shown(runs.find(options.run)))
        case _:
            _print(runs.watched(runs.find(options.run)))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _flush(stream: TextIO) -> bool:
    """Flush; what cannot be written goes nowhere then, else Python tries again at exit, and complains."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
