"""``asp-agent mcp`` with the SDK's own client: a real process, a real SSH server, and everything a host does."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters, types

from asp.testing import InProcessSandbox
from asp_agent import mcp_server
from asp_agent.redact import Redactor
from asp_agent.tools import DEFAULT_TOOLS

AGENT = str(Path(sys.executable).with_name("asp-agent"))
WAIT_S = 50


@pytest.fixture
def contract(tmp_path: Path, sandbox: InProcessSandbox) -> Path:
    path = tmp_path / "repository" / ".asp.json"
    path.parent.mkdir()
    path.write_text(json.dumps(sandbox.document()))
    path.chmod(0o600)
    return path


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ("PATH", "HOME", "XDG_STATE_HOME")}


@asynccontextmanager
async def host(contract: Path) -> AsyncIterator[Client]:
    """An MCP host with our server in it."""
    words = ["mcp", "--contract", str(contract), "--allow-same-host"]
    server = StdioServerParameters(command=AGENT, args=words, env=environment(), cwd=str(contract.parent))
    async with asyncio.timeout(WAIT_S), Client(server) as client:
        yield client


def text(result: types.CallToolResult) -> str:
    """Return the one text of a result, which must be sent once."""
    (only,) = result.content
    assert isinstance(only, types.TextContent)
    assert result.structured_content is None
    return only.text


async def test_lists_and_calls(contract: Path, sandbox: InProcessSandbox) -> None:
    async with host(contract) as client:
        listed = (await client.list_tools()).tools
        assert [(tool.name, tool.description, tool.input_schema) for tool in listed] == [
            (tool.schema.name, tool.schema.description, tool.schema.parameters) for tool in DEFAULT_TOOLS
        ]
        assert [tool.name for tool in listed if tool.annotations and tool.annotations.read_only_hint] == ["read"]
        assert client.server_info.name == "workspace"
        assert str(sandbox.workspace) in str(client.instructions)
        wrote = await client.call_tool("write", {"path": "a/b.txt", "content": "one\nzwei ü\n"})
        assert not wrote.is_error
        assert text(await client.call_tool("read", {"path": "a/b.txt"})) == "one\nzwei ü\n"
        await client.call_tool("edit", {"path": "a/b.txt", "edits": [{"oldText": "one", "newText": "two"}]})
        assert text(await client.call_tool("bash", {"command": "cat a/b.txt; pwd"})) == f"two\nzwei ü\n{sandbox.workspace}\n"


async def test_errors_are_tool_errors(contract: Path, sandbox: InProcessSandbox) -> None:
    async with host(contract) as client:
        for name, arguments, expected in (
            ("bash", {"command": "echo out; exit 3"}, "Command exited with code 3"),
            ("bash", {}, "Nothing was run"),
            ("bash", {"command": "x", "surprise": 1}, "Nothing was run"),
            ("read", {"path": "none"}, "none: "),
            ("edit", {"path": "none", "edits": [{"oldText": "a", "newText": "b"}]}, "none: "),
            ("fetch", {"url": "x"}, "fetch"),
        ):
            result = await client.call_tool(name, arguments)
            assert result.is_error, name
            assert expected in text(result)
        assert "\ufffd" in text(await client.call_tool("bash", {"command": "printf '\\377'"}))
        await sandbox.aclose()
        assert (await client.call_tool("bash", {"command": "echo x"})).is_error, "a sandbox that is gone is a tool error too"


async def test_progress_and_two_at_once(contract: Path) -> None:
    told: list[str] = []
    heard = asyncio.Event()

    async def progress(_progress: float, _total: float | None, message: str | None) -> None:
        told.append(str(message))
        heard.set()

    async with host(contract) as client:
        slow = asyncio.create_task(
            client.call_tool("bash", {"command": "until [ -e go ]; do sleep 0.05; done; echo slow"}, progress_callback=progress)
        )
        await heard.wait()
        assert told[0].startswith("running for ")
        assert text(await client.call_tool("bash", {"command": "touch go; echo quick"})) == "quick\n"
        assert text(await slow) == "slow\n"


async def gone(path: Path) -> None:
    """Wait until the process that wrote its pid to ``path`` is dead."""
    pid = int(path.read_text())
    async with asyncio.timeout(WAIT_S):
        while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            await asyncio.sleep(0.01)


async def written(path: Path) -> None:
    async with asyncio.timeout(WAIT_S):
        while not path.exists() or not path.read_text().strip():
            await asyncio.sleep(0.01)


async def test_cancel_kills_in_the_sandbox(contract: Path, sandbox: InProcessSandbox) -> None:
    pid = sandbox.workspace / "pid"
    async with host(contract) as client:
        running = asyncio.create_task(client.call_tool("bash", {"command": "echo $$ > pid; exec sleep 1000"}))
        await written(pid)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await gone(pid)
        assert text(await client.call_tool("bash", {"command": "echo still here"})) == "still here\n"


@pytest.mark.parametrize("way", ["stdin ends", "SIGTERM", "SIGINT"])
async def test_the_end_kills_in_the_sandbox(contract: Path, sandbox: InProcessSandbox, way: str) -> None:
    pid = sandbox.workspace / "pid"
    process = await asyncio.create_subprocess_exec(
        AGENT, "mcp", "--contract", str(contract), "--allow-same-host", env=environment(), cwd=contract.parent,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None

    def send(method: str, params: dict[str, Any], number: int | None = None) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params, **({"id": number} if number else {})}
        assert process.stdin is not None
        process.stdin.write(json.dumps(message).encode() + b"\n")

    me = {"name": "t", "version": "1"}
    send("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": me}, 1)
    async with asyncio.timeout(WAIT_S):
        assert json.loads(await process.stdout.readline())["id"] == 1
        send("notifications/initialized", {})
        send("tools/call", {"name": "bash", "arguments": {"command": "echo $$ > pid; exec sleep 1000"}}, 2)
        await written(pid)
        if way == "stdin ends":
            process.stdin.close()
        else:
            process.send_signal(getattr(signal, way))
        code = await process.wait()
        said = await process.stderr.read()
    assert code == (0 if way == "stdin ends" else 130)
    assert b"Traceback" not in said
    await gone(pid)


@pytest.mark.parametrize("trouble", ["untrusted", "no contract", "no server"])
async def test_a_server_that_cannot_begin_says_one_line(contract: Path, sandbox: InProcessSandbox, trouble: str) -> None:
    words = ["--contract", str(contract), "--allow-same-host"] if trouble == "no server" else []
    if trouble == "no contract":
        contract.unlink()
    if trouble == "no server":
        await sandbox.aclose()
    process = await asyncio.create_subprocess_exec(
        AGENT, "mcp", *words, env=environment(), cwd=contract.parent, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert (process.returncode, out) == (4 if trouble == "no server" else 2, b"")
    assert err.startswith(b"asp-agent: ")
    assert err.count(b"\n") == 1


async def test_what_the_harness_holds_is_taken_out(contract: Path, sandbox: InProcessSandbox) -> None:
    key = sandbox.identity.read_text()
    (sandbox.workspace / "key").write_text(key)
    async with host(contract) as client:
        shown = text(await client.call_tool("read", {"path": "key"}))
        assert key.splitlines()[1] not in shown
        assert "[redacted]" in shown


def test_a_lone_surrogate_can_be_sent() -> None:
    assert mcp_server._sendable("a\udc80b") == "a?b"
    assert Redactor([])("x") == "x"
