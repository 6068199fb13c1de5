"""AGENTS.md and CLAUDE.md: read in the sandbox, shown, capped, left out when told."""

import json
from pathlib import Path

from agent_parts import write_script
from test_agent_cli import contract, run, run_folder  # noqa: F401 - contract is a fixture

from asp.testing import InProcessSandbox, LocalTwin
from asp_agent import context_files
from asp_agent.redact import Redactor


async def test_what_is_read(tmp_path: Path) -> None:
    async with LocalTwin(tmp_path) as twin:
        assert await context_files.read(twin, Redactor()) == []
        (tmp_path / "AGENTS.md").write_text("Use tabs. sk-12345678\n")
        (tmp_path / "CLAUDE.md").mkdir()
        (one,) = await context_files.read(twin, Redactor(["sk-12345678"]))
        assert (one.name, one.text, one.cut) == ("AGENTS.md", "Use tabs. [redacted]\n", False)
        (tmp_path / "CLAUDE.md").rmdir()
        (tmp_path / "CLAUDE.md").write_text("x" * (context_files.MAX_BYTES + 5))
        _, two = await context_files.read(twin, Redactor())
        assert (len(two.text), two.cut) == (context_files.MAX_BYTES, True)
        assert "the rest is left out" in two.described()
        (tmp_path / "CLAUDE.md").write_bytes((tmp_path / "AGENTS.md").read_bytes())
        assert len(await context_files.read(twin, Redactor())) == 1, "one text is read once"
        (tmp_path / "CLAUDE.md").write_bytes(b"a\0b")
        assert len(await context_files.read(twin, Redactor())) == 1, "what is no text is left out"


async def test_in_a_run(contract: Path, sandbox: InProcessSandbox, own_home: Path) -> None:  # noqa: F811
    (sandbox.workspace / "AGENTS.md").write_text("Use tabs.\x1b[2J\n")
    script = write_script(contract.parent, {"text": "ok"})
    words = ("run", "x", "--model", f"scripted/{script}", "--contract", str(contract), "--allow-same-host")
    ended = await run(*words, cwd=contract.parent)
    assert ended.code == 0, ended.err
    assert "the prompt holds AGENTS.md (14 bytes)" in ended.err
    first = json.loads((run_folder(own_home) / "events.jsonl").read_text().splitlines()[0])
    assert first["system"].endswith("The project's notes for agents, from AGENTS.md:\n\nUse tabs.\x1b[2J\n")
    ended = await run(*words, "--no-context-files", cwd=contract.parent)
    assert (ended.code, "AGENTS.md" in ended.err) == (0, False)
