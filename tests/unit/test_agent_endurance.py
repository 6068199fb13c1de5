"""A run that is ended at any moment: the exit code is right, nothing of it lives on in the sandbox, and it goes on.

``ASP_KILL_MOMENTS=50 tests/run -k moments`` for many, ``ASP_SEED=N`` for the same ones again (the seed is printed).
And what a run holds in memory and on disk, whatever its tools print.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from agent_parts import call, calls, write_script
from test_agent_cli import contract, run, started  # noqa: F401 - contract is a fixture

from asp.testing import InProcessSandbox
from asp_agent.run import load_history, verify

MOMENTS = int(os.environ.get("ASP_KILL_MOMENTS", "6"))
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
WAIT_S = 50
STEP = "echo $$ >> pids; echo {n} >> log; echo out; sleep 0.{n}; (exec sleep 600) & echo $! >> pids; sleep 0.1; kill $!"


def events(home: Path) -> list[dict[str, object]]:
    """Return the whole lines of the only record below ``home``."""
    found = list((home / "state/asp/runs").glob("*/events.jsonl"))
    lines = found[0].read_bytes().splitlines(keepends=True) if found else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def alive(workspace: Path) -> list[int]:
    """Return the processes of the run that still live."""
    pids = [int(line) for line in (workspace / "pids").read_text().split()] if (workspace / "pids").exists() else []
    living = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                living.append(pid)
    return living


@pytest.mark.timeout(60 + 20 * MOMENTS)
async def test_ended_at_drawn_moments_and_resumed(contract: Path, sandbox: InProcessSandbox, tmp_path: Path) -> None:  # noqa: F811
    seed = int(os.environ.get("ASP_SEED") or random.SystemRandom().randrange(10**8))
    print(f"ASP_SEED={seed} ASP_KILL_MOMENTS={MOMENTS}")
    draw = random.Random(seed)
    turns = [calls(call("bash", command=STEP.format(n=n)), call("read", path="log"), text=f"Step {n}.") for n in (1, 2, 3)]
    script = write_script(tmp_path, *turns, {"text": "Done."})
    go_on = tmp_path / "go on.json"
    go_on.write_text(json.dumps({"turns": [{"text": "I see."}]}))
    for moment in range(MOMENTS):
        number = SIGNALS[moment % len(SIGNALS)]
        at_event, later_s = draw.randrange(30), draw.choice([0.0, draw.uniform(0, 0.15)])
        where = f"moment {moment} of seed {seed}: {number.name} {later_s:.3f} s after event {at_event}"
        for name in ("pids", "log"):
            (sandbox.workspace / name).unlink(missing_ok=True)
        home = tmp_path / f"home-{moment}"
        home.mkdir()
        place = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
        words = ("--contract", str(contract), "--allow-same-host")
        async with started("run", "x", "--model", f"scripted/{script}", *words, cwd=contract.parent, **place) as process:
            ended = asyncio.ensure_future(process.wait())
            async with asyncio.timeout(WAIT_S):
                while len(events(home)) <= at_event and not ended.done():
                    await asyncio.sleep(0.002)
            await asyncio.sleep(later_s)  # the drawn moment, not a wait for anything
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            async with asyncio.timeout(WAIT_S):
                code = await ended
        last = events(home)[-1]["type"]
        if number == signal.SIGKILL:
            assert code in ({-9, 0} if last == "final" else {-9}), where
        else:
            reason = str(events(home)[-1].get("reason"))
            assert (code, last) in {(130, "final"), (0, "final")}, where
            assert (code == 0) == (reason == "done"), where
        async with asyncio.timeout(30):  # the promise is 10 s on a quiet machine
            while alive(sandbox.workspace):
                await asyncio.sleep(0.01)
        log = (sandbox.workspace / "log").read_text() if (sandbox.workspace / "log").exists() else ""
        again = await run("run", "-c", "--model", f"scripted/{go_on}", *words, cwd=contract.parent, **place)
        assert (again.code, again.out) == (0, "I see.\n"), f"{where}: {again.err}"
        assert ((sandbox.workspace / "log").read_text() if log else "") == log, f"{where}: something was run again"
        newest = max((home / "state/asp/runs").iterdir())
        assert verify(newest).complete
        load_history(newest)


MEASURE = """
import json, os, resource, sys
from asp_agent.cli import main
import asyncssh, jsonschema, asp.ssh, asp_agent.agent, asp_agent.models, asp_agent.session
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
code = main(sys.argv[1:])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"code": code, "growth_mib": (after - before) / 1024}), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "what",
    ["300 MB of output", "20 outputs of 5 MB", "a file of 300 MB"],
)
async def test_memory_and_record_are_bounded(
    contract: Path,  # noqa: F811
    sandbox: InProcessSandbox,
    tmp_path: Path,
    own_home: Path,
    what: str,
) -> None:
    match what:
        case "300 MB of output":
            turn = calls(call("bash", command="head -c 300000000 /dev/zero | tr '\\0' 'a' | fold -w 100"))
        case "20 outputs of 5 MB":
            turn = calls(*(call("bash", command=f"yes {n} | head -c 5000000") for n in range(20)))
        case _:
            with (sandbox.workspace / "big").open("wb") as big:
                for _ in range(300):
                    big.write(b"a line of text\n" * 66667)
            reads = [call("read", path="big"), *(call("read", path="big", offset=n) for n in (9, 1_000_000, 19_000_000))]
            turn = calls(*reads, call("bash", command="rm big"))
    script = write_script(tmp_path, turn, {"text": "Done."})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MEASURE, "run", "x", "--model", f"scripted/{script}", "--contract", str(contract),
        "--allow-same-host", cwd=contract.parent, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(55):
        _, err = await process.communicate()
    measured = json.loads(err.splitlines()[-1])
    (folder,) = (own_home / "state/asp/runs").iterdir()
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{what}: memory grows by {measured['growth_mib']:.0f} MiB, the record has {size / 1000:.0f} kB")
    assert measured["code"] == 0, err
    assert measured["growth_mib"] < 200
    assert size < 5_000_000
