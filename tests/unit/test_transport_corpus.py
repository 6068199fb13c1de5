"""The exec scheme meets real servers: the corpus, byte for byte like the local twin."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from conftest import OpenSSH, missing, trusted
from corpus import SCRIPTS, without_pids
from sandbox_lab import Box, Lab

from asp import errors
from asp.ssh import open_transport
from asp.ssh.transport import SSHTransport
from asp.testing import InProcessSandbox, LocalTwin
from asp.transport import ExecResult, Stream, Transport


def outcome(result: ExecResult, here: bytes = b"", there: bytes = b"") -> tuple[int, str | None, bytes, bytes]:
    """Return what must be equal; the twin's workspace has another path where the sandbox has its own tree."""
    out, err = without_pids(result.stdout), without_pids(result.stderr)
    if here:
        out, err = out.replace(here, there), err.replace(here, there)
    return result.status, result.signal, out, err


@contextlib.asynccontextmanager
async def in_process(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[tuple[SSHTransport, Path]]:
    async with InProcessSandbox(folder / "box") as box, open_transport(
        trusted(box.document(), folder), allow_same_host=True,
    ) as transport:
        yield transport, box.workspace


@contextlib.asynccontextmanager
async def stock_sshd(request: pytest.FixtureRequest, folder: Path, user: str) -> AsyncIterator[tuple[SSHTransport, Path]]:
    server: OpenSSH = request.getfixturevalue("openssh")
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and os.getuid() == 0 and "pytest" in str(parent):
            parent.chmod(0o755)
    workspace = folder / "workspace"
    workspace.mkdir()
    workspace.chmod(0o1777)
    async with open_transport(trusted(server.document(user, workspace), folder), allow_same_host=True) as transport:
        yield transport, workspace


SERVERS = ["in-process", "openssh-own-login", "openssh-second-login"]


@pytest.fixture(scope="module")
def local_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """One local sandbox for all tests here; each begins with an empty workspace."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    try:
        repository = lab.repository()
        done = lab.run("up", "local", cwd=repository)
        if done.returncode == 2 and "local sandboxes" in done.stderr:
            missing("bwrap", done.stderr.strip())
        assert done.returncode == 0, done.stderr
        yield Box(lab, repository)
    finally:
        lab.close()


@contextlib.asynccontextmanager
async def local_sandbox(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[tuple[SSHTransport, Path]]:
    box: Box = request.getfixturevalue("local_box")
    async with open_transport(trusted(box.contract, folder)) as transport:
        emptied = await transport.exec("find . -mindepth 1 -delete")
        assert emptied.status == 0, emptied.stderr
        yield transport, box.folder / "workspace"


@pytest.fixture(params=[
    "in-process",
    pytest.param("local-sandbox", marks=pytest.mark.bwrap),
    pytest.param("openssh-own-login", marks=pytest.mark.openssh),
    pytest.param("openssh-second-login", marks=[pytest.mark.openssh, pytest.mark.root]),
])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[SSHTransport, Path]]:
    """A transport to each kind of server, and the local path of its workspace."""
    if request.param == "in-process":
        opened = in_process(request, tmp_path)
    elif request.param == "local-sandbox":
        opened = local_sandbox(request, tmp_path)
    elif request.param == "openssh-own-login":
        import getpass

        opened = stock_sshd(request, tmp_path, getpass.getuser())
    else:
        opened = stock_sshd(request, tmp_path, request.getfixturevalue("second_user"))
    async with opened as pair:
        yield pair


async def environment_of(transport: Transport) -> dict[str, str]:
    """Return what a command sees, so that the twin can have the same."""
    result = await transport.exec("env -0")
    pairs = (entry.split("=", 1) for entry in result.stdout.decode().split("\0") if entry)
    return {name: value for name, value in pairs if name not in {"_", "PWD", "SHLVL"}}


async def is_gone(transport: Transport, pid: str, within_s: float = 4) -> bool:
    """Return whether a process ends in time; one that nobody has reaped yet has ended."""
    rounds = int(within_s * 10)
    looked = await transport.exec(
        f"for i in $(seq {rounds}); do grep -q '^State:.[^ZX]' /proc/{pid}/status 2>/dev/null || exit 9; sleep .1; done",
    )
    return looked.status == 9


async def test_every_script_gives_what_bash_gives(server: tuple[SSHTransport, Path]) -> None:
    """Output, order, status and signal equal the twin's, with streams apart and merged."""
    transport, workspace = server
    differences = []
    async with LocalTwin(workspace, env=await environment_of(transport)) as twin:
        for number, script in enumerate(SCRIPTS):
            # Both ways where a session is cheap; elsewhere (a login with PAM and rc files) the scripts take turns.
            for merge in (False, True) if "box" in str(workspace) else (bool(number % 2),):
                local = await twin.exec(script, merge_streams=merge)
                here = outcome(local, os.fsencode(workspace), os.fsencode(transport.workspace))
                there = outcome(await asyncio.wait_for(transport.exec(script, merge_streams=merge), 20))
                if here != there:
                    differences.append((script[:80], merge, here, there))
    assert not differences


async def test_a_background_child_does_not_hold_the_call(server: tuple[SSHTransport, Path]) -> None:
    """P01, P02: returns at once, says so, and the child lives on, also when it writes later."""
    transport, _ = server
    for script in ("sleep 30 & echo $!", "sleep 30 >/dev/null 2>&1 & echo $!", "setsid sleep 30 & echo $!"):
        result = await asyncio.wait_for(transport.exec(script), 5)
        pid = result.stdout.split()[0].decode()
        assert result.status == 0
        # The child may hold the pipes for a moment still, before its own redirection: then it is one in the background.
        assert result.background or ">" in script
        alive = await transport.exec(f"kill -0 {pid} && echo alive; kill {pid}")
        assert alive.stdout == b"alive\n", script
    result = await transport.exec("(while :; do echo tick; sleep .1; done) & echo $! >&2; exit 7")
    assert (result.status, result.background) == (7, True)
    pid = result.stderr.split()[0].decode()
    later = await transport.exec(f"sleep .5; kill -0 {pid} && echo alive; kill {pid}")
    assert later.stdout == b"alive\n"


async def test_a_shell_that_waits_is_waited_for_and_killed(server: tuple[SSHTransport, Path], tmp_path: Path) -> None:
    """P03, P07, P08: the time limit ends the whole group, for root as for a user, and nothing survives."""
    transport, _ = server
    result = await transport.exec("echo part; sleep 601 & echo $! >&2; wait; echo late", timeout_s=1)
    assert result.timed_out
    assert result.stdout == b"part\n"
    assert result.status == 128 + signal.SIGTERM
    pid = result.stderr.decode().strip()
    assert await is_gone(transport, pid)
    stubborn = await transport.exec("trap '' TERM INT HUP; echo $$; while :; do sleep 1; done", timeout_s=0.5)
    assert (stubborn.timed_out, stubborn.signal) == (True, "KILL")
    cleanup = await transport.exec("trap 'echo cleanup; exit 3' TERM; while :; do sleep .1; done", timeout_s=0.5)
    assert (cleanup.timed_out, cleanup.exit_status, cleanup.stdout) == (True, 3, b"cleanup\n")
    child = await transport.exec("sh -c 'sleep 602; true'; true", timeout_s=0.3)
    assert child.timed_out


async def test_no_output_is_lost_before_a_background_child(server: tuple[SSHTransport, Path]) -> None:
    """P05: the last line is there and the count is right."""
    transport, _ = server
    for _ in range(5):
        result = await asyncio.wait_for(transport.exec("seq 1 50000; sleep 20 & echo $! >&2; exit 7"), 4)
        assert result.status == 7
        assert result.stdout.endswith(b"50000\n")
        assert result.stdout.count(b"\n") == 50000
        await transport.exec(b"kill " + result.stderr.strip())


async def test_a_writer_without_end_does_not_hold_the_call(server: tuple[SSHTransport, Path]) -> None:
    """E5: a child that never stops writing is left behind."""
    transport, _ = server
    result = await asyncio.wait_for(transport.exec("yes & echo $! >&2; exit 7", keep_bytes=100), 10)
    assert (result.status, result.background) == (7, True)
    await transport.exec(b"kill " + result.stderr.split()[0])


async def test_output_before_the_time_limit_is_kept(server: tuple[SSHTransport, Path]) -> None:
    """P10."""
    transport, _ = server
    result = await transport.exec("echo before; echo err >&2; sleep 60", timeout_s=0.5)
    assert (result.timed_out, result.stdout, result.stderr) == (True, b"before\n", b"err\n")


async def test_odd_bytes_do_not_hurt_the_connection(server: tuple[SSHTransport, Path]) -> None:
    """P18: invalid UTF-8 arrives as it is, a second command in flight is complete, a third works."""
    transport, _ = server
    first, second = await asyncio.gather(
        transport.exec("printf 'ab\\377\\376\\n'; exit 0"), transport.exec("echo partial; sleep .3; echo other"),
    )
    assert (first.stdout, second.stdout) == (b"ab\xff\xfe\n", b"partial\nother\n")
    assert (await transport.exec("echo third")).stdout == b"third\n"


@pytest.mark.parametrize("size", [4_000, 131_000, 131_072, 200_000, 300_000, 5_000_000])
async def test_commands_of_any_length(server: tuple[SSHTransport, Path], size: int) -> None:
    """P22: no size limit, and the other command is not hurt."""
    transport, _ = server
    script = ": '" + "a" * size + "'; echo ok $#"
    long, other = await asyncio.gather(transport.exec(script), transport.exec("sleep .1; echo other"))
    assert (long.status, long.stdout, other.stdout) == (0, b"ok 0\n", b"other\n")


async def test_a_long_command_with_stdin(server: tuple[SSHTransport, Path]) -> None:
    """The caller's bytes follow a long script exactly."""
    transport, _ = server
    for size in (10, 9_000, 130_000):
        result = await transport.exec(b"# " + b"y" * size + b"\ncat; exit 3", stdin=b"abc\0\xff")
        assert (result.status, result.stdout) == (3, b"abc\0\xff")


async def test_a_nul_byte_is_refused_by_name(server: tuple[SSHTransport, Path]) -> None:
    """P23: nothing runs, the connection lives on."""
    transport, _ = server
    with pytest.raises(errors.CommandRefused, match="NUL"):
        await transport.exec("touch marker\0; echo b")
    assert (await transport.exec("echo ok; ls")).stdout == b"ok\n"


async def test_stdin_is_empty_or_exactly_the_callers_bytes(server: tuple[SSHTransport, Path]) -> None:
    """P36, and 3 MB in and out."""
    transport, _ = server
    for script, expected in (("cat", b""), ('read x; echo "[$x]"', b"[]\n")):
        assert (await asyncio.wait_for(transport.exec(script), 2)).stdout == expected
    blob = os.urandom(3_000_000)
    echoed = await transport.exec("cat", stdin=blob, keep_bytes=len(blob))
    assert echoed.stdout == blob
    unread = await transport.exec("head -c 5 >/dev/null; echo done; exit 4", stdin=blob)
    assert (unread.status, unread.stdout) == (4, b"done\n")
    assert (await transport.exec("sleep 602", stdin=blob, timeout_s=0.3)).timed_out


async def test_environment_and_directory(server: tuple[SSHTransport, Path]) -> None:
    """P27 and E3: quoting once, nothing of the transport's in the environment, umask 022."""
    transport, workspace = server
    (workspace / "a b'c\nd").mkdir()
    odd = transport.workspace / "a b'c\nd"
    assert (await transport.exec("pwd", cwd=str(odd))).stdout == os.fsencode(odd) + b"\n"
    assert (await transport.exec("pwd", cwd="a b'c\nd")).stdout == os.fsencode(odd) + b"\n"
    value = await transport.exec('printf %s "$FOO"; env | grep -c ^FOO=', env={"FOO": "a 'b'\nc"})
    assert value.stdout == b"a 'b'\nc1\n"
    names = await transport.exec("env | grep -E '^(SSH|MOTD|OLDPWD|MAIL)'; umask")
    assert names.stdout == b"0022\n"
    with pytest.raises(errors.WorkspaceMissing):
        await transport.exec("pwd", cwd="/no/such dir")
    with pytest.raises(errors.CommandRefused):
        await transport.exec("true", env={"A B": "c"})


async def test_a_receiver_gets_every_byte_and_slows_the_command_down(server: tuple[SSHTransport, Path]) -> None:
    """Streaming with backpressure: all bytes, in order, though only the tail is kept."""
    transport, _ = server
    seen = {Stream.STDOUT: 0, Stream.STDERR: 0}

    async def receive(stream: Stream, data: bytes) -> None:
        seen[stream] += len(data)
        await asyncio.sleep(0)

    result = await transport.exec("head -c 20000000 /dev/zero; echo end >&2; exit 5", keep_bytes=10, on_output=receive)
    assert (result.status, result.stdout_bytes, seen[Stream.STDOUT], seen[Stream.STDERR]) == (5, 20_000_000, 20_000_000, 4)
    assert len(result.stdout) == 10


async def test_a_receiver_that_fails_ends_the_command(server: tuple[SSHTransport, Path]) -> None:
    """The caller sees its own error, and the command does not live on."""
    transport, _ = server

    async def fail(stream: Stream, data: bytes) -> None:
        raise ValueError(data.decode())

    with pytest.raises(ValueError, match=r"^\d+\n$") as caught:
        await transport.exec("echo $$; sleep 60", on_output=fail)
    assert await is_gone(transport, str(int(str(caught.value))))


async def test_many_commands_at_once_and_many_time_limits(server: tuple[SSHTransport, Path]) -> None:
    """P09, P17, P45: slots come back; statuses and byte counts are exact."""
    transport, _ = server
    for _ in range(12):
        assert (await transport.exec("sleep 605", timeout_s=0.02)).timed_out
    results = await asyncio.gather(*(
        transport.exec(f"head -c 100000 /dev/zero; exit {number % 200}") for number in range(40)
    ))
    assert [(r.status, r.stdout_bytes) for r in results] == [(number % 200, 100_000) for number in range(40)]
    assert (await transport.exec("echo ok")).stdout == b"ok\n"


async def test_a_cancelled_call_kills(server: tuple[SSHTransport, Path]) -> None:
    """E6."""
    transport, workspace = server
    call = asyncio.create_task(transport.exec("echo $$ > pid; sleep 601 & wait"))
    for _ in range(500):
        if (workspace / "pid").exists() and (workspace / "pid").read_text().endswith("\n"):
            break
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    pid = (workspace / "pid").read_text().strip()
    assert await is_gone(transport, pid)


async def test_the_guard_is_killed(server: tuple[SSHTransport, Path]) -> None:
    """A command that ran is killed and reported; the next call gets a new guard."""
    transport, _ = server
    connection = await transport.connect()
    pid = connection.guard._session.pid
    running = asyncio.create_task(transport.exec("echo $$; sleep 601"))
    while not connection.running or not next(iter(connection.running)).received:
        await asyncio.sleep(0.01)
    with contextlib.suppress(errors.ConnectionLost):  # it runs under the guard that it kills
        await transport.exec(f"kill -9 {pid}")
    with pytest.raises(errors.ConnectionLost, match="outcome is unknown") as caught:
        await asyncio.wait_for(running, 20)
    assert (await transport.exec("echo new guard")).stdout == b"new guard\n"
    group = caught.value.stdout.decode().strip()
    assert await is_gone(transport, group)


async def test_when_the_harness_dies_nothing_is_left(server: tuple[SSHTransport, Path], tmp_path: Path) -> None:
    """P06: the connection is cut; the guard kills what ran."""
    transport, workspace = server
    connection = await transport.connect()
    call = asyncio.create_task(transport.exec("echo $$ > pid; sleep 601; echo x"))
    while not (workspace / "pid").exists() or not (workspace / "pid").read_text().endswith("\n"):
        await asyncio.sleep(0.01)
    connection.ssh.abort()
    with pytest.raises(errors.ConnectionLost):
        await call
    assert await is_gone(transport, (workspace / "pid").read_text().strip())
    assert (await transport.exec("echo again")).stdout == b"again\n"


async def test_a_stopped_guard_is_a_clear_error(server: tuple[SSHTransport, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a live guard no command starts; the next call opens a new connection."""
    transport, _ = server
    monkeypatch.setattr("asp.ssh.guard.ANSWER_TIMEOUT_S", 0.5)
    connection = await transport.connect()
    pid = connection.guard._session.pid
    stop = asyncio.create_task(transport.exec(f"kill -STOP {pid}"))
    with contextlib.suppress(errors.AspError):
        await asyncio.wait_for(stop, 20)
    with contextlib.suppress(errors.NotStarted):
        await transport.exec("echo one")
    assert (await transport.exec("echo two")).stdout == b"two\n"
    assert await is_gone(transport, str(pid))


async def test_errors_of_paths(server: tuple[SSHTransport, Path]) -> None:
    """P42: told apart."""
    transport, workspace = server
    (workspace / "dir").mkdir()
    (workspace / "file").write_text("x")
    (workspace / "loop").symlink_to("loop")
    (workspace / "dangling").symlink_to("nowhere")
    os.mkfifo(workspace / "fifo")
    for path, kind in (
        ("nope", errors.PathMissing), ("dir", errors.PathIsDirectory), ("file/x", errors.PathNotDirectory),
        ("loop", errors.PathLoop), ("dangling", errors.PathMissing), ("fifo", errors.PathSpecial),
        ("no/such/dir/file", errors.PathMissing),
    ):  # fmt: skip
        with pytest.raises(errors.RemotePathError) as caught:
            await asyncio.wait_for(transport.read(path), 5)
        assert type(caught.value) is kind, path
    with pytest.raises(errors.PathIsDirectory):
        await transport.write("dir", b"x")
    with pytest.raises(errors.PathSpecial):
        await asyncio.wait_for(transport.write("fifo", b"x"), 5)


async def test_files_keep_what_they_are(server: tuple[SSHTransport, Path]) -> None:
    """P37-P40, F3: modes, links, hard links stay; nothing else is left in the directory."""
    transport, workspace = server
    blob = os.urandom(1_000_000)
    await transport.write("a/b/blob", blob)
    assert await transport.read("a/b/blob") == blob
    assert await transport.read("a/b/blob", offset=999_990) == blob[-10:]
    assert await transport.read("a/b/blob", offset=5, max_bytes=7) == blob[5:12]
    assert (workspace / "a/b/blob").stat().st_mode & 0o7777 == 0o644
    assert b"Linux" in await transport.read("/proc/version")
    await transport.exec(
        "printf old > plain; chmod 600 plain; ln plain hard; printf x > run; chmod 755 run; ln -s run link; ln -s made dangling",
    )
    await transport.write("run", b"new")
    await transport.write("link", b"newer")
    await transport.write("dangling", b"made")
    await transport.write("hard", b"both")
    state = await transport.exec("cat run plain made; stat -c '%n %a %h %F' run plain hard link dangling; ls -A")
    assert state.stdout.decode() == (
        "newerbothmade"
        "run 755 1 regular file\nplain 600 2 regular file\nhard 600 2 regular file\n"
        "link 777 1 symbolic link\ndangling 777 1 symbolic link\n"
        "a\ndangling\nhard\nlink\nmade\nplain\nrun\n"
    )
    listed = await transport.list(".")
    assert [entry.name for entry in listed] == [b"a", b"dangling", b"hard", b"link", b"made", b"plain", b"run"]
