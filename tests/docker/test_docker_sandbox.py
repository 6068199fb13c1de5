"""``asp-sandbox up docker`` on images that have everything, little, or nothing, under runc and gVisor."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from conftest import missing, trusted
from corpus import SCRIPTS, without_pids
from docker_lab import GVISOR, Container, DockerLab, docker, runtimes

from asp.errors import TransportError
from asp.ssh import open_transport
from asp.ssh.transport import SSHTransport
from asp.transport import FileKind

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]
WAIT_S = 100

KINDS = {
    "debian": ("--image", "asp-test-debian"),
    "debian-root": ("--image", "asp-test-debian", "--user", "root", "--allow-root"),
    "busybox": ("--image", "asp-test-busybox"),
    "busybox-1000": ("--image", "asp-test-busybox", "--user", "1000"),
    "empty": ("--image", "asp-test-empty"),
    "musl": ("--image", "asp-test-musl"),
    "gvisor-debian": ("--image", "asp-test-debian", "--runtime", GVISOR),
    "gvisor-empty": ("--image", "asp-test-empty", "--runtime", GVISOR),
}
SHELL = {kind: "bash" if "debian" in kind else "sh" for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS)
def box(request: pytest.FixtureRequest, docker_lab: DockerLab) -> Iterator[Container]:
    """One sandbox of each kind, for all tests here."""
    kind: str = request.param
    if "gvisor" in kind and GVISOR not in runtimes():
        missing("gvisor", f"the engine has no runtime {GVISOR}")
    repository = docker_lab.folder / f"repo-{kind}"
    repository.mkdir()
    container = docker_lab.up(repository, *KINDS[kind])
    container.kind = kind
    yield container
    docker_lab.run("down", container.name)


@pytest.fixture
async def transport(box: Container, tmp_path: Path) -> AsyncIterator[SSHTransport]:
    async with open_transport(trusted(box.contract, tmp_path)) as opened:
        await opened.exec("rm -rf ./* ./.[!.]*")
        yield opened


def reference(box: Container, environment: dict[str, str]) -> tuple[int, bytes, bytes]:
    """Run the script in /tmp/.script by the image's own shell, started by the engine and not by ssh."""
    pairs = [f"{name}={value}" for name, value in environment.items()]
    shell = box.tool(SHELL[box.kind])
    # By a file: docker's client takes arguments in UTF-8 only.
    run = f'unset SHLVL; __x=$({box.tool("cat")} /tmp/.script; echo x); exec {shell} -c -- "${{__x%x}}"'
    words = [box.tool("env"), "-i", *pairs, "/bin/sh", "-c", run]
    done = docker("exec", "-u", box.account, "-w", "/workspace", box.id, *words, check=False)
    return done.returncode, without_pids(done.stdout), without_pids(done.stderr)


async def test_every_script_gives_what_the_shell_gives(box: Container, transport: SSHTransport) -> None:
    seen = await transport.exec("env")
    pairs = (line.partition("=")[::2] for line in seen.stdout.decode().splitlines() if "=" in line)
    environment = {name: value for name, value in pairs if name not in {"_", "PWD", "SHLVL", "OLDPWD"}}
    name = box.tool(SHELL[box.kind]).encode()
    differences = []
    for number, script in enumerate(SCRIPTS):
        if "gvisor" in box.kind and number % 4:  # half a second each there
            continue
        await transport.write("/tmp/.script", script)
        expected = reference(box, environment)
        done = await asyncio.wait_for(transport.exec(script), WAIT_S)
        got = (done.status, without_pids(done.stdout), without_pids(done.stderr))
        short = SHELL[box.kind].encode()
        expected = (expected[0], expected[1].replace(name, short), expected[2].replace(name, short))
        got = (got[0], got[1].replace(name, short), got[2].replace(name, short))
        if got != expected:
            differences.append((script[:80], expected, got))
    assert not differences


async def test_files_and_long_output(box: Container, transport: SSHTransport) -> None:
    data = bytes(range(256)) * 4096
    await transport.write("deep/er/file", data)
    assert await transport.read("deep/er/file") == data
    assert (await transport.stat("deep/er")).kind is FileKind.DIRECTORY
    done = await asyncio.wait_for(transport.exec("cat deep/er/file; cat deep/er/file >&2", keep_bytes=1 << 21), WAIT_S)
    assert (done.stdout, done.stderr) == (data, data)
    if "gvisor" not in box.kind:  # one of 2022 loses output of commands that run side by side, whoever starts them
        result = await asyncio.gather(*(transport.exec(f"echo {n}") for n in range(20)))
        assert [one.stdout for one in result] == [b"%d\n" % n for n in range(20)]
    back = await asyncio.wait_for(transport.exec("cat", stdin=data, keep_bytes=1 << 21), WAIT_S)
    assert back.stdout == data


