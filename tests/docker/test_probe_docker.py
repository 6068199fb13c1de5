"""The probe in containers: it finds what common set-ups leave open, and a container without a network reaches none of it.

The listeners are sockets of this process in the namespaces of the engine's host, of a stand-in for the internet, and of other
containers. What a leaky container reaches, a container of the same image without a network did not, with the same targets.
"""

import asyncio
import importlib.util
import io
import ipaddress
import os
import random
import secrets
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import missing
from probe_lab import Command, Listeners, Namespace, in_namespace, run
from sandbox_lab import Lab

from asp import contract, trust
from asp.probe import Report, Verdict, parse, probe
from asp.ssh import open_transport

pytestmark = [pytest.mark.docker, pytest.mark.root, pytest.mark.timeout(300)]
WAIT_S = 2.0
LONG_WAIT_S = 50.0
BUSYBOX = Path("/bin/busybox")
LABEL = "asp-test-probe"
HARDENED = ("--user", "1000:1000", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


@pytest.fixture(scope="module")
def engine() -> None:
    if shutil.which("docker") is None:
        missing("docker", "there is no docker command")
    if subprocess.run(["docker", "info"], capture_output=True, timeout=50, check=False).returncode != 0:
        missing("docker", "no Docker engine answers")
    if os.getuid() != 0:
        missing("root", "network namespaces need root")


@pytest.fixture(scope="module")
def image(engine: None) -> Iterator[str]:
    """A static busybox and nothing else: what an image has that has a shell at all."""
    if not BUSYBOX.exists() or b"ld-linux" in BUSYBOX.read_bytes()[:4096]:
        missing("docker", "there is no static busybox to make an image of")
    name = f"{LABEL}-{secrets.token_hex(4)}"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(BUSYBOX.resolve(), "bin/busybox")
        for link in ("bin/sh", "bin/sleep", "bin/chmod", "bin/rm"):
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(entry)
        entry = tarfile.TarInfo("tmp")
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(entry)
    subprocess.run(["docker", "import", "-", name], input=packed.getvalue(), check=True, capture_output=True, timeout=120)
    yield name
    run("docker", "rmi", "-f", name)


class Engine:
    """Makes containers and networks, and takes all of them away."""

    def __init__(self, image: str, stack: ExitStack) -> None:
        self._image, self._stack = image, stack

    def container(self, network: str, *options: str, image: str | None = None) -> str:
        words = ("docker", "run", "-d", "--label", LABEL, "--network", network, *HARDENED, *options)
        made = run(*words, image or self._image, "/bin/sh", "-c", "while :; do sleep 3600 & wait; done").strip()
        self._stack.callback(run, "docker", "rm", "-f", made)
        return made

    def network(self, *options: str) -> str:
        name = f"{LABEL}-{secrets.token_hex(4)}"
        for third in random.sample(range(1, 251), 250):  # one that nobody on this machine has
            words = ("docker", "network", "create", "--label", LABEL, "--subnet", f"198.19.{third}.0/24", *options, name)
            done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
            if done.returncode == 0:
                break
            assert "overlap" in done.stderr, done.stderr
        self._stack.callback(run, "docker", "network", "rm", name)
        return name

    def gateway(self, network: str) -> str:
        return run("docker", "network", "inspect", "-f", "{{(index .IPAM.Config 0).Gateway}}", network).strip() or (
            run("docker", "network", "inspect", "-f", "{{(index .IPAM.Config 0).Subnet}}", network).strip().replace(".0/24", ".1")
        )

    def address(self, container: str) -> str:
        return run("docker", "inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", container).strip()

    def network_file(self, container: str) -> str:
        return f"/proc/{run('docker', 'inspect', '-f', '{{.State.Pid}}', container).strip()}/ns/net"


@pytest.fixture
def docker(image: str) -> Iterator[Engine]:
    with ExitStack() as stack:
        yield Engine(image, stack)


def inside(container: str) -> Command:
    return Command(["docker", "exec", "-i", container])


def reached(report: Report) -> set[str]:
    return {check.target for check in report.with_verdict(Verdict.REACHED)}


OUT = {"internet-tcp", "internet-udp", "internet-dns", "metadata-tcp"}
HOST = {"host-tcp", "host-udp", "host-dns"}
LEAKY = {
    "bridge": ((), OUT | HOST | {"neighbour"}),
    "internal": (("--internal",), HOST | {"neighbour"}),
    "masquerade off": (
        ("-o", "com.docker.network.bridge.enable_ip_masquerade=false", "-o", "com.docker.network.bridge.enable_icc=false"),
        OUT | HOST,
    ),
}  # fmt: skip


@pytest.mark.parametrize("leak", LEAKY)
async def test_each_leak_is_found_and_no_network_has_none_of_them(docker: Engine, leak: str) -> None:
    options, expected = LEAKY[leak]
    network = docker.network(*options)
    neighbour, stranger = docker.container(network), docker.container(docker.network())
    with Namespace() as internet:
        async with Listeners() as listeners:
            names: dict[str, str] = {}
            host = docker.gateway(network)
            for kind in ("tcp", "udp", "dns"):
                port = await listeners.add(kind, internet.there, f"internet-{kind}", internet.inside)
                names[f"{kind}:{internet.there}:{port}"] = f"internet-{kind}"
                port = await listeners.add(kind, "0.0.0.0", f"host-{kind}")
                names[f"{kind}:{host}:{port}"] = f"host-{kind}"
            port = await listeners.add("tcp", internet.metadata, "metadata-tcp", internet.inside)
            names[f"tcp:{internet.metadata}:{port}"] = "metadata-tcp"
            for name, container in (("neighbour", neighbour), ("stranger", stranger)):
                there, address = docker.network_file(container), docker.address(container)
                port = await listeners.add("tcp", address, name, lambda make, there=there: in_namespace(there, make))
                names[f"tcp:{address}:{port}"] = name
            targets = [parse(text) for text in names]

            alone = await probe(inside(docker.container("none")), targets, wait_s=WAIT_S)
            open_ = [check for check in alone.checks if check.verdict is not Verdict.BLOCKED]
            assert not [check for check in open_ if check.kind not in {"vsock", "io_uring"}], open_
            assert alone.interfaces == ()
            assert all(control.worked for control in alone.controls), alone.controls

            # Apart, for the time: the wait for those that answer is long and ends when they do.
            container = inside(docker.container(network))
            answering = [target for target in targets if names[str(target)] in expected]
            leaky = await probe(container, answering, found=False, wait_s=LONG_WAIT_S)
            assert {names[target] for target in reached(leaky) & set(names)} == expected, leaky.checks
            assert not leaky.blocked
            others = [target for target in targets if target not in answering]
            assert not reached(await probe(container, others, found=False, wait_s=WAIT_S)) & set(names)
            for name in expected:
                assert await listeners.has_seen(name), (name, listeners.seen)
            # Each was reached once, by the second container; so the first reached none. (UDP may get out without an answer.)
            counted = Counter(line.split()[0] for line in listeners.seen)
            assert counted == Counter(expected), listeners.seen
            assert "internet-dns" not in expected or "internet-dns asp-probe.invalid" in listeners.seen


IMAGES = ("asp-test-debian", "asp-test-busybox", "asp-test-empty", "asp-test-musl")


@pytest.fixture
def boxes(engine: None, tmp_path: Path) -> Iterator[dict[str, Path]]:
    """A sandbox of ``asp-sandbox up docker`` from each image: the folder that holds its contract."""
    if importlib.util.find_spec("docker") is None or importlib.util.find_spec("docker.client") is None:
        missing("docker", "the extra docker is not installed")
    lab = Lab(tmp_path)
    lab.environment |= {name: value for name, value in os.environ.items() if name.startswith("DOCKER_")}
    made: dict[str, Path] = {}
    try:
        for image in IMAGES:
            if (
                subprocess.run(["docker", "image", "inspect", image], capture_output=True, timeout=100, check=False).returncode
                != 0
            ):
                missing("docker", f"{image} is not made; run tests/docker/images")
            made[image] = lab.repository(image)
            up = lab.run("up", "docker", "--image", image, "--disk", "16m", "--memory", "256m", cwd=made[image])
            assert up.returncode == 0, up.stderr
        yield made
    finally:
        lab.close()


async def test_the_docker_provider_reaches_nothing(docker: Engine, boxes: dict[str, Path]) -> None:
    """Over SSH, in images with and without a shell; with a network, the same images reach each listener."""
    with Namespace() as internet:
        async with Listeners() as listeners:
            names: dict[str, str] = {}
            network = docker.network()
            neighbour, stranger = docker.container(network), docker.container(docker.network())
            for kind in ("tcp", "udp", "dns"):
                for name, address in (("internet", internet.there), ("metadata", internet.metadata)):
                    port = await listeners.add(kind, address, f"{name}-{kind}", internet.inside)
                    names[f"{kind}:{address}:{port}"] = f"{name}-{kind}"
                port = await listeners.add(kind, "0.0.0.0", f"host-{kind}")
                names[f"{kind}:{docker.gateway(network)}:{port}"] = f"host-{kind}"
            there, address = docker.network_file(neighbour), docker.address(neighbour)
            port = await listeners.add("tcp", address, "neighbour", lambda make: in_namespace(there, make))
            names[f"tcp:{address}:{port}"] = "neighbour"
            reachable = [parse(text) for text in names]
            # Not even those with a network reach these: another network, the host's own loopback and abstract names.
            elsewhere, other = docker.network_file(stranger), docker.address(stranger)
            more = [f"tcp:{other}:{await listeners.add('tcp', other, 'stranger', lambda make: in_namespace(elsewhere, make))}"]
            more.append(f"tcp:127.0.0.1:{await listeners.add('tcp', '127.0.0.1', 'loopback')}")
            abstract = f"asp-probe-{secrets.token_hex(4)}"
            await listeners.add("tcp", b"\0" + abstract.encode(), "abstract")
            targets = [*reachable, *map(parse, (*more, f"abstract:{abstract}"))]

            for folder in boxes.values():
                trusted = trust.require(contract.load(folder / ".asp.json"), named=True)
                async with open_transport(trusted) as transport:
                    report = await probe(transport, targets)
                assert report.blocked, [str(check) for check in report.checks if check.verdict is not Verdict.BLOCKED]
                assert {str(target) for target in targets} <= {check.target for check in report.checks}
                assert all(control.worked for control in report.controls), report.controls
                assert report.interfaces == ()

            with_shell = IMAGES[:2]
            for image in with_shell:
                open_ = inside(docker.container(network, "--tmpfs", "/tmp:exec", image=image))
                leaky = await probe(open_, reachable, found=False, wait_s=LONG_WAIT_S)
                assert set(names) <= reached(leaky), leaky.checks
            for name in names.values():
                assert await listeners.has_seen(name), (name, listeners.seen)
            # Once for each of the containers with a network; so the sandboxes reached none.
            assert Counter(line.split()[0] for line in listeners.seen) == Counter([*names.values()] * len(with_shell))


async def test_an_image_where_no_program_runs_is_not_proven(docker: Engine) -> None:
    """Docker's tmpfs is noexec, and the rest is read-only: no tool of the image can be used, and that is not "blocked"."""
    sealed = docker.container("none", "--read-only", "--tmpfs", "/tmp")
    report = await probe(inside(sealed), [parse("tcp:192.0.2.1:80")])
    assert {check.verdict for check in report.checks} == {Verdict.NOT_PROVEN}
    assert not report.blocked
    assert "noexec" in report.checks[0].why


async def test_the_program_runs_in_gvisor() -> None:
    """Its kernel is another one: what it refuses has other names, and what it allows stays in it."""
    if shutil.which("runsc") is None or os.getuid() != 0:
        pytest.skip("runsc is not installed, or we are not root")
    prefix = ["runsc", "--platform=ptrace", "--network=none", "do"]
    if subprocess.run([*prefix, "true"], capture_output=True, timeout=100, check=False).returncode != 0:
        pytest.skip("runsc does not run here")
    async with Listeners() as listeners:
        port = await listeners.add("tcp", "0.0.0.0", "host")
        loopback = await listeners.add("tcp", "127.0.0.1", "loopback")
        targets = [parse(f"tcp:198.18.0.1:{port}"), parse(f"tcp:127.0.0.1:{loopback}")]
        report = await probe(Command(prefix), targets)
        for _ in range(2):  # Debian's runsc is of 2022 and ends at times by itself [ran]; then nothing is proven
            if report.with_verdict(Verdict.REACHED) or report.blocked:
                break
            report = await probe(Command(prefix), targets)
        assert report.blocked, [str(check) for check in report.checks if check.verdict is not Verdict.BLOCKED]
        assert all(control.worked for control in report.controls)
        assert listeners.seen == []


async def test_the_host_is_found_over_ipv6(docker: Engine) -> None:
    """An internal network has the host's addresses of both kinds; a container without a network has neither."""
    first, second = random.randrange(1, 1 << 16), random.randrange(1, 1 << 16)
    network = docker.network("--internal", "--ipv6", "--subnet", f"2001:db8:{first:x}:{second:x}::/64")
    container = docker.container(network)
    there = docker.network_file(container)
    # The bridge's own link-local address, and the number that the container's interface has inside.
    lines = in_namespace(there, lambda: Path("/proc/thread-self/net/if_inet6").read_text()).splitlines()
    inside_index = next(int(words[1], 16) for words in map(str.split, lines) if words[5] == "eth0")
    bridge = "br-" + run("docker", "network", "inspect", "-f", "{{.Id}}", network)[:12]
    ours: list[list[str]] = []
    for _ in range(1000):  # until the kernel has looked for other owners of these addresses
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        ours = [words for words in map(str.split, lines) if words[5] == bridge]
        if ours and not any(int(words[4], 16) & 0x40 for words in ours):
            break
        await asyncio.sleep(0.05)
    addresses = [str(ipaddress.IPv6Address(bytes.fromhex(words[0]))) for words in ours]
    async with Listeners() as listeners:
        names: dict[str, str] = {}
        for number, address in enumerate(addresses):
            local = address.startswith("fe80")
            for kind in ("tcp", "udp"):
                port = await listeners.add(kind, f"{address}%{bridge}" if local else address, f"host6-{kind}-{number}")
                names[f"{kind}:[{address}{f'%{inside_index}' if local else ''}]:{port}"] = f"host6-{kind}-{number}"
        targets = [parse(text) for text in names]
        assert {target.address is not None and target.address.is_link_local for target in targets} == {True, False}
        alone = await probe(inside(docker.container("none")), targets)
        assert not reached(alone) & set(names)
        assert {check.verdict for check in alone.checks if check.target in names} == {Verdict.BLOCKED}
        leaky = await probe(inside(container), targets, found=False, wait_s=LONG_WAIT_S)
        assert set(names) <= reached(leaky), leaky.checks
        assert Counter(line.split()[0] for line in listeners.seen) == Counter(names.values())
