"""How long until the first command has answered: ``asp-sandbox up`` and then ``asp exec true``, as a person types them.

    tests/bench/first_command.py [--rounds N] [local] [docker IMAGE]

Each provider in turn, round after round in one run, since times on a shared machine drift. What Python takes to start and to
import our commands is measured in the same rounds (the commands with an argument that ends them at once after the imports)
and taken away, as the issue says "beyond Python's own imports". Prints medians and ranges. Everything is made in a state
directory of its own and taken away again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
IMPORTS = {
    "up local": "import asp_sandboxes.cli, asp_sandboxes.provisioning, asp_sandboxes.local, asyncssh",
    "up docker": "import asp_sandboxes.cli, asp_sandboxes.provisioning, asp_sandboxes.docker, asyncssh, docker",
    "exec": "import asp.cli, asp.trust, asp.ssh, asyncssh, jsonschema",
}


def run(words: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Run a command that must succeed; return its seconds."""
    began = time.perf_counter()
    done = subprocess.run(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(words)}: status {done.returncode}\n{done.stderr}")
    return seconds


def imports(code: str, folder: Path, environment: dict[str, str]) -> float:
    """Return what Python takes to start and to import."""
    return run([sys.executable, "-P", "-c", code], folder, environment)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--docker", metavar="IMAGE", help="measure this image too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    providers = {"local": ["local"], **({"docker": ["docker", "--image", options.docker]} if options.docker else {})}
    figures: dict[str, list[float]] = {name: [] for name in providers}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "repository")
        folder.mkdir()
        environment = {**os.environ, "HOME": scratch, "XDG_STATE_HOME": f"{scratch}/state"}
        environment.pop("ASP_CONTRACT", None)
        for turn in range(options.rounds + 1):  # the first one makes what is made once: runtime, bundle
            for name, words in providers.items():
                up = run([str(BIN / "asp-sandbox"), "up", *words], folder, environment)
                execute = run([str(BIN / "asp"), "exec", "true"], folder, environment)
                run([str(BIN / "asp-sandbox"), "down", "--all"], folder, environment)
                beside = sum(imports(IMPORTS[key], folder, environment) for key in (f"up {name}", "exec"))
                if turn:
                    figures[name].append(up + execute - beside)
    if options.json:
        print(json.dumps(figures))
        return
    for name, seconds in figures.items():
        print(
            f"{name}: first command after {statistics.median(seconds):.2f} s beyond imports "
            f"({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} rounds)"
        )


if __name__ == "__main__":
    main()
