"""The command ``asp-agent``: put the parts together, and turn every end of a run into one line and an exit code (L7).

Imported for ``--help`` too, so what costs time (SDKs, asyncssh, jsonschema) is imported where it is used.
"""

import argparse
import asyncio
import contextlib
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from asp import stdio
from asp.errors import AspError, ContractUntrusted, UsageError
from asp_agent import mcp_command
from asp_agent.display import Display, Header, JsonDisplay, Outcome, reason_of
from asp_agent.errors import OutputClosed
from asp_agent.limits import DEFAULT_MAX_TURNS, Cause, Limits, Stopped, Watch
from asp_agent.redact import Redactor
from asp_agent.text_display import TextDisplay

if TYPE_CHECKING:
    from asp.trust import TrustedContract
    from asp_agent.agent import Agent
    from asp_agent.messages import Model
    from asp_agent.run import RunFolder

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code (L7)."""
    stdio.ready()
    try:
        options = _parser().parse_args(argv)
        if "command" in options:
            return int(options.command(options))
        display: Display = JsonDisplay(sys.stdout) if options.json else TextDisplay(sys.stdout, sys.stderr)
        status = _Session(options, display).run()
    except SystemExit as ended:  # argparse: --help, or a complaint
        status = ended.code if isinstance(ended.code, int) else 1
    written = _flush(sys.stdout)
    _flush(sys.stderr)
    return status if written else status or 1


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


def _parser() -> argparse.ArgumentParser:
    parser = stdio.Parser(
        prog="asp-agent",
        allow_abbrev=False,
        description="An agent that thinks here and works in a sandbox over SSH (.asp.json).",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run", allow_abbrev=False, help="work on one task",
        description="Work on one task in the sandbox that .asp.json names.",
        epilog="Exit: 0 done, 1 failed, 2 configuration, 3 limit, 4 transient or sandbox lost, 130 interrupted.",
    )  # fmt: skip
    run.add_argument("task", type=_task, help="what to do")
    run.add_argument("--model", metavar="PROVIDER/NAME", help="the model; scripted/FILE.json plays a file and calls none")
    run.add_argument("--base-url", metavar="URL", help="another address of the model's API")
    run.add_argument(
        "--max-turns",
        type=_count,
        default=DEFAULT_MAX_TURNS,
        metavar="N",
        help="at most N turns of the model (%(default)s)",
    )
    run.add_argument("--timeout", type=_seconds, metavar="S", help="stop the whole run after S seconds")
    run.add_argument("--json", action="store_true", help="JSON lines on stdout; the last one has the type result")
    run.add_argument("--contract", metavar="PATH", help="use this contract instead of the nearest .asp.json; naming it trusts it")
    run.add_argument("--allow-same-host", action="store_true", help="go on although the sandbox is this machine")
    mcp_command.add_to(commands)
    return parser


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


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if math.isfinite(seconds) and seconds > 0:
            return seconds
    msg = "must be a number of seconds greater than 0"
    raise argparse.ArgumentTypeError(msg)


def _working_directory() -> Path:
    """Return where we are. Raises UsageError if somebody removed it under us."""
    try:
        return Path.cwd()
    except OSError as error:
        msg = f"the working directory does not exist any more, or cannot be entered ({error.strerror}); change to another folder"
        raise UsageError(msg) from error


def _ask(question: str) -> str:
    """Ask on stderr, since stdout is for the answer (L7). Raises EOFError at the end of input."""
    sys.stderr.write(question)
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer:
        raise EOFError
    return answer


class _Session:
    """One ``asp-agent run``: what has been made so far, so that every end is recorded, shown and returned alike."""

    def __init__(self, options: argparse.Namespace, display: Display) -> None:
        self._options, self._display = options, display
        self._redact = Redactor()
        self._started = time.monotonic()
        self._folder: RunFolder | None = None
        self._agent: Agent | None = None
        self._outcome: Outcome | None = None

    def run(self) -> int:
        try:
            trusted, model = self._configure()
            asyncio.run(self._work(trusted, model))
        except Stopped as stopped:  # while the connection was being made
            code = INTERRUPTED if stopped.cause is Cause.INTERRUPTED else 3
            self._set(Outcome(code, "interrupted" if code == INTERRUPTED else "timeout", str(stopped)))
        except KeyboardInterrupt:
            self._set(Outcome(INTERRUPTED, "interrupted", "interrupted by the user"))
        except AspError as error:
            self._set(Outcome(error.exit_code, reason_of(error), self._redact(str(error))))
        except Exception as error:  # noqa: BLE001 - the last one who can record it; shown as what it is, a bug
            self._set(self._bug(error))
        return self._finish()

    def _configure(self) -> "tuple[TrustedContract, Model]":
        """Everything that can be wrong before anything is connected."""
        from asp import contract, trust  # noqa: PLC0415 - not for --help
        from asp_agent.models import DEFAULT_MODEL, open_model  # noqa: PLC0415 - not for --help

        here = _working_directory()
        try:
            trusted = trust.resolve(self._options.contract, here)
        except ContractUntrusted:
            if self._options.json or not sys.stdin.isatty() or not sys.stderr.isatty():
                raise
            trusted = trust.confirm_on_terminal(contract.load(contract.find(here)), _ask)
        return trusted, open_model(self._options.model or DEFAULT_MODEL, base_url=self._options.base_url)

    async def _work(self, trusted: "TrustedContract", model: "Model") -> None:
        from asp import identity, ssh  # noqa: PLC0415 - not for --help
        from asp_agent import prompt  # noqa: PLC0415 - not for --help
        from asp_agent.agent import Agent  # noqa: PLC0415 - not for --help
        from asp_agent.run import RunFolder  # noqa: PLC0415 - not for --help
        from asp_agent.tools import DEFAULT_TOOLS  # noqa: PLC0415 - not for --help

        options, contract = self._options, trusted.contract
        limits = Limits(options.max_turns, options.timeout)
        watch = Watch(self._give_up)
        self._redact = redact = Redactor([*model.secrets(), *identity.redaction_values(contract)])
        self._folder = RunFolder.create(_frozen(options.task, trusted, model, limits), redact)
        header = Header(
            model=model.name,
            scripted=model.scripted,
            contract=str(contract.path),
            workspace=str(contract.workspace),
            max_turns=limits.max_turns,
            timeout_s=limits.timeout_s,
            run=str(self._folder.path),
        )
        with watch.listening(limits.timeout_s):
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(model.aclose)
                with watch.stoppable():  # a sandbox that is not there must not cost a model call
                    transport = await stack.enter_async_context(
                        ssh.open_transport(trusted, allow_same_host=options.allow_same_host)
                    )
                    facts = await prompt.look(transport)
                self._display.start(header)  # not before: a run that cannot begin is one line
                system = prompt.system_prompt(facts, str(transport.workspace))
                self._folder.event("start", system=system, facts=facts)
                self._agent = Agent(model, transport, DEFAULT_TOOLS, system, self._folder, self._display, redact, watch, limits)
                self._set(await self._agent.run(options.task))

    def _set(self, outcome: Outcome) -> None:
        """Keep the first outcome: what fails while we close changes nothing of how the run ended."""
        if self._outcome is None:
            self._outcome = outcome
        elif outcome.message:
            self._note(f"while closing: {outcome.message}")

    def _note(self, text: str) -> None:
        """Show a line at the end, where a stdout that is gone changes nothing any more."""
        with contextlib.suppress(OutputClosed):
            self._display.note(text)

    def _bug(self, error: Exception) -> Outcome:
        if os.environ.get("ASP_DEBUG") == "1":
            sys.stderr.write(self._redact("".join(traceback.format_exception(error))))
        line = str(error).partition("\n")[0]
        hint = "" if os.environ.get("ASP_DEBUG") == "1" else "; run again with ASP_DEBUG=1 to see where"
        return Outcome(1, "bug", self._redact(f"this is a bug of asp-agent: {type(error).__name__}: {line}{hint}"))

    def _finish(self) -> int:
        """Record and show the outcome, once, and return the exit code."""
        outcome = self._outcome or Outcome(1, "bug", "this is a bug of asp-agent: the run has no end")
        seconds = time.monotonic() - self._started
        if self._folder is not None:
            try:
                self._folder.final(**asdict(outcome), duration_s=round(seconds, 3))
            except AspError as error:  # a run without its record is not done, whatever the model says
                code = outcome.exit_code or error.exit_code
                outcome = replace(outcome, exit_code=code, reason=reason_of(error), message=str(error))
        try:
            self._display.result(outcome, str(self._folder.path) if self._folder else None, seconds)
        except OutputClosed as closed:
            if not isinstance(closed.__cause__, BrokenPipeError):  # who stopped reading has seen enough
                with contextlib.suppress(OSError):
                    print(f"asp-agent: {closed}", file=sys.stderr, flush=True)
            return outcome.exit_code or closed.exit_code
        return outcome.exit_code

    def _give_up(self) -> None:
        """Record what is known and leave, whatever still waits for the sandbox: the second Ctrl-C."""
        code = INTERRUPTED
        try:
            if self._agent is not None:
                running = self._agent.running or self._agent.interrupted
                if self._outcome is None:
                    self._set(self._agent.abandon())
                if running:
                    self._note(self._redact(f"not waited for; it may still run in the sandbox: {running}"))
            if self._outcome is None:
                self._set(Outcome(INTERRUPTED, "interrupted", "interrupted by the user"))
            code = self._finish()
            sys.stdout.flush()
        finally:
            os._exit(code)


def _frozen(task: str, trusted: "TrustedContract", model: "Model", limits: Limits) -> dict[str, object]:
    """Return what ``run.json`` says besides its own name and time."""
    import platform  # noqa: PLC0415 - not for --help
    from importlib.metadata import version  # noqa: PLC0415 - not for --help

    from asp_agent.tools import DEFAULT_TOOLS  # noqa: PLC0415 - not for --help

    contract = trusted.contract
    return {
        "task": task,
        "contract": {"path": str(contract.path), "digest": contract.digest, "workspace": str(contract.workspace)},
        "model": {"name": model.name, "scripted": model.scripted},
        "limits": asdict(limits),
        "tools": [asdict(tool.schema) for tool in DEFAULT_TOOLS],
        "versions": {"asp-agent": version("asp-agent"), "python": platform.python_version()},
    }


if __name__ == "__main__":
    sys.exit(main())
