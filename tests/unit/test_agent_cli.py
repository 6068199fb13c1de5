"""The command, as a process of its own against a real SSH server: output, exit codes, signals, secrets (L7)."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from agent_parts import call, calls, write_script

from asp.testing import InProcessSandbox
from asp_agent import cli
from asp_agent.messages import UserTurn
from asp_agent.redact import MARK
from asp_agent.run import load_history, verify

COMMAND = [sys.executable, "-m", "asp_agent.cli"]


@dataclass
class Ended:
    """One finished command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Stdout as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def contract(sandbox: InProcessSandbox, tmp_path: Path) -> Path:
    path = tmp_path / "project" / ".asp.json"
    path.parent.mkdir()
    path.write_text(json.dumps(sandbox.document()))
    path.chmod(0o600)
    return path


def run_folder(home: Path) -> Path:
    (folder,) = (home / "state/asp/runs").iterdir()
    return folder


@contextlib.asynccontextmanager
async def started(*options: str, cwd: Path, **env: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *options, cwd=cwd, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=PIPE, stderr=PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def run(*options: str, cwd: Path, **env: str) -> Ended:
    async with started(*options, cwd=cwd, **env) as process:
        out, err = await process.communicate()
        assert process.returncode is not None
        return Ended(process.returncode, out.decode(), err.decode())


async def agent(contract: Path, *turns: dict[str, Any], options: tuple[str, ...] = (), **env: str) -> Ended:
    script = write_script(contract.parent, *turns)
    given = ["--model", f"scripted/{script}", "--contract", str(contract), "--allow-same-host"]
    return await run("run", "do it", *given, *options, cwd=contract.parent, **env)


async def test_done(contract: Path, sandbox: InProcessSandbox, own_home: Path) -> None:
    ended = await agent(
        contract,
        calls(call("bash", command="pwd; printf '\\033[31mred' > f; cat f; exit 2"), text="I \u202elook."),
        {"text": "All \x1b[2Jdone."},
    )
    assert (ended.code, ended.out) == (0, "All ^[[2Jdone.\n")
    assert "scripted model: no LLM is called" in ended.err
    assert "I <U+202E>look." in ended.err
    assert "> bash  pwd; printf" in ended.err
    assert "  error, " in ended.err
    assert "\x1b" not in ended.err
    assert (sandbox.workspace / "f").exists()
    folder = run_folder(own_home)
    assert verify(folder).complete
    frozen = json.loads((folder / "run.json").read_text())
    assert frozen["task"] == "do it"
    assert len(frozen["contract"]["digest"]) == 64
    assert [tool["name"] for tool in frozen["tools"]] == ["read", "write", "edit", "bash"]
    assert frozen["limits"] == {"max_turns": 100, "timeout_s": None, "max_budget_usd": None, "max_tokens_total": None}
    start = json.loads((folder / "events.jsonl").read_text().splitlines()[0])
    assert f"Working directory: {sandbox.workspace}" in start["system"]


async def test_a_locale_that_cannot_show_the_answer(contract: Path) -> None:
    ended = await agent(contract, {"text": "\u4e2d"}, PYTHONIOENCODING="ascii")
    assert (ended.code, ended.out) == (0, "\\u4e2d\n")


async def test_json(contract: Path, sandbox: InProcessSandbox) -> None:
    ended = await agent(contract, calls(call("bash", command="pwd")), {"text": "ok \u4e2d"}, options=("--json",))
    assert ended.code == 0
    assert ended.err == ""
    assert ended.out.isascii()
    assert [line["type"] for line in ended.lines] == [
        "start",
        "usage",
        "tool_call",
        "tool_result",
        "usage",
        "message",
        "result",
    ]
    start, result, last = ended.lines[0], ended.lines[3], ended.lines[-1]
    assert start["scripted"] is True
    assert {key: result[key] for key in ("tool_call_id", "name", "is_error", "content")} == {
        "tool_call_id": "call_1", "name": "bash", "is_error": False, "content": f"{sandbox.workspace}\n",
    }  # fmt: skip
    assert set(last) == {"type", "exit_code", "reason", "message", "text", "turns", "usage", "cost_usd", "run", "duration_s"}
    assert (last["exit_code"], last["reason"], last["text"], last["turns"]) == (0, "done", "ok \u4e2d", 2)


async def test_the_nearest_contract_must_be_trusted(contract: Path, own_home: Path) -> None:
    script = write_script(contract.parent, {"text": "never"})
    ended = await run("run", "x", "--model", f"scripted/{script}", cwd=contract.parent)
    assert (ended.code, ended.out) == (2, "")
    assert "asp trust" in ended.err
    assert not (own_home / "state/asp/runs").exists()


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 2)])
async def test_on_a_terminal_it_asks(contract: Path, answer: str, code: int) -> None:
    script = write_script(contract.parent, {"text": "ok"})
    ours, theirs = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "run", "x", "--model", f"scripted/{script}", "--allow-same-host",
            cwd=contract.parent, stdin=theirs, stdout=PIPE, stderr=theirs,
        )  # fmt: skip
        os.write(ours, f"{answer}\n".encode())
        out, _ = await process.communicate()
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == code
    assert "host key:  ssh-ed25519 SHA256:" in shown
    assert out == (b"ok\n" if code == 0 else b"")


