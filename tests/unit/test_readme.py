"""What the README says is true: its commands exist, its contract is one, its program runs, its rules are kept."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from asp import contract
from asp.testing import InProcessSandbox

CHECKOUT = Path(__file__).parents[2]
README = (CHECKOUT / "README.md").read_text()
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_it_shows_installed_commands_only() -> None:
    """python -m and uv run in a repository can run that repository's code on the brain's side."""
    for block in blocks("sh"):
        assert "python -m" not in block
        assert "uv run" not in block
        assert "pip install ." not in block.replace("pipx install", "")


def test_every_command_exists_with_its_words() -> None:
    """A usage error would be exit 2 with a usage line; each of these ends for another reason or shows its help."""
    shown = [line for block in blocks("sh") for line in block.splitlines() if line.startswith(("asp ", "asp-"))]
    shown += re.findall(r"^\| `(asp[^`]*)`", README, re.MULTILINE)
    assert len(shown) > 10
    for line in shown:
        words = shlex.split(line.partition(">")[0])
        verb = [words[0], words[1]]
        done = subprocess.run([BIN / verb[0], verb[1], "--help"], capture_output=True, text=True, check=False, timeout=20)
        assert done.returncode == 0, (line, done.stderr)
        for option in (word for word in words[2:] if word.startswith("--")):
            assert option in done.stdout, line


def test_the_contract_is_one(tmp_path: Path) -> None:
    (block,) = [block for block in blocks("json") if "transport" in block]
    path = tmp_path / ".asp.json"
    path.write_text(block)
    path.chmod(0o600)
    assert contract.load(path).endpoint == "127.0.0.1:2222"


async def test_the_program_runs(sandbox: InProcessSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / ".asp.json").write_text(json.dumps(sandbox.document()))
    (folder / ".asp.json").chmod(0o600)
    (block,) = blocks("python")
    program = folder / "program.py"
    program.write_text(block.replace("open_transport(trusted)", "open_transport(trusted, allow_same_host=True)"))
    monkeypatch.setenv("ASP_CONTRACT", str(folder / ".asp.json"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert out.decode().splitlines() == ["3 b'12 notes.txt\\n'".replace("12", "6"), "b'hello\\n'"], err


def test_the_mcp_snippets_name_a_command_that_exists() -> None:
    (cursor,) = [json.loads(block)["mcpServers"]["workspace"] for block in blocks("json") if "mcpServers" in block]
    (codex,) = [tomllib.loads(block)["mcp_servers"]["workspace"] for block in blocks("toml")]
    assert cursor == codex == {"command": "asp-agent", "args": ["mcp"]}
    assert "-- asp-agent mcp`" in README


def test_figures_are_measured() -> None:
    assert "FIGURE_" not in README


def test_agents_md_is_short() -> None:
    assert len((CHECKOUT / "AGENTS.md").read_text().splitlines()) <= 80
