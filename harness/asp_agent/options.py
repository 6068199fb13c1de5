"""What can be typed after ``asp-agent``. Imported for ``--help``: nothing heavy here."""

import argparse
import contextlib
import math
import re
import sys
from decimal import Decimal
from pathlib import Path

from asp import stdio
from asp_agent import mcp_command
from asp_agent.limits import DEFAULT_MAX_TURNS

EFFORTS = ("low", "medium", "high", "xhigh", "max")
EXIT_CODES = "Exit: 0 done, 1 failed, 2 configuration, 3 limit, 4 transient or sandbox lost, 130 interrupted."


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; ``command`` of the result is the name of the command."""
    parser = stdio.Parser(
        prog="asp-agent",
        allow_abbrev=False,
        description="An agent that thinks here and works in a sandbox over SSH (.asp.json).",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    _add_run(commands)
    listing = commands.add_parser("runs", allow_abbrev=False, help="list the runs of this user, the newest first")
    listing.add_argument("--json", action="store_true", help="one JSON array, for programs")
    show = commands.add_parser("show", allow_abbrev=False, help="show what happened in a run")
    show.add_argument("run", metavar="RUN", help="its id, the beginning of it, or last")
    show.add_argument("--export-atif", type=Path, metavar="FILE", help="write it as an ATIF-v1.8 trajectory instead")
    watch = commands.add_parser("watch", allow_abbrev=False, help="follow a run while it runs")
    watch.add_argument("run", metavar="RUN", nargs="?", default="last", help="its id, the beginning of it, or last (%(default)s)")
    mcp_command.add_to(commands)
    return parser


def _add_run(commands: "argparse._SubParsersAction[stdio.Parser]") -> None:  # pyright: ignore[reportPrivateUsage]
    run = commands.add_parser(
        "run", allow_abbrev=False, help="work on one task",
        description="Work on one task in the sandbox that .asp.json names. What is piped in is given along with the task.",
        epilog=EXIT_CODES,
    )  # fmt: skip
    run.add_argument("task", type=_task, nargs="?", help="what to do; with -c or -r it may be left out: then it goes on")
    before = run.add_mutually_exclusive_group()
    before.add_argument("-c", "--continue", action="store_true", dest="go_on", help="go on with the last run in this sandbox")
    before.add_argument("-r", "--resume", metavar="RUN", help="go on with that run: its id, the beginning of it, or last")

    model = run.add_argument_group("model")
    model.add_argument("--model", metavar="PROVIDER/NAME", help="the model; scripted/FILE.json plays a file and calls none")
    model.add_argument("--base-url", metavar="URL", help="another address of the model's API")
    model.add_argument("--effort", choices=EFFORTS, help="how much the model thinks, where its API has a word for it")
    model.add_argument("--no-context-files", action="store_true", help="leave AGENTS.md and CLAUDE.md of the workspace out")

    limits = run.add_argument_group("limits")
    limits.add_argument(
        "--max-turns", type=_count, default=DEFAULT_MAX_TURNS, metavar="N", help="at most N turns of the model (%(default)s)"
    )
    limits.add_argument(
        "--max-budget-usd", type=_dollars, metavar="USD", help="at most so many dollars, what it goes on with included"
    )
    limits.add_argument("--max-tokens-total", type=_count, metavar="N", help="at most N tokens in and out, all requests together")
    limits.add_argument(
        "--price", metavar="IN,OUT[,READ[,WRITE]]", help="dollars for a million tokens, where the price is not known"
    )
    limits.add_argument(
        "--context-window", type=_count, metavar="N", help="the model's context window in tokens, where it is not known"
    )
    limits.add_argument("--timeout", type=_seconds, metavar="S", help="stop the whole run after S seconds")

    sandbox = run.add_argument_group("sandbox")
    sandbox.add_argument("--contract", metavar="PATH", help="use this contract, not the nearest .asp.json; naming it trusts it")
    sandbox.add_argument("--allow-same-host", action="store_true", help="go on although the sandbox is this machine")
    sandbox.add_argument("--policy", type=Path, metavar="FILE", help="rules that say which tool calls are taken")

    output = run.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="JSON lines on stdout; the last one has the type result")
    output.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the last answer to FILE when the run is done")
    output.add_argument("-q", "--quiet", action="store_true", help="only the answer, and what went wrong")
    output.add_argument("--export-atif", type=Path, metavar="FILE", help="write the run as an ATIF-v1.8 trajectory at its end")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version  # noqa: PLC0415 - not for --help

        sys.stdout.write(f"asp-agent {version('asp-agent')}\n")
        parser.exit()


def _task(text: str) -> str:
    if not text.strip():
        msg = "the task is empty"
        raise argparse.ArgumentTypeError(msg)
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _count(text: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        msg = "must be a whole number, 1 or more"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _dollars(text: str) -> Decimal:
    if not re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,6})?", text) or not Decimal(text):
        msg = "must be a number of dollars greater than 0"
        raise argparse.ArgumentTypeError(msg)
    return Decimal(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if math.isfinite(seconds) and seconds > 0:
            return seconds
    msg = "must be a number of seconds greater than 0"
    raise argparse.ArgumentTypeError(msg)