async def test_configuration_errors_are_one_line_and_a_result(tmp_path: Path) -> None:
    cases = [
        (["run", "x"], "no .asp.json"),
        (["run", "x", "--contract", "none"], "none"),
        (["run", "x", "--contract", ""], "empty"),
    ]
    for options, words in cases:
        ended = await run(*options, cwd=tmp_path)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith("asp-agent: ")
        assert words in ended.err
        assert "Traceback" not in ended.err
        ended = await run(*options, "--json", cwd=tmp_path)
        assert (ended.code, ended.err) == (2, "")
        (last,) = ended.lines
        assert (last["type"], last["exit_code"], last["run"]) == ("result", 2, None)
        assert words in last["message"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["run"],
        ["run", ""],
        ["run", "x", "--max-turns", "0"],
        ["run", "x", "--timeout", "nan"],
        ["run", "x", "--max", "3"],
    ],
    ids=str,
)
def test_usage_errors(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(options) == 2
    said = capsys.readouterr().err
    assert said.startswith("asp-agent: ")
    assert said.count("\n") == 1
    assert said.endswith("--help\n")


async def test_a_bad_model_connects_to_nothing(contract: Path) -> None:
    for model, words in (("nonsense", "provider/name"), ("scripted/none.json", "none.json"), ("what/ever", "unknown")):
        ended = await run("run", "x", "--contract", str(contract), "--model", model, cwd=contract.parent)
        assert ended.code == 2
        assert words in ended.err


async def test_c4_this_machine_is_refused_without_the_option(contract: Path) -> None:
    script = write_script(contract.parent, calls(call("bash", command="touch ran")))
    ended = await run("run", "x", "--model", f"scripted/{script}", "--contract", str(contract), cwd=contract.parent)
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert "the machine you are on" in ended.err


async def test_p84_a_dead_sandbox_costs_no_model_call(contract: Path, sandbox: InProcessSandbox, own_home: Path) -> None:
    await sandbox.aclose()
    ended = await agent(contract, calls(call("write", path="marker", content="x")), options=("--json",))
    assert ended.code == 4
    assert [line["type"] for line in ended.lines] == ["result"]
    assert ended.lines[-1]["reason"] == "unreachable"
    assert not list(contract.parent.glob("marker*"))
    assert [json.loads(line)["type"] for line in (run_folder(own_home) / "events.jsonl").read_text().splitlines()] == ["final"]


@pytest.mark.parametrize(
    ("turns", "options", "code", "reason"),
    [
        ([{"text": "no", "stop": "refusal"}], (), 1, "refused"),
        ([], (), 1, "model_refused"),
        ([calls(call("bash", command="true"))] * 2, ("--max-turns", "2"), 3, "max_turns"),
        ([calls(call("bash", command="sleep 60"))], ("--timeout", "2"), 3, "timeout"),
        ([{"fault": "unavailable"}], (), 4, "model_unavailable"),
    ],
)
async def test_exit_codes(
    contract: Path, own_home: Path, turns: list[dict[str, Any]], options: tuple[str, ...], code: int, reason: str
) -> None:
    ended = await agent(contract, *turns, options=("--json", *options))
    assert (ended.code, ended.lines[-1]["exit_code"], ended.lines[-1]["reason"]) == (code, code, reason)
    folder = run_folder(own_home)
    assert verify(folder).complete
    load_history(folder)


class Fifo:
    """A named pipe in the workspace: a command writes, the test waits for it."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path

    async def line(self) -> str:
        return (await asyncio.to_thread(self.path.read_text)).strip()


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_p67_a_signal_kills_remotely_and_leaves_a_valid_history(
    contract: Path, sandbox: InProcessSandbox, own_home: Path, number: signal.Signals
) -> None:
    fifo = Fifo(sandbox.workspace / "fifo")
    script = write_script(
        contract.parent,
        calls(call("bash", command="echo $$ > fifo; sleep 60"), call("bash", command="touch ran")),
        {"text": "never"},
    )
    options = ["--model", f"scripted/{script}", "--contract", str(contract), "--allow-same-host", "--json"]
    async with started("run", "x", *options, cwd=contract.parent) as process:
        pid = await fifo.line()
        assert alive(pid)
        process.send_signal(number)
        out, err = await process.communicate()
    assert (process.returncode, err) == (130, b"")
    last = json.loads(out.splitlines()[-1])
    assert (last["type"], last["exit_code"], last["reason"]) == ("result", 130, "interrupted")
    assert not alive(pid)
    assert not (sandbox.workspace / "ran").exists()
    folder = run_folder(own_home)
    assert verify(folder).complete
    results = load_history(folder).turns[-1]
    assert isinstance(results, UserTurn)
    assert [result.tool_call_id for result in results.results] == ["call_1", "call_2"]
    assert results.results[0].content.startswith("Interrupted by the user while this ran")
    assert results.results[1].content == "Interrupted by the user before this ran."


async def test_a_second_signal_gives_up_waiting_and_says_what_may_live_on(
    contract: Path, sandbox: InProcessSandbox, own_home: Path
) -> None:
    fifo = Fifo(sandbox.workspace / "fifo")
    script = write_script(contract.parent, calls(call("bash", command="echo $$ > fifo; sleep 60"), call("read", path="a")))
    options = ["--model", f"scripted/{script}", "--contract", str(contract), "--allow-same-host"]
    with subprocess.Popen(
        [*COMMAND, "run", "x", *options],
        cwd=contract.parent,
        stdin=subprocess.DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
    ) as process:
        await fifo.line()
        # From here on this test blocks its event loop on purpose: the server, which lives in it, answers nothing any more.
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while not process.stderr.readline().startswith("  error"):
            pass
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert "it may still run in the sandbox: bash echo" in err
    folder = run_folder(own_home)
    assert verify(folder).complete
    assert not load_history(folder).pending


async def test_p84_a_sandbox_lost_during_a_run(contract: Path, sandbox: InProcessSandbox, own_home: Path) -> None:
    fifo = Fifo(sandbox.workspace / "fifo")
    script = write_script(
        contract.parent,
        calls(call("bash", command="echo part; echo $$ > fifo; sleep 60"), call("write", path="m", content="")),
    )
    options = ["--model", f"scripted/{script}", "--contract", str(contract), "--allow-same-host", "--json"]
    async with started("run", "x", *options, cwd=contract.parent) as process:
        await fifo.line()
        await sandbox.aclose()
        out, _ = await process.communicate()
    ended = Ended(process.returncode or 0, out.decode(), "")
    assert ended.code == 4
    results = [line for line in ended.lines if line["type"] == "tool_result"]
    assert "its outcome is unknown and it may have taken effect" in results[0]["content"]
    assert results[0]["content"].startswith("part\n")
    assert results[1]["content"].startswith("This was not run")
    assert not list(contract.parent.glob("m"))
    assert verify(run_folder(own_home)).complete


async def test_p62_the_identity_key_is_nowhere(contract: Path, sandbox: InProcessSandbox, own_home: Path) -> None:
    key = sandbox.identity.read_text()
    lines = [line for line in key.splitlines() if len(line) > 40 and not line.startswith("-----")][1:]
    assert lines
    turns = (calls(call("bash", command="cat ../identity"), call("read", path="../identity")), {"text": key})
    for options in ((), ("--json",)):
        ended = await agent(contract, *turns, options=options, ASP_DEBUG="1")
        assert ended.code == 0
        assert MARK in ended.out
        recorded = "".join(file.read_text() for file in (own_home / "state").rglob("*") if file.is_file())
        for line in lines:
            assert line not in ended.out + ended.err + recorded


def test_a_bug_is_one_line_and_a_finished_record(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import asp.ssh

    key = tmp_path / "key"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(key))
    key.chmod(0o600)
    secret = key.read_text().splitlines()[2]
    document = {
        "version": "0",
        "transport": "ssh",
        "connection": {"host": "127.0.0.1", "port": 1, "identity": {"file": "key"}},
    }
    (tmp_path / ".asp.json").write_text(json.dumps(document))
    (tmp_path / ".asp.json").chmod(0o600)
    script = write_script(tmp_path, {"text": "never"})

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError(f"with {secret}")

    monkeypatch.setattr(asp.ssh, "open_transport", broken)
    for debug in ("", "1"):
        monkeypatch.setenv("ASP_DEBUG", debug)
        assert cli.main(["run", "x", "--model", f"scripted/{script}", "--contract", str(tmp_path)]) == 1
        shown = capsys.readouterr().err
        assert "this is a bug of asp-agent: ZeroDivisionError: with [redacted]" in shown
        assert ("Traceback" in shown) == (debug == "1")
        assert secret not in shown
    for folder in (own_home / "state/asp/runs").iterdir():
        assert verify(folder).complete
        assert secret not in (folder / "events.jsonl").read_text()


async def test_a_reader_that_leaves_is_not_a_traceback(contract: Path) -> None:
    script = write_script(contract.parent, *[calls(call("bash", command="seq 1 20000"))] * 20, {"text": "x"})
    options = ["--model", f"scripted/{script}", "--contract", str(contract), "--allow-same-host", "--json"]
    async with started("run", "x", *options, cwd=contract.parent) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        await process.stdout.readline()
        process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
        err = await process.stderr.read()
        assert await process.wait() == 1
    assert b"Traceback" not in err
    assert b"BrokenPipe" not in err


@pytest.mark.parametrize(
    ("redirections", "options", "code", "shown"),
    [
        (">/dev/full", (), 1, "asp-agent: cannot write the answer (No space left on device)"),
        (">/dev/full", ("--json",), 1, "asp-agent: cannot write the answer (No space left on device)"),
        (">/dev/full", ("--max-turns", "1"), 3, "the limit of 1 turns was reached"),
        (">&-", (), 0, "done: 2 turns"),
        (">&-", ("--json",), 0, ""),
        ("2>&-", (), 0, ""),
        ("2>/dev/full", (), 0, ""),
        ("<&- >&- 2>&-", (), 0, ""),
    ],
)
async def test_streams_that_cannot_be_written(
    contract: Path, own_home: Path, redirections: str, options: tuple[str, ...], code: int, shown: str
) -> None:
    script = write_script(contract.parent, calls(call("bash", command="true")), {"text": "answer"})
    given = ["--model", f"scripted/{script}", "--contract", str(contract), "--allow-same-host", *options]
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", f'"$@" {redirections}', "sh", *COMMAND, "run", "x", *given, cwd=contract.parent, stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == code, err
    assert shown in err.decode()
    assert b"Traceback" not in err
    assert b"bug" not in err
    if "--json" in options:
        assert err.count(b"\n") == code
    assert out.decode() == ("answer\n" if redirections.startswith("2") else "")
    assert verify(run_folder(own_home)).complete
    load_history(run_folder(own_home))


async def test_a_working_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *COMMAND, "run", "x", cwd=gone, stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate()
    assert (process.returncode, out, err.count(b"\n")) == (2, b"", 1)
    assert err.startswith(b"asp-agent: the working directory does not exist any more")


def test_help_and_version_import_nothing_heavy() -> None:
    for option in (["--help"], ["run", "--help"], ["--version"]):
        probe = (
            "import sys; from asp_agent import cli\n"
            f"assert cli.main({option!r}) == 0\n"
            "heavy = {'asyncssh', 'anthropic', 'jsonschema', 'cryptography', 'rich', 'httpx2'} & set(sys.modules)\n"
            "assert not heavy, heavy"
        )
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(("usage: asp-agent", "asp-agent 0."))
