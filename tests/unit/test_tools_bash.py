"""bash over a real bash."""

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from agent_parts import use

from asp.errors import CommandRefused, ConnectionLost, NotStarted, WorkspaceMissing
from asp.testing import LocalTwin
from asp.transport import ExecResult
from asp_agent.redact import MARK, Redactor
from asp_agent.tools.bash import KEEP_BYTES
from asp_agent.tools.terminal_text import clean, decode_tail
from asp_agent.tools.truncate import MAX_BYTES, size


@pytest.fixture
def twin(tmp_path: Path) -> LocalTwin:
    (tmp_path / "work").mkdir()
    return LocalTwin(tmp_path / "work")


async def test_plain(twin: LocalTwin) -> None:
    produced = await use(twin, "bash", command="echo out; echo err >&2; echo out2")
    assert (produced.content, produced.is_error) == ("out\nerr\nout2\n", False)


async def test_statuses(twin: LocalTwin) -> None:
    assert (await use(twin, "bash", command="true")).content == "(no output)"
    failed = await use(twin, "bash", command="echo a; exit 3")
    assert (failed.content, failed.is_error) == ("a\n\nCommand exited with code 3", True)
    assert (await use(twin, "bash", command="false")).content == "(no output)\n\nCommand exited with code 1"
    assert (await use(twin, "bash", command="kill -9 $$")).content == "(no output)\n\nCommand exited with code 137"
    assert (await use(twin, "bash", command="no-such-program")).content.endswith("Command exited with code 127")
    assert (await use(twin, "bash", command="printf '\\n \\n'")).content == "[Only whitespace.]"


async def test_timeout_keeps_what_came_before(twin: LocalTwin) -> None:
    produced = await use(twin, "bash", command="echo before; echo err >&2; sleep 60", timeout=0.5)
    assert produced.content == "before\nerr\n\nCommand timed out after 0.5 seconds and was stopped."
    assert produced.is_error


async def test_p13_the_tail_is_kept_and_the_loss_is_said(twin: LocalTwin) -> None:
    produced = await use(twin, "bash", command="seq 1 1000000; exit 3")
    text, _, rest = produced.content.partition("\n\n[")
    assert text.split("\n")[0] == "998001"
    assert text.endswith("1000000")
    assert rest.startswith("Of 6,888,896 bytes of output you see the last 2,000 lines; all of it is in /")
    assert produced.content.endswith("Command exited with code 3")
    assert produced.is_error


async def test_output_over_the_limit_but_within_memory(twin: LocalTwin) -> None:
    produced = await use(twin, "bash", command="seq 1 2001")
    assert produced.content.startswith("2\n3\n")
    assert "Of 8,898 bytes" in produced.content
    assert (await use(twin, "bash", command="seq 1 2000")).content == "".join(f"{n}\n" for n in range(1, 2001))


async def test_p15_one_very_long_line(twin: LocalTwin) -> None:
    content = (await use(twin, "bash", command="head -c 1000000 /dev/zero | tr '\\0' a")).content
    text, _, note = content.partition("\n\n")
    assert text == "a" * MAX_BYTES
    assert note.startswith("[Of 1,000,000 bytes of output you see the end of the last line")


async def test_p18_p19_bytes(twin: LocalTwin) -> None:
    assert (await use(twin, "bash", command="printf 'ab\\377\\376\\n'")).content == "ab\ufffd\ufffd\n"
    assert (await use(twin, "bash", command="printf '\\344\\270'; sleep 0.1; printf '\\255\\n'")).content == "\u4e2d\n"


@pytest.mark.parametrize("character", ["\u4e2d", "\U0001f600"])
@pytest.mark.parametrize("before", range(4))
async def test_p20_no_cut_inside_a_character(twin: LocalTwin, character: str, before: int) -> None:
    script = f"import sys; sys.stdout.buffer.write(('x' * {before} + {character!r} * 80000).encode())"
    content = (await use(twin, "bash", command=f"{sys.executable} -c {shlex.quote(script)}")).content
    text = content.partition("\n\n")[0]
    assert set(text) == {character}
    assert MAX_BYTES - 4 < size(text) <= MAX_BYTES


