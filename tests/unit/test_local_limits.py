"""What a local sandbox may take of the machine, and what `up` says about it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import missing
from sandbox_lab import Box, Lab

from asp_sandboxes.local_limits import described, limits


@pytest.mark.parametrize(
    ("kernel", "own_uid", "bounded"),
    [
        ("5.13.19-generic", False, False),
        ("5.13.19", True, True),
        ("5.14.0-rc1", False, True),
        ("6.18.44", False, True),
        ("?", False, False),
    ],
)
def test_processes_are_limited_where_the_kernel_counts_those_of_the_sandbox_alone(
    kernel: str, own_uid: bool, bounded: bool
) -> None:
    assert ("NPROC" in limits(own_uid=own_uid, kernel=kernel)) == bounded
    line = described(own_uid=own_uid, kernel=kernel)
    held, _, missing_ones = line.partition("; none on ")
    assert ("4096 processes" in held) == bounded
    assert missing_ones.startswith("processes") != bounded
    assert "memory" in missing_ones


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    lab = Lab(tmp_path)
    repository = lab.repository()
    done = lab.run("up", "local", cwd=repository)
    if done.returncode == 2 and "local sandboxes" in done.stderr:
        missing("bwrap", done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert "limits: " in done.stderr
    yield Box(lab, repository)
    lab.close()


@pytest.mark.bwrap
async def test_they_are_in_force_and_cannot_be_raised(box: Box) -> None:
    script = """
        ulimit -Sn; ulimit -c; cat /proc/self/oom_score_adj
        grep 'Max processes' /proc/self/limits | tr -s ' ' | cut -d' ' -f3,4
        ulimit -Hn unlimited 2>/dev/null || echo stays; ulimit -c unlimited 2>/dev/null || echo stays
    """
    status, output = await box.sh(script)
    descriptors, cores, adjustment, processes, *raised = output.splitlines()
    assert (status, cores, raised) == (0, "0", ["stays", "stays"])
    assert int(descriptors) <= 4096
    assert int(adjustment) >= 500
    if "NPROC" in limits(own_uid=os.getuid() == 0):
        assert max(map(int, processes.split())) <= 4096
