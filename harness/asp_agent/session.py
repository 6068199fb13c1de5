"""One ``asp-agent run``: put the parts together, so that every end is recorded, shown and returned alike (L7)."""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from asp.errors import AspError, ContractUntrusted, UsageError
from asp_agent import answer_file
from asp_agent.decide import Decide, allow_all
from asp_agent.display import Display, Header, Outcome, reason_of
from asp_agent.errors import OutputClosed
from asp_agent.input import FIRST_BYTE_S, read_piped, with_piped
from asp_agent.limits import Cause, Limits, Stopped, Watch, ignore_signals, one_ctrl_c
from asp_agent.redact import Redactor

if TYPE_CHECKING:
    from asp.transport import Transport
    from asp.trust import TrustedContract
    from asp_agent.agent import Agent
    from asp_agent.messages import Model
    from asp_agent.meter import Meter
    from asp_agent.policy import Policy
    from asp_agent.resume import Resumed
    from asp_agent.run import RunFolder

INTERRUPTED = 130


@dataclass(frozen=True)
class _Parts:
    """Everything that a run needs and that can be wrong before anything is connected."""

    trusted: "TrustedContract"
    model: "Model"
    task: str
    meter: "Meter"
    window: int | None
    policy: "Policy | None"
    resumed: "Resumed | None"


class Session:
    """What has been made so far of one run."""

    def __init__(self, options: argparse.Namespace, display: Display) -> None:
        """Nothing is made yet."""
        self._options, self._display = options, display
        self._redact = Redactor()
        self._started = time.monotonic()
        self._folder: RunFolder | None = None
        self._agent: Agent | None = None
        self._outcome: Outcome | None = None

    def run(self) -> int:
        """Run to the end and return the exit code. From then on signals are ignored: the process only has to go."""
        try:
            one_ctrl_c()
            parts = self._configure()
            asyncio.run(self._work(parts))
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

    def _configure(self) -> _Parts:
        from asp import contract, trust  # noqa: PLC0415 - not for --help
        from asp_agent import models, policy, pricing, resume, runs  # noqa: PLC0415 - not for --help
        from asp_agent.meter import Meter  # noqa: PLC0415 - not for --help

        options = self._options
        for file in filter(None, (options.output, options.export_atif)):
            answer_file.check(file)
        rules = policy.load(options.policy) if options.policy is not None else None
        task = self._task()
        here = _working_directory()
        try:
            trusted = trust.resolve(options.contract, here)
        except ContractUntrusted:
            if options.json or not sys.stdin.isatty() or not sys.stderr.isatty():
                raise
            trusted = trust.confirm_on_terminal(contract.load(contract.find(here)), _ask)
        resumed = None
        if options.go_on or options.resume is not None:
            folder = resume.latest(trusted.contract) if options.go_on else runs.find(options.resume)
            resumed = resume.resume(folder, trusted.contract, task)
        name = options.model or (resumed.model if resumed else models.DEFAULT_MODEL)
        model = models.open_model(name, base_url=options.base_url, effort=options.effort)
        price = pricing.parse_price(options.price) if options.price else pricing.known_price(name, options.base_url)
        meter = Meter(price, options.max_budget_usd, options.max_tokens_total)
        if resumed is not None:
            resumed.count(meter)
        window = options.context_window or pricing.context_window(name, options.base_url)
        return _Parts(trusted, model, task, meter, window, rules, resumed)

    def _task(self) -> str:
        options = self._options
        if options.task is None and not (options.go_on or options.resume):
            msg = "say what to do: asp-agent run TASK; see: asp-agent run --help"
            raise UsageError(msg)
        piped = read_piped()
        if piped is None:
            self._note(f"nothing came on standard input in {FIRST_BYTE_S:g} s; going on without it")
        return with_piped(options.task or "", piped or "")

    async def _work(self, parts: _Parts) -> None:
        from asp import identity, ssh  # noqa: PLC0415 - not for --help
        from asp_agent import approvals, context_files, prompt  # noqa: PLC0415 - not for --help
        from asp_agent.agent import Agent  # noqa: PLC0415 - not for --help
        from asp_agent.run import RunFolder  # noqa: PLC0415 - not for --help
        from asp_agent.tools import DEFAULT_TOOLS  # noqa: PLC0415 - not for --help

        options, contract, model = self._options, parts.trusted.contract, parts.model
        limits = Limits(options.max_turns, options.timeout)
        watch = Watch(self._give_up)
        self._redact = redact = Redactor([*model.secrets(), *identity.redaction_values(contract)])
        self._folder = RunFolder.create(_frozen(parts, limits, options), redact)
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
                        ssh.open_transport(parts.trusted, allow_same_host=options.allow_same_host)
                    )
                    facts = await prompt.look(transport)
                    notes = [] if options.no_context_files else await context_files.read(transport, redact)
                self._display.start(header)  # not before: a run that cannot begin is one line
                if notes:
                    self._note(f"the prompt holds {', '.join(one.described() for one in notes)}")
                system = prompt.system_prompt(facts, str(transport.workspace)) + context_files.prompt(notes)
                self._folder.event("start", system=system, facts=facts)
                self._agent = agent = Agent(
                    model, transport, DEFAULT_TOOLS, system, self._folder, self._display, redact, watch, limits,
                    decide=_decide(parts.policy, transport), meter=parts.meter, window=parts.window,
                    approve=approvals.approver(self._display, programs=options.json),
                )  # fmt: skip
                if parts.resumed is not None:
                    agent.take_up(parts.resumed.turns)
                self._set(await agent.run(parts.task if parts.resumed is None else ""))

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
        ignore_signals()
        outcome = self._outcome or Outcome(1, "bug", "this is a bug of asp-agent: the run has no end")
        seconds = time.monotonic() - self._started
        try:
            if outcome.exit_code == 0 and self._options.output is not None:
                answer_file.write(self._options.output, outcome.text)
            if self._folder is not None:
                self._folder.final(**asdict(outcome), duration_s=round(seconds, 3))
            if self._folder is not None and self._options.export_atif is not None:
                export(self._folder.path, self._options.export_atif)
        except AspError as error:  # a run without its record, or its answer, is not done, whatever the model says
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
                running = self._agent.calls.running or self._agent.calls.interrupted
                if self._outcome is None:
                    self._set(self._agent.abandon())
                for call in running:
                    self._note(self._redact(f"not waited for; it may still run in the sandbox: {call}"))
            if self._outcome is None:
                self._set(Outcome(INTERRUPTED, "interrupted", "interrupted by the user"))
            code = self._finish()
            sys.stdout.flush()
        finally:
            os._exit(code)


