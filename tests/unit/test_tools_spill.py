"""The whole output of a cut command: kept in the sandbox, opened by the model's own read, bounded, never in the way."""

import re
from pathlib import Path

import pytest
from agent_parts import use

from asp.errors import NoSpace
from asp.testing import LocalTwin
from asp_agent.tools import spill


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The twin is this machine: the files go to a folder of the test."""
    folder = tmp_path / "kept"
    folder.mkdir()
    monkeypatch.setattr(spill, "FOLDER", str(folder))
    return folder


def named(content: str) -> str:
    found = re.search(r"(\S+/output-[0-9a-f]{12}\.txt)\]", content)
    assert found is not None, content[-300:]
    return found[1]


async def test_what_was_cut_can_be_read(tmp_path: Path, own_folder: Path) -> None:
    async with LocalTwin(tmp_path) as twin:
        shown = (await use(twin, "bash", command="seq 1 5000")).content
        assert shown.splitlines()[0] == "3001"
        path = named(shown)
        assert "all of it is in" in shown
        assert (await use(twin, "read", path=path, limit=2)).content.startswith("1\n2\n")
        assert named((await use(twin, "bash", command="seq 1 5000")).content) == path, "the same output is kept once"
        assert [file.name for file in own_folder.iterdir()] == [Path(path).name]
        failed = (await use(twin, "bash", command="seq 1 5000; exit 3")).content
        assert failed.endswith("Command exited with code 3")
        assert named(failed) == path
        assert "output-" not in (await use(twin, "bash", command="seq 1 50")).content


async def test_of_a_huge_output_the_beginning_is_kept(tmp_path: Path, own_folder: Path) -> None:
    async with LocalTwin(tmp_path) as twin:
        shown = (await use(twin, "bash", command="yes | head -c 12000000")).content
        assert f"its first 10 MiB are in {named(shown)}" in shown
        assert Path(named(shown)).stat().st_size == spill.MAX_BYTES


async def test_the_oldest_are_removed(tmp_path: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "MAX_TOTAL_BYTES", 60_000)
    async with LocalTwin(tmp_path) as twin:
        paths = [named((await use(twin, "bash", command=f"seq {n} {n + 5000}")).content) for n in (1, 2, 3, 4)]
    assert sorted(str(file) for file in own_folder.iterdir()) == sorted(paths[-2:])


async def test_a_full_disk_is_not_in_the_way(tmp_path: Path) -> None:
    class Full(LocalTwin):
        async def write(self, path: object, data: bytes) -> None:
            raise NoSpace(str(path))

    async with Full(tmp_path) as twin:
        shown = (await use(twin, "bash", command="seq 1 5000")).content
        assert "what came before was dropped. To see all, send it to a file." in shown
