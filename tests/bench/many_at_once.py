"""Many sandboxes at once: up in parallel, a command in each, down again, and then what is left of them.

    tests/bench/many_at_once.py [--count N] local | docker --image IMAGE

Looks for leftovers itself: processes, mounts, containers, listening ports, folders and keys. Exit 1 if anything is left.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent


def listening() -> set[str]:
    """Return the local addresses of listening TCP sockets."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A"}


def processes(mark: bytes) -> set[int]:
    """Return the processes whose environment or arguments hold our state directory."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes() or mark in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found - {os.getpid()}


def containers() -> set[str]:
    """Return the ids of all containers; none where there is no engine."""
    done = subprocess.run(["docker", "ps", "-aq"], capture_output=True, text=True, check=False)
    return set(done.stdout.split())


async def one(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command; return what it complained of."""
    process = await asyncio.create_subprocess_exec(
        *words, cwd=folder, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return "" if process.returncode == 0 else f"{' '.join(words)}: {process.returncode}: {(out + err).decode()[-300:]}"


async def main() -> int:
    """Measure, look, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("provider", choices=["local", "docker"])
    parser.add_argument("--image")
    options = parser.parse_args()
    words = [options.provider, *(["--image", options.image] if options.image else [])]
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "HOME": scratch, "XDG_STATE_HOME": f"{scratch}/state"}
        environment.pop("ASP_CONTRACT", None)
        folders = [Path(scratch, f"repository-{number}") for number in range(options.count)]
        for folder in folders:
            folder.mkdir()
        before = listening(), containers(), len(Path("/proc/mounts").read_text().splitlines())

        async def each(*command: str) -> tuple[float, list[str]]:
            began = time.perf_counter()
            said = await asyncio.gather(*(one([str(BIN / command[0]), *command[1:]], folder, environment) for folder in folders))
            return time.perf_counter() - began, [text for text in said if text]

        up_s, up_wrong = await each("asp-sandbox", "up", *words)
        exec_s, exec_wrong = await each("asp", "exec", "true")
        began = time.perf_counter()
        down_wrong = await one([str(BIN / "asp-sandbox"), "down", "--all"], Path(scratch), environment)
        down_s = time.perf_counter() - began
        deadline = time.monotonic() + 20
        while (left := left_over(scratch, *before)) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
    wrong = [*up_wrong, *exec_wrong, *filter(None, [down_wrong]), *left]
    print(
        f"{options.provider}: {options.count} up in {up_s:.1f} s, a command in each in {exec_s:.1f} s, "
        f"down --all in {down_s:.1f} s; left: {', '.join(left) or 'nothing'}"
    )
    for text in wrong[:5]:
        print(text, file=sys.stderr)
    return 1 if wrong else 0


def left_over(scratch: str, ports: set[str], before: set[str], mounts: int) -> list[str]:
    """Return what is there that was not there before."""
    state = Path(scratch, "state", "asp")
    made = [path for path in state.rglob("*") if not {"runtime", "openssh"} & set(path.parts)]  # kept for the next one
    keys = [path for path in made if re.search(r"key|sandbox\.json|socket", path.name)]
    found = {
        "processes": processes(scratch.encode()),
        "ports": listening() - ports,
        "containers": containers() - before,
        "mounts": max(0, len(Path("/proc/mounts").read_text().splitlines()) - mounts),
        "keys and records": keys,
    }
    return [f"{name}: {value}" for name, value in found.items() if value]


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
