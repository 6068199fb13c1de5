"""The subcommands of ``asp`` that use the sandbox: exec, read, write, push, diff.

``asp exec`` has the command's own exit status, 124 for its time limit, and 255 for everything that is not the command's
(L7, as ssh does); with ``--json`` one line says which. The others exit as their errors say.
"""

import argparse
import asyncio
import base64
import codecs
import json
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from asp import trust
from asp.errors import AspError, CommandRefused, ConnectionLost, NotStarted
from asp.stdio import Parser
from asp.terminal import printable
from asp.transport import ExecResult, Stream, Transport

EXIT_TIMED_OUT = 124  # as timeout(1)
EXIT_NOT_THE_COMMANDS = 255  # as ssh(1)
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell shows for a local command whose reader went away

_T = TypeVar("_T")


def add_to(commands: "argparse._SubParsersAction[Parser]") -> None:  # pyright: ignore[reportPrivateUsage]
    """Register the subcommands."""
    execute = commands.add_parser(
        "exec", help="run a command in the sandbox",
        description="Run a command by bash -c in the workspace. Its output is ours, stdout and stderr apart; its stdin is empty.",
        epilog="exit status: the command's own; 124 timed out; 255 the command was not run, or its outcome is not known",
    )  # fmt: skip
    execute.add_argument("command", metavar="CMD", help="the command; - reads a script from stdin")
    execute.add_argument("--timeout", type=_seconds, metavar="S", help="kill it after S seconds")
    execute.add_argument("--json", action="store_true", help="print one JSON line instead of the output")
    execute.set_defaults(run=cmd_exec)

    read = commands.add_parser("read", help="print a file of the sandbox")
    read.add_argument("path", metavar="PATH", help="relative to the workspace, or absolute")
    read.set_defaults(run=cmd_read)

    write = commands.add_parser("write", help="write stdin to a file of the sandbox, whole or not at all")
    write.add_argument("path", metavar="PATH", help="relative to the workspace, or absolute")
    write.set_defaults(run=cmd_write)

    push = commands.add_parser(
        "push", help="send the contract's folder into the workspace",
        description="Send the folder that holds the contract into the workspace, with a fresh git history. The contract, .git, "
        "usual credential files, caches and virtual environments stay here; links that leave the folder are refused.",
    )  # fmt: skip
    push.add_argument("--replace", action="store_true", help="empty the workspace first")
    push.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="leave this here too; a name anywhere, or a path with /"
    )
    push.set_defaults(run=cmd_push)

    diff = commands.add_parser(
        "diff", help="show what changed in the workspace since the push",
        description="Print a patch, in git's format, from what was pushed to what the workspace holds now.",
    )  # fmt: skip
    diff.set_defaults(run=cmd_diff)

    pull = commands.add_parser(
        "pull", help="take what changed in the workspace into the folder",
        description="Show what changed in the workspace since the push, ask, and take it into the contract's folder: all of it "
        "or nothing. What changed here too is never overwritten; names and links that lead elsewhere are refused.",
        epilog="exit status: 0 taken, or nothing changed; 1 not taken",
    )  # fmt: skip
    choice = pull.add_mutually_exclusive_group()
    choice.add_argument("--apply", action="store_true", help="do not ask, take it")
    choice.add_argument("--no-apply", action="store_true", help="do not ask, only show")
    pull.set_defaults(run=cmd_pull)

    for parser in (execute, read, write, push, diff, pull):
        parser.add_argument("--contract", metavar="FILE", help="use this contract; naming it is trusting it")
        parser.add_argument("--allow-same-host", action="store_true", help="the sandbox may be this machine")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 10**7:
        msg = f"{text!r} is not a number of seconds above 0"
        raise argparse.ArgumentTypeError(msg)
    return value


