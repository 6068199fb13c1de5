"""``--policy FILE``: a table of rules that says of each tool call whether it is taken (L4, facts/control.md 4.4).

Paths of file tools are judged as written and again where they lead in the sandbox (links, ``..``). Commands are *simple*
if they are nothing but plain words, and then judged by these words; all others are *opaque*. The strictest verdict that
applies wins; where none applies the policy's default does, and that is block unless the file says otherwise.

This stops mistakes, not attackers: a program can open any file whatever its name on the command line, a link can
change between the look and the use, and the sandbox answers for itself where a path leads. The sandbox is the boundary.
"""

import json
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from asp.errors import AspError, UsageError, quoted
from asp.transport import Transport
from asp_agent.decide import Action, Decision, Verdict

MAX_POLICY_BYTES = 1 << 20
LOOK_TIMEOUT_S = 30

Resolve: TypeAlias = Callable[[PurePosixPath], Awaitable[PurePosixPath | None]]
"""Say where an absolute path of the sandbox leads, all links followed; None if that cannot be found out."""

_READS = frozenset({"read", "grep", "find", "ls"})
_WRITES = frozenset({"write", "edit"})
_SIMPLE = re.compile(r"[A-Za-z0-9_@%+=:,./ '\"-]+")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_ANY_MORE = "..."
_UNSAFE = re.compile("[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class ExecRule:
    """A rule for one simple command; ``argv`` may end in ``...``, which stands for any further words."""

    key: str
    argv: tuple[str, ...]
    verdict: Verdict

    def matches(self, words: Sequence[str]) -> bool:
        """Whether the command is the rule's."""
        if self.argv[-1] == _ANY_MORE:
            return tuple(words[: len(self.argv) - 1]) == self.argv[:-1]
        return tuple(words) == self.argv


@dataclass(frozen=True)
class Policy:
    """The rules of one file."""

    default: Verdict
    capabilities: dict[str, Verdict]
    outside: Verdict
    protected: tuple[str, ...]
    denied: frozenset[str]
    exec_rules: tuple[ExecRule, ...]

    def judge_path(self, paths: Sequence[PurePosixPath], operation: str, workspace: PurePosixPath) -> Iterator[Decision]:
        """Judge every form of one path: as written, and where it leads. ``operation`` is read or write."""
        for path in paths:
            if operation in self.denied and self.protects(path, workspace):
                yield Decision(Verdict.BLOCK, f"{path} is protected")
            if self.outside is not Verdict.ALLOW and not _below(path, workspace):
                yield Decision(self.outside, f"{path} is outside the workspace")

    def judge_words(self, words: Sequence[str], workspace: PurePosixPath) -> Iterator[Decision]:
        """Judge a simple command by its words; each could be a path."""
        for rule in self.exec_rules:
            if rule.matches(words):
                yield Decision(rule.verdict, f"rule {rule.key}")
        if self.denied:
            for word in words:
                for part in {word, word.partition("=")[2]} - {""}:
                    if self.protects(normal(workspace / part), workspace):
                        yield Decision(Verdict.BLOCK, f"{part} is protected")

    def protects(self, path: PurePosixPath, workspace: PurePosixPath) -> bool:
        """Whether a normal, absolute path, or a folder above it, is one of the protected."""
        return any(
            pattern.fullmatch(str(each).casefold())
            for pattern in self._patterns(workspace)
            for each in (path, *path.parents)
        )  # fmt: skip

    def _patterns(self, workspace: PurePosixPath) -> list[re.Pattern[str]]:
        return [_glob(str(workspace / pattern.removesuffix("/**")).casefold()) for pattern in self.protected]

    @cached_property
    def is_empty(self) -> bool:
        """Whether nothing depends on where a path leads."""
        return not self.protected and self.outside is Verdict.ALLOW


class Judge:
    """A policy at work in one workspace: what the loop awaits before each call."""

    def __init__(self, policy: Policy, workspace: PurePosixPath, resolve: Resolve) -> None:
        """``resolve`` is asked where the paths of file tools lead."""
        self._policy, self._workspace, self._resolve = policy, normal(workspace), resolve

    async def __call__(self, action: Action) -> Decision:
        """Decide. Whatever cannot be judged is blocked. Raises TransportError if the sandbox is gone."""
        decisions = [decision async for decision in self._decisions(action)]
        if not decisions:
            decisions = [Decision(self._policy.default, "no rule of the policy applies to it")]
        return max(decisions, key=lambda decision: decision.verdict.strictness)

    async def _decisions(self, action: Action) -> AsyncIterator[Decision]:
        policy = self._policy
        if action.tool == "bash":
            command = str(action.arguments.get("command", ""))
            words = simple_words(command)
            capability = "exec" if words is not None else "exec.opaque"
            for decision in policy.judge_words(words or (), self._workspace):
                yield decision
        elif action.tool in _READS | _WRITES:
            operation = "read" if action.tool in _READS else "write"
            capability = f"fs.{operation}"
            for decision in await self._judge_file(str(action.arguments.get("path", ".")), operation):
                yield decision
        else:
            return
        verdict = policy.capabilities.get(capability)
        if verdict is not None:
            yield Decision(verdict, f"the policy's word on {capability}")

    async def _judge_file(self, path: str, operation: str) -> list[Decision]:
        if _UNSAFE.search(path):
            return [Decision(Verdict.BLOCK, "control characters in a path cannot be judged")]
        if self._policy.is_empty:
            return []
        written = normal(self._workspace / path)
        leads = await self._resolve(self._workspace / path)
        home = await self._resolve(self._workspace)  # the workspace itself may be reached by a link
        if leads is None or home is None:
            return [Decision(Verdict.BLOCK, f"it cannot be found out where {path} leads")]
        forms = [written, self._workspace / leads.relative_to(home) if _below(leads, home) else leads]
        return list(self._policy.judge_path(forms, operation, self._workspace))


def load(path: Path) -> Policy:
    """Read a policy file. Raises UsageError with the file, the place in it and what is wrong."""
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - 0.1 s that a run without a policy does not pay

    try:
        data = path.read_bytes()
        if len(data) > MAX_POLICY_BYTES:
            raise _wrong(path, "it is larger than 1 MiB")
        document: Any = json.loads(data, object_pairs_hook=_no_repeats)
    except OSError as error:
        raise _wrong(path, str(error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"it is not JSON ({error})") from error
    schema = json.loads((Path(__file__).parent / "asp-policy.schema.json").read_bytes())
    faults = Draft202012Validator(schema).iter_errors(document)
    fault = max(faults, key=lambda fault: len(fault.absolute_path), default=None)  # the one that is deepest says most
    if fault is not None:
        place = ".".join(str(step) for step in fault.absolute_path)
        raise _wrong(path, f"{place + ': ' if place else ''}{fault.message}")
    return Policy(
        default=Verdict(document.get("default", "block")),
        capabilities={name: Verdict(verdict) for name, verdict in document.get("capabilities", {}).items()},
        outside=Verdict(document.get("outside_workspace", "block")),
        protected=tuple(document.get("protected_paths", ())),
        denied=frozenset(document.get("deny_operations", ("read", "write"))),
        exec_rules=tuple(
            ExecRule(rule["rule_key"], tuple(rule["argv"]), Verdict(rule["action"])) for rule in document.get("exec", ())
        ),
    )


def resolve_in(transport: Transport) -> Resolve:
    """Return a Resolve that asks the sandbox, by POSIX sh and ``readlink -f``."""

    async def resolve(path: PurePosixPath) -> PurePosixPath | None:
        script = (
            f'p={shlex.quote(str(path))}; t=; while ! [ -e "$p" ] && ! [ -L "$p" ]; do t=/${{p##*/}}$t; p=${{p%/*}}; '
            '[ -n "$p" ] || p=/; done; r=$(readlink -f -- "$p") && printf %s "$r$t"'
        )
        done = await transport.exec(script, timeout_s=LOOK_TIMEOUT_S, keep_bytes=1 << 16)
        shown = done.stdout.decode("utf-8", "surrogateescape")
        if done.status or not shown.startswith("/") or _UNSAFE.search(shown) or done.stdout_bytes != len(done.stdout):
            return None
        return normal(PurePosixPath(shown))

    return resolve


def simple_words(command: str) -> tuple[str, ...] | None:
    """Return the words of a command that is nothing but plain words, None of any other (pipes, variables, quotes in quotes)."""
    if not _SIMPLE.fullmatch(command) or _ASSIGNMENT.match(command.lstrip()):
        return None
    try:
        words = tuple(shlex.split(command))
    except ValueError:
        return None
    return words or None


def normal(path: PurePosixPath) -> PurePosixPath:
    """Return an absolute path without ``.`` and ``..``, as text goes; ``//x`` is ``/x``."""
    parts: list[str] = []
    for part in path.parts[1:]:
        if part != "..":
            parts.append(part)
        elif parts:
            parts.pop()
    return PurePosixPath("/", *parts)


def _below(path: PurePosixPath, folder: PurePosixPath) -> bool:
    return path == folder or folder in path.parents


def _glob(pattern: str) -> re.Pattern[str]:
    """``*`` and ``?`` stay within a folder, ``**`` does not; everything else is itself."""
    pieces = re.split(r"(\*\*/?|\*|\?)", pattern)
    meaning = {"**": ".*", "**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meaning.get(piece, re.escape(piece)) for piece in pieces), re.DOTALL)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        msg = "a key is there twice"
        raise ValueError(msg)
    return document


def _wrong(path: Path, why: str) -> AspError:
    return UsageError(f"the policy {quoted(str(path))} cannot be used: {quoted(why)[1:-1]}")