def export(folder: Path, file: Path) -> None:
    """Write the run in ``folder`` as an ATIF trajectory to ``file``. Raises RunFolderFailed, AnswerNotWritten."""
    from asp_agent import atif  # noqa: PLC0415 - only when it is asked for

    answer_file.write(file, json.dumps(atif.read(folder), indent=1))


def _decide(policy: "Policy | None", transport: "Transport") -> Decide:
    if policy is None:
        return allow_all
    from asp_agent.policy import Judge, resolve_in  # noqa: PLC0415 - only when it is asked for

    return Judge(policy, transport.workspace, resolve_in(transport))


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


def _frozen(parts: _Parts, limits: Limits, options: argparse.Namespace) -> dict[str, object]:
    """Return what ``run.json`` says besides its own name and time."""
    import platform  # noqa: PLC0415 - not for --help
    from importlib.metadata import version  # noqa: PLC0415 - not for --help

    from asp_agent.tools import DEFAULT_TOOLS  # noqa: PLC0415 - not for --help

    contract = parts.trusted.contract
    budget = None if options.max_budget_usd is None else str(options.max_budget_usd)
    return {
        "task": parts.task,
        "resumed": parts.resumed.run if parts.resumed is not None else None,
        "contract": {"path": str(contract.path), "digest": contract.digest, "workspace": str(contract.workspace)},
        "model": {"name": parts.model.name, "scripted": parts.model.scripted},
        "limits": {**asdict(limits), "max_budget_usd": budget, "max_tokens_total": options.max_tokens_total},
        "policy": _digest(options.policy),
        "tools": [asdict(tool.schema) for tool in DEFAULT_TOOLS],
        "versions": {"asp-agent": version("asp-agent"), "python": platform.python_version()},
    }


def _digest(file: Path | None) -> str | None:
    if file is None:
        return None
    with contextlib.suppress(OSError):
        return "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
    return None