def _with_transport(args: argparse.Namespace, use: Callable[[Transport, trust.TrustedContract], Awaitable[_T]]) -> _T:
    """Resolve the contract, connect, and run ``use``."""
    trusted = trust.resolve(args.contract, Path())

    async def run() -> _T:
        from asp.ssh import open_transport  # noqa: PLC0415 - asyncssh takes a third of a second to import

        async with open_transport(trusted, allow_same_host=args.allow_same_host) as transport:
            return await use(transport, trusted)

    return asyncio.run(run())


class OutputFailed(AspError):
    """Our own stdout or stderr cannot be written: a full disk, not a reader that has seen enough."""


class _Output:
    """Our stdout and stderr as a receiver of foreign bytes: raw, but shown and not obeyed on a terminal (L8)."""

    def __init__(self) -> None:
        self._descriptors = {Stream.STDOUT: 1, Stream.STDERR: 2}
        self._decoders = {
            stream: codecs.getincrementaldecoder("utf-8")("replace") if os.isatty(descriptor) else None
            for stream, descriptor in self._descriptors.items()
        }

    async def receive(self, stream: Stream, data: bytes, *, last: bool = False) -> None:
        """Write a piece. Raises BrokenPipeError (the reader went away) and OutputFailed."""
        decoder = self._decoders[stream]
        shown = data if decoder is None else printable(decoder.decode(data, last)).encode("utf-8", "replace")
        await asyncio.to_thread(_write_all, self._descriptors[stream], shown)

    async def end(self) -> None:
        """Write what an unfinished character left."""
        for stream in self._descriptors:
            await self.receive(stream, b"", last=True)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except BrokenPipeError:
        raise
    except OSError as error:
        msg = f"cannot write the output ({error.strerror})"
        raise OutputFailed(msg) from error


def _script(command: str) -> bytes:
    if command != "-":
        return os.fsencode(command)
    return sys.stdin.buffer.read()


def cmd_exec(args: argparse.Namespace) -> int:
    """Run a command; return its status, 124 or 255."""
    script = _script(args.command)
    began = time.monotonic()
    result: ExecResult | None = None
    error: AspError | None = None

    async def run(transport: Transport, _trusted: trust.TrustedContract) -> ExecResult:
        if args.json:
            return await transport.exec(script, timeout_s=args.timeout)
        output = _Output()
        try:
            return await transport.exec(script, timeout_s=args.timeout, keep_bytes=0, on_output=output.receive)
        finally:
            await output.end()

    try:
        result = _with_transport(args, run)
    except AspError as failure:
        error = failure
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    if args.json:
        print(json.dumps(_report(result, error, time.monotonic() - began), ensure_ascii=True))
    else:
        complaint = f"killed after {args.timeout:g} s" if result is not None and result.timed_out else str(error or "")
        for line in complaint.splitlines():
            print(f"asp: {line}", file=sys.stderr)
    if result is None:
        return EXIT_NOT_THE_COMMANDS
    return EXIT_TIMED_OUT if result.timed_out else result.status


def _report(result: ExecResult | None, error: AspError | None, duration_s: float) -> dict[str, object]:
    """Return what ``--json`` prints; ``outcome`` is exited, signalled, timed_out, lost, not_started or refused."""
    stdout, stderr = b"", b""
    report: dict[str, object] = {"outcome": "refused", "exit_status": None, "signal": None, "background": False}
    if result is not None:
        outcome = "timed_out" if result.timed_out else "signalled" if result.signal is not None else "exited"
        report |= {"outcome": outcome, "exit_status": result.exit_status, "signal": result.signal}
        report["background"] = result.background
        stdout, stderr = result.stdout, result.stderr
        report |= {"stdout_bytes": result.stdout_bytes, "stderr_bytes": result.stderr_bytes}
    elif isinstance(error, ConnectionLost):
        report["outcome"] = "lost"
        stdout, stderr = error.stdout, error.stderr
        report |= {"stdout_bytes": len(stdout), "stderr_bytes": len(stderr)}
    elif isinstance(error, NotStarted) and error.exit_code != CommandRefused.exit_code:
        report["outcome"] = "not_started"
    for name, data in (("stdout", stdout), ("stderr", stderr)):
        report[name] = data.decode("utf-8", "replace")
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            report[f"{name}_base64"] = base64.b64encode(data).decode()
    report["error"] = None if error is None else str(error)
    report["duration_s"] = round(duration_s, 3)
    return report