async def test_no_right_is_left(box: Container, transport: SSHTransport) -> None:
    status = (await transport.exec("cat /proc/self/status")).stdout.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    allowed = "00000000000400c0" if box.kind == "debian-root" else "0" * 16  # setuid, setgid, chroot: what sshd needs as root
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd")} <= {"0" * 16, allowed}
    if "gvisor" not in box.kind:  # a kernel of its own, which does not say
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
        writable = await transport.exec(
            "for f in $(find /proc/sys /sys -type f 2>/dev/null); do ( : >>$f ) 2>/dev/null && echo $f; done; :", timeout_s=WAIT_S
        )
        assert (writable.status, writable.stdout) == (0, b"")
    for path in ("/x", "/etc/x", "/opt/base/x", "/opt/conf/x", "/bin/x", "/usr/x", "/var/x"):
        assert (await transport.exec(f": >{path}")).status != 0, path
    for path in ("/workspace/x", "/tmp/x", "$HOME/x" if "busybox" not in box.kind or "1000" in box.kind else "/tmp/y"):
        runs = await transport.exec(f"printf '#!/bin/sh\\necho ran\\n' >{path}; chmod +x {path}; {path}")
        assert runs.stdout == b"ran\n", path


async def test_no_network_but_itself(transport: SSHTransport) -> None:
    interfaces = (await transport.exec("cat /proc/net/dev")).stdout.decode().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces if not line.strip().startswith(("tunl", "ip6", "sit"))] == ["lo"]
    known = (await transport.exec("cat /etc/resolv.conf; cat /etc/hosts")).stdout
    assert known == b"127.0.0.1 localhost\n::1 localhost\n"


async def test_the_image_is_honoured(box: Container, transport: SSHTransport) -> None:
    said = (await transport.exec("echo $IMAGE_SAYS; id -un; id -u; pwd")).stdout.decode().splitlines()
    says = "a b" if "debian" in box.kind else "busybox" if "busybox" in box.kind else ""
    user = {"debian-root": ["root", "0"], "busybox": ["image", "1234"]}.get(box.kind, ["agent", "1000"])
    assert said == [says, *user, "/workspace"]
    assert ("the agent is root inside" in box.said) == (box.kind == "debian-root")
    if "musl" in box.kind:
        assert (await transport.exec("musl-program")).stdout == b"musl agent\n"
    if "debian" in box.kind:
        assert (await transport.exec("printf '\\303\\244' | wc -m")).stdout == b"1\n"
        assert (await transport.exec("case $PATH in */opt/image/bin) echo kept; esac")).stdout == b"kept\n"


async def test_kill_everything(box: Container, tmp_path: Path) -> None:
    """``kill -9 -1`` takes the server with it; the files and the sandbox stay, and the next connection works."""
    async with open_transport(trusted(box.contract, tmp_path)) as transport:
        await transport.write("kept", b"x")
        with pytest.raises(TransportError):
            await asyncio.wait_for(transport.exec("kill -9 -1; sleep 5"), WAIT_S)
        assert (await asyncio.wait_for(transport.exec("cat kept"), WAIT_S)).stdout == b"x"
        zombies = await transport.exec("grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l")
        assert int(zombies.stdout) == 0


async def test_ldso_preload_of_the_image_is_not_read(docker_lab: DockerLab, tmp_path: Path) -> None:
    """The image's /etc/ld.so.preload names a library that writes a mark in everything that loads it."""
    marker = tmp_path / "context"
    marker.mkdir()
    (marker / "Dockerfile").write_text("FROM asp-test-debian\nRUN echo /nonexistent-library.so >/etc/ld.so.preload\n")
    docker("build", "-q", "--network", "none", "-t", "asp-test-preload", str(marker))
    repository = docker_lab.folder / "repo-preload"
    repository.mkdir()
    try:
        box = docker_lab.up(repository, "--image", "asp-test-preload")
        async with open_transport(trusted(box.contract, tmp_path)) as transport:
            done = await transport.exec("/bin/true")
            assert b"nonexistent-library" in done.stderr, "the image's own programs read it: the control"
            assert (await transport.exec("echo in")).stdout == b"in\n"
        served = box.exec("/opt/base/lib/ld.so", "--library-path", "/opt/base/lib", "/opt/base/bin/sshd", "-V", check=False)
        assert b"OpenSSH" in served.stderr
        assert b"nonexistent-library" not in served.stderr
        docker_lab.run("down", box.name)
    finally:
        docker("rmi", "-f", "asp-test-preload", check=False)