async def test_p21_progress_bars_and_colours(twin: LocalTwin) -> None:
    produced = await use(twin, "bash", command=r"for i in $(seq 1 2000); do printf '\rdone %d' $i; done; echo")
    assert produced.content == "done 2000\n"
    colour = r"printf '\033[31mred\033[0m \033]0;title\007x\033]8;;http://h\033\\link\033]8;;\033\\ a\000b\bc\033(B\r\n'"
    assert (await use(twin, "bash", command=colour)).content == "red xlink abc\n"


def test_clean_is_linear_for_hostile_text() -> None:
    started = time.perf_counter()
    for piece in ("\x1b[", "\x1b]", "\x1bP", "\x1b", "\r", "\x1b[0;"):
        clean(piece * 100_000)
    assert time.perf_counter() - started < 5


def test_decode_tail_drops_only_a_cut_character() -> None:
    data = "x\u4e2d\u4e2d".encode()
    assert decode_tail(data[2:], cut=True) == "\u4e2d"
    assert decode_tail(data[2:], cut=False) == "\ufffd\ufffd\u4e2d"
    assert decode_tail(b"\x80\x80\x80\x80", cut=True) == "\ufffd"


async def test_p23_nul_in_the_command(twin: LocalTwin) -> None:
    produced = await use(twin, "bash", command="echo a\0b")
    assert produced.is_error
    assert "NUL" in produced.content
    assert (await use(twin, "bash", command="echo ok")).content == "ok\n"


async def test_a_background_child_does_not_hold_the_call_and_is_named(twin: LocalTwin) -> None:
    async with twin:
        produced = await use(twin, "bash", command="sleep 30 & echo started; echo $! > pid")
        assert produced.content.startswith("started\n\n[A background process of this command is still running")
        assert not produced.is_error
        assert (await use(twin, "bash", command="kill $(cat pid)")).content == "(no output)"


async def test_p85_the_workspace_is_the_working_directory(twin: LocalTwin) -> None:
    assert (await use(twin, "bash", command="pwd; cat")).content == f"{twin.workspace}\n"


async def test_memory_is_bounded_by_keep_bytes(twin: LocalTwin) -> None:
    seen: list[ExecResult] = []

    class Watched(LocalTwin):
        async def exec(self, script: str | bytes, **options: Any) -> ExecResult:
            seen.append(await super().exec(script, **options))
            return seen[-1]

    await use(Watched(Path(twin.workspace)), "bash", command="head -c 50000000 /dev/zero | tr '\\0' 'x'")
    assert len(seen[0].stdout) <= KEEP_BYTES
    assert seen[0].stdout_bytes == 50_000_000


async def test_a_secret_is_redacted_before_the_cut(twin: LocalTwin) -> None:
    secret = "sk-" + "s" * 100
    redact = Redactor([secret])
    # the cut falls in the middle of the secret: 51,200 bytes from the end, and again where the kept bytes begin
    for kept_from_end in (MAX_BYTES - 50, KEEP_BYTES - 50):
        command = f"printf 'line\\nx%s%s' {secret} $(head -c {kept_from_end} /dev/zero | tr '\\0' y)"
        content = (await use(twin, "bash", command=command, redact=redact)).content
        assert "sss" not in content
    assert (await use(twin, "bash", command=f"echo {secret}", redact=redact)).content == f"{MARK}\n"


class _Failing(LocalTwin):
    """Fails as a transport does."""

    error: Exception

    async def exec(self, script: str | bytes, **options: Any) -> ExecResult:
        raise self.error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ConnectionLost("ssh connection to 127.0.0.1 lost", stdout=b"part\n"),
            "part\n\nThe environment stopped responding",
        ),
        (ConnectionLost("ssh lost"), "The environment stopped responding while this ran; its outcome is unknown"),
        (NotStarted("no ssh"), "This was not run: the environment cannot be used any more."),
        (WorkspaceMissing("ssh says"), "does not exist any more"),
        (CommandRefused("ssh refused"), "nothing was run"),
    ],
)
async def test_failures_become_texts_that_do_not_name_the_transport(tmp_path: Path, error: Exception, words: str) -> None:
    twin = _Failing(tmp_path)
    twin.error = error
    produced = await use(twin, "bash", command="x")
    assert produced.is_error
    assert words in produced.content
    assert "ssh" not in produced.content.lower()
    assert produced.failure is (None if isinstance(error, CommandRefused) else error)
