"""Secrets and paths that are planted on this side turn up nowhere they must not (promises 1 and 2, L5, C7)."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from anthropic_stub import KEY, AnthropicStub, http_error, turn
from conftest import missing, trusted
from sandbox_lab import Lab

from asp import trees
from asp.ssh import open_transport
from asp.testing import InProcessSandbox

TOKEN = "tok_SECRET.Marker-123"  # as Daytona's: not a plain account name
BIN = Path(sys.executable).parent


async def run(program: str, *words: str, cwd: Path, **env: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        BIN / program, *words, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"],
             "ASP_DEBUG": "1", **env},
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 50)
    return process.returncode or 0, out.decode()


def everything_below(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


async def test_keys_and_tokens_are_nowhere(tmp_path: Path, own_home: Path) -> None:
    """A sandbox that knows all of them (it should not) shows them to the tools; the model, the record and we see none."""
    async with InProcessSandbox(tmp_path / "box", login="none", user=TOKEN) as box:
        identity = box.identity.read_text()
        secret_line = [line for line in identity.splitlines() if not line.startswith("-")][2]
        (box.workspace / "leak").write_text(f"{KEY}\n{TOKEN}\n{identity}\n")
        project = tmp_path / "project"
        project.mkdir()
        (project / ".asp.json").write_text(json.dumps(box.document()))
        (project / ".asp.json").chmod(0o600)
        given = ("--contract", str(project / ".asp.json"), "--allow-same-host")
        outputs = []
        async with AnthropicStub(
            turn("x", [("bash", {"command": "cat leak; base64 -w0 leak"}), ("read", {"path": "leak"})]),
            turn(f"It says {TOKEN}."),
        ) as stub:
            for options in ((), ("--json",)):
                stub.add(turn("Again."))
                _status, out = await run(
                    "asp-agent", "run", "look", "--model", "anthropic/m", *given, *options, cwd=project,
                    ANTHROPIC_API_KEY=KEY, ANTHROPIC_BASE_URL=stub.base_url,
                )
                outputs.append(out)
            bodies = json.dumps(stub.bodies)
        for words in (("exec", *given, "--json", "exit 3"), ("check", str(project)), ("trust", str(project)),
                      ("exec", *given, "--timeout", "0.1", "sleep 5"), ("read", *given, "nope")):  # fmt: skip
            _status, out = await run("asp", *words, cwd=project)
            outputs.append(out)
    # Now nobody listens, and then somebody who refuses: the errors name the endpoint and not who wanted in.
    outputs.append((await run("asp", "exec", *given, "true", cwd=project))[1])
    async with InProcessSandbox(tmp_path / "other", user="somebody") as other:
        document = other.document()
        document["connection"]["user"] = TOKEN  # type: ignore[index]
        (project / ".asp.json").write_text(json.dumps(document))
        outputs.append((await run("asp", "exec", *given, "true", cwd=project))[1])
        outputs.append((await run("asp-agent", "run", "x", "--model", "scripted/none.json", *given, cwd=project))[1])
        async with AnthropicStub(http_error(401, "authentication_error", f"bad key {KEY}")) as stub:
            outputs.append((await run(
                "asp-agent", "run", "x", "--model", "anthropic/m", *given, cwd=project,
                ANTHROPIC_API_KEY=KEY, ANTHROPIC_BASE_URL=stub.base_url,
            ))[1])  # fmt: skip
    recorded = everything_below(own_home)
    assert "final" in recorded
    for marker in (KEY, TOKEN, "SECRET.Marker", secret_line):
        assert marker not in bodies, marker
        assert marker not in recorded, marker
        for output in outputs:
            assert marker not in output, (marker, output)
            assert "Traceback" not in output


@pytest.mark.bwrap
async def test_nothing_in_the_sandbox_tells_of_this_machine(tmp_path: Path) -> None:
    """After a push: no regular file outside /proc holds the contract or a path of this machine; /proc/1/cmdline shows none."""
    lab = Lab(tmp_path)
    repository = lab.repository("a-repository-on-this-machine")
    try:
        done = lab.run("up", "local", cwd=repository)
        if done.returncode == 2 and "local sandboxes" in done.stderr:
            missing("bwrap", done.stderr.strip())
        assert done.returncode == 0, done.stderr
        (repository / "file").write_text("content\n")
        contract = json.loads((repository / ".asp.json").read_text())
        agreed = trusted(contract, repository)
        async with open_transport(agreed) as transport:
            await trees.push(transport, agreed.contract, repository)
            paths = {str(repository), str(lab.state), str(tmp_path), f"{Path(__file__).parents[2]}/", sys.prefix}
            paths.add(contract["connection"]["identity"]["file"])
            if os.environ["HOME"] != "/root":
                paths.add(os.environ["HOME"])
            needles = "".join(f"{path}\n" for path in sorted(paths)) + ".asp.json\nASP_CONTRACT\n"
            # -D skip: devices are not read; /sys is the kernel's, as /proc is; the server's own text names the format.
            found = await transport.exec(
                "cat > /tmp/needles; "
                "LC_ALL=C grep -rlsF -D skip -f /tmp/needles / --exclude-dir=proc --exclude-dir=sys --exclude=needles; "
                "tr '\\0' ' ' < /proc/1/cmdline >&2; ls -A /workspace >&2; find / -name .asp.json -not -path '/proc/*' >&2",
                stdin=needles.encode(), timeout_s=55,
            )
            assert found.stdout == b"", found.stdout.decode()
            shown = found.stderr.decode()
            assert "file" in shown
            for path in [*paths, ".asp.json"]:
                assert path not in shown
    finally:
        lab.close()
