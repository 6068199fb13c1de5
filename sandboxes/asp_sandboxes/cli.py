"""The command ``asp-sandbox``: make sandboxes for repositories. For a person or an orchestrator, never for the agent."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asp.errors import AspError, UsageError
from asp.terminal import printable

if TYPE_CHECKING:
    from asp_sandboxes.provisioning import Listed

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 1 failed, 2 configuration, 4 the sandbox or gateway is lost."""
    options = _parser().parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # each is one Ctrl-C (L7): what was begun is taken back
    try:
        return _run(options)
    except AspError as error:
        for line in str(error).splitlines():
            _tell(line)
        return error.exit_code
    except OSError as error:
        _tell(f"{error.filename or 'the system'}: {error.strerror}")
        return AspError.exit_code
    except KeyboardInterrupt:
        _tell("interrupted")
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asp-sandbox",
        description="Make a sandbox without a network for a repository, and the .asp.json by which tools find it.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    up = verbs.add_parser("up", help="start a sandbox and write .asp.json into the repository's folder")
    up.add_argument("provider", choices=["local"], help="local: bubblewrap on this machine, no Docker and no root needed")
    up.add_argument("--name", help="what to call it (default: made from the folder's name)")
    up.add_argument("--repo", type=Path, default=Path(), metavar="DIR", help="the repository's folder (default: this one)")

    down = verbs.add_parser("down", help="stop a sandbox and remove its workspace, keys and .asp.json")
    down.add_argument("name", nargs="?", metavar="NAME")
    down.add_argument("--all", action="store_true", help="all sandboxes of this user")

    listing = verbs.add_parser("list", help="show the sandboxes of this user")
    listing.add_argument("--json", action="store_true", help="one JSON array, for programs")
    return parser


def _run(options: argparse.Namespace) -> int:
    # Here, so that --help and mistakes in the arguments are answered at once.
    from asp_sandboxes import provisioning  # noqa: PLC0415

    match options.verb:
        case "up":
            record = provisioning.up(options.provider, options.repo, options.name, _tell)
            folder = Path(record.contract).parent
            where = "" if folder == Path.cwd() else f"in {folder}, "
            _say(f"sandbox {record.name} is up: 127.0.0.1:{record.port}, workspace /workspace; next, {where}type: asp push")
        case "down":
            if bool(options.name) == options.all:
                msg = "say which sandbox, or --all"
                raise UsageError(msg)
            names = [found.record.name for found in provisioning.listed()] if options.all else [options.name]
            for name in names:
                provisioning.down(name)
                _say(f"sandbox {name} is gone, its workspace, keys and contract too")
        case _:
            found = provisioning.listed()
            if options.json:
                _say(json.dumps([_as_json(one) for one in found]))
            else:
                for one in found:
                    row = _as_json(one)
                    contract = printable(str(row["contract"]), newlines=False)
                    sys.stdout.write(
                        f"{row['name']:<24}  {row['provider']:<8}  {row['state']:<8}  {row['port']!s:<6}  {contract}\n"
                    )
    return 0


def _as_json(found: "Listed") -> dict[str, str | int | None]:
    record = found.record
    return {
        "name": record.name,
        "provider": record.provider,
        "state": "running" if found.running else "stopped",
        "port": record.port or None,
        "contract": record.contract or None,
        "workspace": str(record.workspace),
    }


def _say(text: str) -> None:
    sys.stdout.write(f"{printable(text)}\n")
    sys.stdout.flush()


def _tell(text: str) -> None:
    sys.stderr.write(f"asp-sandbox: {printable(text, newlines=False)}\n")


if __name__ == "__main__":
    sys.exit(main())