async def test_hostile_commands_end_with_clear_errors_and_a_neighbour_does_not_notice(
    docker_lab: DockerLab, tmp_path: Path
) -> None:
    limits = ("--memory", "128m", "--disk", "64m", "--pids", "64", "--image", "asp-test-debian")
    boxes = []
    for name in ("hostile", "neighbour"):
        repository = docker_lab.folder / f"repo-{name}"
        repository.mkdir()
        (tmp_path / name).mkdir()
        boxes.append(docker_lab.up(repository, *limits))
    async with (
        open_transport(trusted(boxes[0].contract, tmp_path / "hostile")) as hostile,
        open_transport(trusted(boxes[1].contract, tmp_path / "neighbour")) as neighbour,
    ):
        answered = 0

        async def answer() -> None:
            nonlocal answered
            while True:
                assert (await asyncio.wait_for(neighbour.exec("echo here"), WAIT_S)).stdout == b"here\n"
                answered += 1

        other = asyncio.create_task(answer())
        full = await asyncio.wait_for(hostile.exec("head -c 100000000 /dev/zero >big; echo $?; rm big"), WAIT_S)
        assert b"No space left on device" in full.stderr
        hog = await asyncio.wait_for(hostile.exec("python3 -c 'x = bytearray(1 << 30)'"), WAIT_S)
        assert hog.status == 137
        assert (await asyncio.wait_for(hostile.exec("echo still here"), WAIT_S)).stdout == b"still here\n"
        (tmp_path / "bomb").mkdir()
        async with open_transport(trusted(boxes[0].contract, tmp_path / "bomb")) as bombing:
            bomb = await asyncio.wait_for(bombing.exec("b() { b | b & }; b; sleep 1; echo x", timeout_s=20), WAIT_S)
            assert b"fork" in bomb.stderr.lower()
        async with asyncio.timeout(WAIT_S):  # closing the connection has killed the bomb; then there is room again
            while True:
                try:
                    if (await hostile.exec("echo after", timeout_s=20)).stdout == b"after\n":
                        break
                except TransportError as error:
                    assert "fork" in str(error).lower() or "server" in str(error), error
        assert not other.done(), other
        assert answered > 3
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "say which image"), (("--image", "asp-test-none"), "there is no image"),
        (("--image", "asp-test-debian", "--runtime", "none"), "the engine has no runtime"),
        (("--image", "asp-test-debian", "--user", "nobody-knows"), "the image has no user"),
        (("--image", "asp-test-debian", "--user", "0"), "--user is root"),
        (("--image", "asp-test-debian", "--memory", "much"), "is not a size"),
        (("--image", "asp-test-debian", "--memory", "1m"), "at least 16m"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(docker_lab: DockerLab, tmp_path: Path, words: tuple[str, ...], complaint: str) -> None:
    ours = ("ps", "-aq", "--filter", f"label=asp-sandbox-owner={docker_lab.state}")
    before = docker(*ours).stdout
    done = docker_lab.run("up", "docker", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert not (tmp_path / ".asp.json").exists()
    assert docker(*ours).stdout == before
    assert [row["name"] for row in docker_lab.listed() if str(tmp_path) in str(row["contract"])] == []


def test_no_engine_is_one_line(docker_lab: DockerLab, tmp_path: Path) -> None:
    for host, complaint in (
        (f"unix://{tmp_path}/none", "no Docker engine answers"), ("tcp://127.0.0.1:1", "is not on this machine"),
        ("ssh://nobody@localhost", "is not on this machine"),
    ):  # fmt: skip
        done = docker_lab.run("up", "docker", "--image", "asp-test-debian", cwd=tmp_path, DOCKER_HOST=host)
        assert done.returncode in {2, 4}
        assert complaint in done.stderr
        assert done.stderr.count("\n") <= 2
