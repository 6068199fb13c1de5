"""The command ``asp``: what needs only a contract.

Each subcommand is one function ``cmd_NAME(args) -> exit status``, registered in :func:`build_parser`. The answer goes
to stdout, everything else to stderr; a failure is one line and the exit code of its class (L7). asyncssh and
jsonschema are imported by the commands that need them, so that ``asp --help`` is instant.
"""

import argparse
import io
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from asp import shell, stdio, trust, verbs
from asp.contract import Contract, find, load, local_user, shown_path
from asp.errors import AspError, ContractInvalid, ContractUnsafe, ContractUntrusted, IdentityError, UsageError
from asp.identity import load_identity
from asp.probe import command as probe_command
from asp.terminal import printable

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


class AnswerLost(AspError):
    """What was to be printed could not be written."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command; each subcommand sets ``run``, from the arguments to an exit status."""
    parser = stdio.Parser(
        prog="asp",
        description="Use a sandbox that .asp.json describes. The contract is found by walking up from here, "
        f"or named by {trust.ENVIRONMENT_VARIABLE}.",
        epilog="exit status: 0 done, 1 failed, 2 configuration, 4 sandbox not reached or lost, 130 interrupted",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    check = commands.add_parser(
        "check",
        help="say what is wrong with a contract",
        description="Check a contract and print one line for each finding. Connects to nothing and needs no trust.",
    )
    check.add_argument("path", nargs="?", metavar="PATH", help="the contract, or a folder to look in and above")
    check.add_argument("--connect", action="store_true", help="also log in and run a command; the file must be trusted")
    check.add_argument("--allow-same-host", action="store_true", help="with --connect: the sandbox may be this machine")
    check.set_defaults(run=cmd_check)

    trust_command = commands.add_parser(
        "trust",
        help="allow a contract to be used",
        description="Show where a contract leads and remember that it may be used, until one byte of it changes.",
    )
    trust_command.add_argument("path", nargs="?", metavar="PATH", help="the contract, or a folder to look in and above")
    trust_command.set_defaults(run=cmd_trust)
    verbs.add_to(commands)
    shell.add_to(commands)
    probe_command.add_to(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``asp`` and return its exit status (L7). Bad input is one line on stderr, never a traceback."""
    stdio.ready()
    status = EXIT_FAILED
    try:
        args = build_parser().parse_args(argv)
        status = args.run(args)
    except SystemExit as error:  # argparse: --help, or a complaint
        status = error.code if isinstance(error.code, int) else EXIT_FAILED
    except AspError as error:
        _complain(str(error))
        status = error.exit_code
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our answer has seen enough
        status = EXIT_FAILED
    return status if _flushed() else EXIT_FAILED


def cmd_check(args: argparse.Namespace) -> int:
    """Print the findings on a contract; 0 if it can be used, 2 if not. With ``--connect`` also what the server says."""
    path = _contract_path(args.path)
    try:
        contract = load(path)
    except (ContractInvalid, ContractUnsafe) as error:
        answer(str(error))
        return stdio.EXIT_CONFIGURATION
    shown = shown_path(contract.path)
    workspace = printable(str(contract.workspace), newlines=False)
    answer(f"{shown}: ok: {contract.endpoint}, workspace {workspace}")
    for warning in _warnings(contract):
        answer(f"{shown}: {warning}")
    if args.connect:
        trusted = trust.require(contract, named=_is_named(args.path))
        status = _connect(trusted, allow_same_host=args.allow_same_host)
        if status != 0:
            answer(f"{shown}: {contract.endpoint}: logged in, but `exit 0` ended with status {status}")
            return EXIT_FAILED
        answer(f"{shown}: ok: {contract.endpoint} ran a command")
    return 0


def cmd_trust(args: argparse.Namespace) -> int:
    """Show where a contract leads and remember it. A file that is invalid or that others can write is refused."""
    contract = load(_contract_path(args.path))
    answer(trust.describe(contract))
    if trust.is_remembered(contract):
        answer("trusted already; nothing has changed")
    else:
        trust.remember(contract)
        answer(f"trusted from now on, until one byte of it changes (SHA-256 {contract.digest})")
    return 0


def _contract_path(named: str | None) -> Path:
    """Return the file that PATH, ``ASP_CONTRACT`` or the working directory stands for; from folders it is walked up."""
    if named is None:
        variable = os.environ.get(trust.ENVIRONMENT_VARIABLE)
        return trust.named_path(variable, Path()) if variable else find(Path())
    if not named:
        msg = "PATH is empty; name a contract or a folder, or leave it out"
        raise UsageError(msg)
    return find(Path(named)) if trust.is_folder(Path(named)) else Path(named)


def _is_named(named: str | None) -> bool:
    """Whether a person named this very file, and not only a folder to look in (C3)."""
    if named is None:
        return bool(os.environ.get(trust.ENVIRONMENT_VARIABLE))
    return not trust.is_folder(Path(named))


def _warnings(contract: Contract) -> list[str]:
    """Return what is allowed but may surprise, each ``FIELD: warning: what; what to do``."""
    found: list[str] = []
    if contract.user is None:
        found.append(f"connection.user: warning: absent, so the login name is {_local_user()}, your local account's")
    try:
        load_identity(contract)
    except IdentityError as error:
        found.append(f"connection.identity: warning: not usable on this machine: {error}")
    if contract.identity is None:
        found.append("connection.identity: warning: absent, so no key is offered; fine if the server asks for none")
    if contract.host_key is None:
        found.append('connection.host_key: warning: no key is pinned, so a connection is refused; write "TYPE BASE64"')
    try:
        trust.require(contract, named=False)
    except (ContractUntrusted, UsageError) as error:
        typed = printable(shlex.quote(str(contract.path)), newlines=False)
        cause = f"not trusted; type: asp trust {typed}" if isinstance(error, ContractUntrusted) else str(error)
        found.append(f"(file): warning: {cause}")
    return found


def _local_user() -> str:
    try:
        return printable(local_user(), newlines=False)
    except UsageError as error:
        return f"not known ({error})"


def _connect(trusted: trust.TrustedContract, *, allow_same_host: bool) -> int:
    """Log in, run one command that does nothing, and return its status. Raises AspError."""
    import asyncio  # noqa: PLC0415 - only --connect needs it

    from asp.ssh import open_transport  # noqa: PLC0415

    async def run() -> int:
        async with open_transport(trusted, allow_same_host=allow_same_host) as transport:
            return (await transport.exec("exit 0")).status

    return asyncio.run(run())


def answer(text: str) -> None:
    """Print one part of the answer to stdout. Raises AnswerLost, or BrokenPipeError if the reader is gone."""
    try:
        print(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        msg = f"cannot write the answer ({error.strerror})"
        raise AnswerLost(msg) from error


def _complain(text: str) -> None:
    for line in text.splitlines():
        print(f"asp: {line}", file=sys.stderr)


def _flushed() -> bool:
    """Write out what was printed; false if the reader is gone or the disk is full."""
    if not isinstance(sys.stdout, io.TextIOWrapper):  # None: started with stdout closed
        return True
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            _complain(f"cannot write the answer ({error.strerror})")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again at exit, and complains
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
