"""The command ``asp-sandbox``: make sandboxes for repositories. For a person or an orchestrator, never for the agent."""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from asp import stdio
from asp.errors import AspError, UsageError
from asp.terminal import printable
from asp_sandboxes import with_command

if TYPE_CHECKING:
    from asp_sandboxes.docker import Wish
    from asp_sandboxes.provisioning import Gone, Listed, Started

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 1 failed, 2 configuration, 4 the sandbox or gateway is lost."""
    stdio.ready()
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        options = argparse.Namespace(verb="with", words=words[1:]) if words[:1] == ["with"] else _parser().parse_args(words)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)  # each is one Ctrl-C (L7): what was begun is taken back
        status = _run(options)
    except SystemExit as ended:  # argparse: --help, or a complaint
        status = ended.code if isinstance(ended.code, int) else AspError.exit_code
    except AspError as error:
        for line in str(error).splitlines():
            _tell(line)
        status = error.exit_code
    except OSError as error:
        _tell(f"{error.filename or 'the system'}: {error.strerror}")
        status = AspError.exit_code
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            _write(sys.stderr, "\n")  # the terminal has shown ^C
        _tell("interrupted")
        status = INTERRUPTED
    return _ended(status)


def _parser() -> argparse.ArgumentParser:
    parser = stdio.Parser(
        prog="asp-sandbox",
        description="Make a sandbox without a network for a repository, and the .asp.json by which tools find it.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    up = verbs.add_parser("up", help="start a sandbox and write .asp.json into the repository's folder")
    up.add_argument(
        "provider", choices=["local", "docker"],
        help="local: bubblewrap on this machine, no Docker and no root needed; docker: a container of any image",
    )  # fmt: skip
    up.add_argument("--name", help="what to call it (default: made from the folder's name)")
    up.add_argument("--repo", type=_folder, default=Path(), metavar="DIR", help="the repository's folder (default: this one)")

    here = up.add_argument_group("local")
    here.add_argument(
        "--ro", type=_folder, action="append", metavar="DIR",
        help="a folder of this machine, such as a toolchain, that is seen read-only at the same path; may be repeated",
    )  # fmt: skip

    docker = up.add_argument_group("docker")
    docker.add_argument("--image", metavar="NAME", help="an image that the engine has; needed")
    docker.add_argument("--user", metavar="USER", help="who the agent is inside (default: the image's user, else agent, 1000)")
    docker.add_argument("--allow-root", action="store_true", help="the agent may be root inside (without capabilities)")
    docker.add_argument("--memory", metavar="SIZE", default="2g", help="such as 512m (%(default)s); --disk comes on top of it")
    docker.add_argument("--disk", metavar="SIZE", default="2g", help="of the workspace, in memory (%(default)s)")
    docker.add_argument("--cpus", type=_cpus, default=2.0, metavar="N", help="such as 1.5 (%(default)g, or what the machine has)")
    docker.add_argument("--pids", type=_pids, default=512, metavar="N", help="processes at most (%(default)s)")
    docker.add_argument(
        "--setup", metavar="CMD", help="run CMD first, as root and with a network, on the pushed files; kept as an image"
    )
    docker.add_argument("--dockerfile", metavar="FILE", help="build this file of the repository and use it as the image")
    docker.add_argument(
        "--setup-network", metavar="NAME", default="bridge", help="the engine's network for --setup (%(default)s)"
    )
    docker.add_argument("--runtime", metavar="NAME", help="a runtime of the engine, such as gVisor's runsc")

    begin = verbs.add_parser("start", help="start a sandbox again that has ended; a container is served again")
    begin.add_argument("name", metavar="NAME")

    down = verbs.add_parser("down", help="stop a sandbox and remove its workspace, keys and .asp.json")
    down.add_argument("name", nargs="?", metavar="NAME")
    down.add_argument("--all", action="store_true", help="all sandboxes of this user")

    once = verbs.add_parser(
        "with", add_help=False, help="a sandbox for one command: up, push, COMMAND, show what changed, pull, down",
        usage=with_command.USAGE,
    )  # fmt: skip
    once.add_argument("words", nargs=argparse.REMAINDER)

    listing = verbs.add_parser("list", help="show the sandboxes of this user")
    listing.add_argument("--json", action="store_true", help="one JSON array, for programs")
    return parser


def _folder(text: str) -> Path:
    if not text:
        msg = "is empty; name a folder, or leave it out for this one"
        raise argparse.ArgumentTypeError(msg)
    return Path(text)


def _cpus(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.01 <= float(text) <= 1024:  # noqa: PLR2004 - what the engine takes
            return float(text)
    msg = "must be a number of CPUs, such as 1.5"
    raise argparse.ArgumentTypeError(msg)


def _pids(text: str) -> int:
    if text.isascii() and text.isdecimal() and 8 <= int(text) <= 1 << 22:  # noqa: PLR2004 - fewer are no sandbox
        return int(text)
    msg = "must be a whole number, 8 or more"
    raise argparse.ArgumentTypeError(msg)


def _wish(options: argparse.Namespace) -> "Wish | None":
    if options.provider != "docker":
        if options.image is not None or options.setup is not None or options.dockerfile is not None:
            msg = "--image, --setup and --dockerfile are for docker: asp-sandbox up docker --image NAME"
            raise UsageError(msg)
        return None
    if options.image is None and options.dockerfile is None:
        msg = "say which image: asp-sandbox up docker --image NAME"
        raise UsageError(msg)
    if options.ro is not None:
        msg = "--ro is for local: asp-sandbox up local --ro DIR"
        raise UsageError(msg)
    from asp_sandboxes import docker  # noqa: PLC0415 - only for its sandboxes

    cpus = min(options.cpus, os.cpu_count() or 1)
    return docker.Wish(
        options.image or "", options.user, options.allow_root, docker.size(options.memory), cpus, options.pids,
        docker.size(options.disk), options.runtime, options.setup, options.dockerfile, options.setup_network,
    )  # fmt: skip


def _run(options: argparse.Namespace) -> int:  # noqa: C901 - one case a verb
    # Here, so that --help and mistakes in the arguments are answered at once.
    from asp_sandboxes import provisioning  # noqa: PLC0415

    match options.verb:
        case "up":
            started = provisioning.up(options.provider, options.repo, options.name, _tell, _wish(options), options.ro)
            for remark in started.remarks:
                _tell(remark)
            _say(_is_up(started))
        case "start":
            _say(_is_up(provisioning.start(options.name, _tell)))
        case "with":
            if options.words[:1] in (["-h"], ["--help"]):
                _say(f"usage: {with_command.USAGE}")
                return 0
            return with_command.With(with_command.parse(options.words)).run()
        case "down":
            if bool(options.name) == options.all:
                msg = "say which sandbox, or --all"
                raise UsageError(msg)
            names = [found.record.name for found in provisioning.listed()] if options.all else [options.name]
            for name in names:
                _say(_is_gone(provisioning.down(name)))
        case _:
            found = provisioning.listed()
            if options.json:
                _say(json.dumps([_as_json(one) for one in found]))
            else:
                for one in found:
                    row = _as_json(one)
                    contract = printable(str(row["contract"]), newlines=False)
                    _say(f"{row['name']:<24}  {row['provider']:<8}  {row['state']:<8}  {row['port']!s:<6}  {contract}")
    return 0


def _is_up(started: "Started") -> str:
    record = started.record
    folder = Path(record.contract).parent
    here = False
    with contextlib.suppress(OSError):  # the working directory may be gone
        here = folder == Path.cwd()
    where = "" if here else f"in {folder}, "
    how, verb = (" as it was", "diff") if started.kept else ("", "push")
    return (
        f"sandbox {record.name} is up: 127.0.0.1:{record.port}, workspace {record.directory}{how}; next, {where}type: asp {verb}"
    )


def _is_gone(gone: "Gone") -> str:
    record = gone.record
    if not record.contract:
        rest = ", its workspace and keys too; its record was lost, so a .asp.json that leads to it stays where it is"
    elif gone.contract_stays:
        rest = f", its workspace and keys too; {printable(record.contract, newlines=False)} was changed and stays"
    else:
        rest = ", its workspace, keys and contract too"
    return f"sandbox {record.name} is gone{rest}"


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
    _write(sys.stdout, f"{printable(text)}\n")  # _ended finds out again what could not be written


def _tell(text: str) -> None:
    _write(sys.stderr, f"asp-sandbox: {printable(text, newlines=False)}\n")


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError):
        stream.write(text)
        stream.flush()


def _ended(status: int) -> int:
    """Write out what was said, and return the exit status: not 0 if the answer did not arrive."""
    fault = _flush(sys.stdout)
    if fault is not None and not isinstance(fault, BrokenPipeError):  # who stopped reading has seen enough
        _tell(f"cannot write the answer ({fault.strerror})")
    _flush(sys.stderr)
    return status if fault is None else status or AspError.exit_code


def _flush(stream: TextIO) -> OSError | None:
    """Flush; what cannot be written goes nowhere then, else Python tries again at exit, and complains."""
    try:
        stream.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return error
    return None


if __name__ == "__main__":
    sys.exit(main())