def cmd_read(args: argparse.Namespace) -> int:
    """Print a file."""

    async def run(transport: Transport, _trusted: trust.TrustedContract) -> None:
        data = await transport.read(os.fsencode(args.path))
        output = _Output()
        await output.receive(Stream.STDOUT, data, last=True)

    _with_transport(args, run)
    return 0


def cmd_write(args: argparse.Namespace) -> int:
    """Write stdin to a file."""
    data = sys.stdin.buffer.read()

    async def run(transport: Transport, _trusted: trust.TrustedContract) -> None:
        await transport.write(os.fsencode(args.path), data)

    _with_transport(args, run)
    return 0


def cmd_push(args: argparse.Namespace) -> int:
    """Send the folder; say on stderr what went and what stayed."""
    from asp import archive, trees  # noqa: PLC0415 - tarfile and difflib, only here

    async def run(transport: Transport, trusted: trust.TrustedContract) -> archive.Pushed:
        return await trees.push(transport, trusted.contract, trusted.contract.path.resolve().parent, replace=args.replace,
                                exclude=args.exclude)  # fmt: skip

    report = _with_transport(args, run)
    history = ", fresh git history" if report.git else ""
    print(f"asp: pushed {report.files} files, {report.size} bytes{history}", file=sys.stderr)
    if report.left_out:
        print(f"asp: left here: {', '.join(report.left_out)}", file=sys.stderr)
    return 0


def cmd_diff(args: argparse.Namespace) -> int:
    """Print the patch; odd things about what came go to stderr."""
    from asp import trees  # noqa: PLC0415

    async def run(transport: Transport, trusted: trust.TrustedContract) -> list[str]:
        found = await trees.diff(transport, trusted.contract)
        # In a thread: what takes long is pure computing, and Ctrl-C must end it.
        await _Output().receive(Stream.STDOUT, await asyncio.to_thread(found.patch), last=True)
        return found.odd

    for line in _with_transport(args, run):
        print(f"asp: warning: {line}", file=sys.stderr)
    return 0


def cmd_pull(args: argparse.Namespace) -> int:
    """Show the patch and what would run by itself; take it if somebody says so."""
    from asp import pull, trees  # noqa: PLC0415

    async def run(transport: Transport, trusted: trust.TrustedContract) -> "tuple[trees.Difference, pull.Plan]":
        found = await trees.diff(transport, trusted.contract)
        root = trusted.contract.path.resolve().parent
        made = await asyncio.to_thread(pull.plan, root, found.old, found.new, found.odd)
        await _Output().receive(Stream.STDOUT, await asyncio.to_thread(found.patch), last=True)
        return found, made

    found, made = _with_transport(args, run)
    if not made.changes:
        print("asp: nothing to take", file=sys.stderr)
        return 0
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    for line in made.warnings:
        print(f"asp: {red}look at this before you take it: {line}{plain}", file=sys.stderr)
    count = f"{len(made.changes)} file{'s' if len(made.changes) != 1 else ''}"
    if not args.apply and not args.no_apply and sys.stdin.isatty() and sys.stderr.isatty():
        print(f"asp: take {count} into {printable(str(made.root), newlines=False)}? [y/N] ", end="", file=sys.stderr, flush=True)
        args.apply = sys.stdin.readline().strip().lower() in {"y", "yes"}
    if not args.apply:
        hint = "" if args.no_apply else "; to take it without a terminal, pass --apply"
        print(f"asp: nothing was taken{hint}", file=sys.stderr)
        return 1
    pull.apply(made)
    trees.keep_as_base(trust.resolve(args.contract, Path()).contract, found.new)
    print(f"asp: took {count}", file=sys.stderr)
    return 0
