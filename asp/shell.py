"""``asp shell`` and ``asp ssh-config``: the sandbox for a person, by our own terminal or by the tools that speak ssh."""

import argparse
import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from asp import trust
from asp.contract import Contract, effective_user, is_plain_account
from asp.errors import UsageError, quoted
from asp.identity import identity_path
from asp.state import state_dir, write_private

if TYPE_CHECKING:
    from asp.stdio import Parser

_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NOT_QUOTABLE = re.compile('[\x00-\x1f\x7f"]')


def add_to(commands: "argparse._SubParsersAction[Parser]") -> None:  # pyright: ignore[reportPrivateUsage]
    """Register the subcommands."""
    shell = commands.add_parser(
        "shell", help="a terminal in the sandbox, for you",
        description="Open the login's shell in the workspace, on your terminal. What runs there writes to your terminal as "
        "it is; the agent cannot come here. Enter, then ~. ends it from this side.",
        epilog="exit status: the shell's own; 2 configuration; 4 sandbox not reached or lost",
    )  # fmt: skip
    shell.set_defaults(run=cmd_shell)
    config = commands.add_parser(
        "ssh-config", help="print a Host block for ssh, rsync and editors",
        description="Print a block for an ssh configuration, with the pinned host key and the contract's key and nothing of "
        "yours: asp ssh-config >F; ssh -F F NAME, rsync -e 'ssh -F F', or Include F in ~/.ssh/config for an editor.",
    )  # fmt: skip
    config.add_argument("--name", help="the name to type (default: asp-FOLDER)")
    config.set_defaults(run=cmd_ssh_config)
    for parser in (shell, config):
        parser.add_argument("--contract", metavar="FILE", help="use this contract; naming it is trusting it")
    shell.add_argument("--allow-same-host", action="store_true", help="the sandbox may be this machine")


def cmd_shell(args: argparse.Namespace) -> int:
    """Give the person a shell; return its status."""
    keyboard, screen = 0, 1
    if not (os.isatty(keyboard) and os.isatty(screen)):
        msg = "asp shell needs a terminal; to run a command, type: asp exec CMD"
        raise UsageError(msg)
    trusted = trust.resolve(args.contract, Path())

    async def run() -> int:
        from asp.ssh import SSHTransport  # noqa: PLC0415 - asyncssh takes a third of a second to import
        from asp.ssh.terminal import run_terminal  # noqa: PLC0415 - the same

        me = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGHUP):  # so that the terminal is restored
            asyncio.get_running_loop().add_signal_handler(number, me.cancel if me is not None else sys.exit)
        async with SSHTransport(trusted, allow_same_host=args.allow_same_host) as transport:
            connection = await transport.connect()
            return await run_terminal(connection, transport.workspace, keyboard, screen)

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


def cmd_ssh_config(args: argparse.Namespace) -> int:
    """Print the block."""
    trusted = trust.resolve(args.contract, Path())
    print(ssh_config(trusted.contract, args.name), end="")
    return 0


def ssh_config(contract: Contract, name: str | None = None) -> str:
    """Return a Host block by which OpenSSH's client reaches the sandbox, and nothing else, with nothing of the user's.

    The pinned key is written to a known_hosts file of our own. Raises UsageError for what such a block cannot say or must
    not show: a key in a variable, a user that may be a token (C7), no pinned key, a name that is not a plain word.
    """
    folder = contract.path.resolve().parent
    alias = name if name is not None else "asp-" + (re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-.") or "sandbox")
    if not _ALIAS.fullmatch(alias):
        msg = f"{quoted(alias)} cannot be the name of a Host block: letters, digits, dot, dash and underscore, at most 63"
        raise UsageError(msg)
    if contract.host_key is None:
        msg = f"{contract.path}: no host key is pinned, so ssh could not know the sandbox; add connection.host_key"
        raise UsageError(msg)
    user = effective_user(contract)
    if not is_plain_account(user):
        msg = f"{contract.path}: connection.user is no plain account name; it may be a token, so it is not printed"
        raise UsageError(msg)
    key = " ".join(contract.host_key.split()[:2])
    known = state_dir("known_hosts") / f"{contract.digest}"
    write_private(known, f"{alias} {key}\n".encode())
    lines = [
        f"Host {alias}",
        f"HostName {contract.host}",
        f"Port {contract.port}",
        f"User {user}",
        f"HostKeyAlias {alias}",
        f"UserKnownHostsFile {_quoted(known)}",
        "GlobalKnownHostsFile /dev/null",
        "StrictHostKeyChecking yes",
        "UpdateHostKeys no",
        "VerifyHostKeyDNS no",
        "CheckHostIP no",
        *_identity_lines(contract),
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "ForwardAgent no",
        "ForwardX11 no",
        "PermitLocalCommand no",
        "ProxyCommand none",
        "ControlPath none",
        "SendEnv -*",
    ]
    return "\n    ".join(lines) + "\n"


def _identity_lines(contract: Contract) -> list[str]:
    if contract.identity is None:
        return ["PubkeyAuthentication no", "IdentityAgent none"]
    if contract.identity.file is None:
        msg = f"{contract.path}: the identity is in a variable, which ssh does not read; put the key into a file and name that"
        raise UsageError(msg)
    return [
        f"IdentityFile {_quoted(identity_path(contract).absolute())}", "IdentitiesOnly yes", "IdentityAgent none",
        "PreferredAuthentications publickey",
    ]  # fmt: skip


def _quoted(path: Path) -> str:
    text = str(path)
    if _NOT_QUOTABLE.search(text) or "${" in text:  # ssh expands variables, and has no way to say a quote
        msg = f"{quoted(text)} cannot be written in an ssh configuration"
        raise UsageError(msg)
    return '"' + text.replace("%", "%%") + '"'
