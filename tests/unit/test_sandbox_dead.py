"""A sandbox that is dead before, during and between calls: exit 4, one clear line, and nothing lands on this machine."""

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from anthropic_stub import KEY, AnthropicStub, turn
from conftest import missing
from sandbox_lab import Box, Lab, end

pytestmark = pytest.mark.bwrap
AGENT = Path(sys.executable).with_name("asp-agent")


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    lab = Lab(tmp_path)
    repository = lab.repository()
    done = lab.run("up", "local", cwd=repository)
    if done.returncode == 2 and "local sandboxes" in done.stderr:
        missing("bwrap", done.stderr.strip())
    assert done.returncode == 0, done.stderr
    yield Box(lab, repository)
    lab.close()


def kill(box: Box) -> None:
    """Kill the gateway, and with it the sandbox."""
    gateway = box.lab.gateway()
    assert gateway is not None
    end(gateway)


async def start(box: Box, stub: AnthropicStub) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        AGENT, "run", "do it", "--model", "anthropic/m", cwd=box.repository, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**box.lab.environment, "ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": stub.base_url},
    )  # fmt: skip


async def ended(process: asyncio.subprocess.Process, marker: str, box: Box) -> str:
    out, err = await asyncio.wait_for(process.communicate(), 50)
    assert (process.returncode, out) == (4, b""), err
    assert b"Traceback" not in err
    lines = err.decode().splitlines()
    complaints = [line for line in lines if line.startswith("asp-agent:")]
    assert len(complaints) == 1, lines
    places = [box.repository, box.lab.folder, Path.cwd(), Path(box.lab.environment["HOME"]), Path("/"), Path("/tmp")]
    for place in places:
        assert not (place / marker).exists()
    found = subprocess.run(
        ["find", "/", "-xdev", "-name", marker, "-not", "-path", "/proc/*"], capture_output=True, check=False, timeout=50,
    )
    assert found.stdout == b""
    return complaints[0]


async def test_before(box: Box) -> None:
    """No model call is made."""
    marker = f"marker-{secrets.token_hex(8)}"
    kill(box)
    async with AnthropicStub(turn("x", [("write", {"path": marker, "content": "x"})])) as stub:
        complaint = await ended(await start(box, stub), marker, box)
        assert stub.requests == []
    assert "127.0.0.1" in complaint


async def test_during(box: Box) -> None:
    """The running call is lost, the next one finds nobody."""
    marker = f"marker-{secrets.token_hex(8)}"
    async with AnthropicStub(
        turn("x", [("bash", {"command": "touch started; sleep 60"}), ("write", {"path": marker, "content": "x"})]),
        turn("x", [("bash", {"command": f"touch {marker}"})]),
    ) as stub:
        process = await start(box, stub)
        while not (box.folder / "workspace" / "started").exists():
            await asyncio.sleep(0.01)
        kill(box)
        await ended(process, marker, box)
        assert len(stub.requests) == 1


async def test_between(box: Box) -> None:
    """It dies while the model thinks."""
    marker = f"marker-{secrets.token_hex(8)}"
    async with AnthropicStub(
        turn("x", [("bash", {"command": "echo one"})]),
        turn("x", [("write", {"path": marker, "content": "x"}), ("bash", {"command": f"touch {marker}"})]).stall(1),
    ) as stub:
        process = await start(box, stub)
        await stub.wait_for_request(2)
        kill(box)
        stub.release()
        await ended(process, marker, box)
    assert os.listdir(box.repository) == [".asp.json"]
