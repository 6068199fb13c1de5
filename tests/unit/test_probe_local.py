"""The probe inside a local sandbox, against listeners that write down whoever comes; and on set-ups that leak.

Each listener is reached from the same files with the block taken off, in the same test: so the probe could have seen it.
"""

import asyncio
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import jsonschema
import pytest
from conftest import missing
from probe_lab import Command, Listeners, Namespace, held_tcp_listener
from sandbox_lab import Box, Lab

from asp import contract, trust
from asp.probe import Report, Verdict, parse, probe
from asp.probe.command import host_addresses
from asp.ssh import open_transport

pytestmark = [pytest.mark.bwrap, pytest.mark.timeout(300)]
LONG_WAIT_S = 50.0
ROOT = os.getuid() == 0
FILES = (
    "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin",
    "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
    "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--die-with-parent",
)  # fmt: skip
UID = 61000
ASP = Path(sys.executable).with_name("asp")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    repository = lab.repository()
    done = lab.run("up", "local", cwd=repository)
    if done.returncode == 2 and "local sandboxes" in done.stderr:
        missing("bwrap", done.stderr.strip())
    assert done.returncode == 0, done.stderr
    yield Box(lab, repository)
    lab.close()


@pytest.fixture
async def listeners() -> AsyncIterator[Listeners]:
    async with Listeners() as running:
        yield running


def open_bwrap(*options: str, fds: tuple[int, ...] = (), uid: int = 0) -> Command:
    """Return a sandbox of a stock bubblewrap; started by root as ``uid``."""
    if shutil.which("bwrap") is None:
        missing("bwrap", "bubblewrap is not installed")
    become = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups") if uid and ROOT else ()
    return Command([*become, "bwrap", *FILES, *options], pass_fds=fds)


async def probe_box(box: Box, *targets: str) -> Report:
    trusted = trust.require(contract.load(box.repository / ".asp.json"), named=True)
    async with open_transport(trusted) as transport:
        return await probe(transport, [parse(text) for text in targets])


def reached(report: Report) -> set[str]:
    return {check.target for check in report.with_verdict(Verdict.REACHED)}


def own_addresses() -> list[str]:
    """Return this machine's address as others see it, if it has one: asked of the routing table, nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("198.18.0.1", 9))
        except OSError:
            return []
        return [asked.getsockname()[0]]


async def test_a_local_sandbox_reaches_nothing(box: Box, listeners: Listeners, tmp_path: Path) -> None:
    targets: dict[str, str] = {}
    with ExitStack() as stack:
        for kind in ("tcp", "udp", "dns"):
            port = await listeners.add(kind, "0.0.0.0", f"host-{kind}")
            for address in own_addresses():
                targets[f"{kind}:{address}:{port}"] = f"host-{kind}"
            port = await listeners.add(kind, "127.0.0.1", f"loopback-{kind}")
            targets[f"{kind}:127.0.0.1:{port}"] = f"loopback-{kind}"
            if socket.has_dualstack_ipv6() and Path("/proc/net/if_inet6").read_text().strip():
                port = await listeners.add(kind, "::1", f"loopback6-{kind}")
                targets[f"{kind}:[::1]:{port}"] = f"loopback6-{kind}"
        abstract = f"asp-probe-{os.getpid()}"
        await listeners.add("tcp", b"\0" + abstract.encode(), "abstract")
        targets[f"abstract:{abstract}"] = "abstract"
        internet = None
        if ROOT:
            internet = stack.enter_context(Namespace())
            for name, address, shown in (
                ("internet", internet.there, internet.there), ("metadata", internet.metadata, internet.metadata),
                ("internet6", internet.there6, f"[{internet.there6}]"),
                ("link", f"{internet.link_local}%far", f"[{internet.link_local}%{internet.index}]"),
            ):  # fmt: skip
                for kind in ("tcp", "udp", "dns"):
                    port = await listeners.add(kind, address, f"{name}-{kind}", internet.inside)
                    targets[f"{kind}:{shown}:{port}"] = f"{name}-{kind}"
        pings = [] if internet is None else [f"icmp:{internet.there}", f"icmp:{internet.there6}"]

        report = await probe_box(box, *targets, *pings)
        assert report.blocked, [str(check) for check in report.checks if check.verdict is not Verdict.BLOCKED]
        assert all(control.worked for control in report.controls)
        assert set(targets) | set(pings) <= {check.target for check in report.checks}
        assert {(check.error, check.evidence.value) for check in report.checks if check.kind == "tcp"} == (
            {("ENETUNREACH", "strong"), ("ECONNREFUSED", "strong")}  # refused: by the sandbox's own loopback
        )
        assert report.interfaces == ()
        assert internet is None or internet.pings() == 0

        # The same files, the network of this machine: now each listener is reached, once; so before, none was.
        capable = ("--cap-add", "ALL") if ROOT else ()
        outside = open_bwrap("--unshare-pid", *capable)
        control = await probe(outside, [parse(text) for text in (*targets, *pings)], found=False, wait_s=LONG_WAIT_S)
        assert set(targets) <= reached(control), (set(targets) - reached(control), control.checks)
        for name in targets.values():
            assert await listeners.has_seen(name), (name, listeners.seen)
        assert {line for line in listeners.seen if "dns" in line} == {
            f"{n} asp-probe.invalid" for n in targets.values() if "dns" in n
        }
        assert Counter(line.split()[0] for line in listeners.seen) == Counter(targets.values())
        assert set(pings) <= reached(control)
        assert internet is None or internet.pings() > 0


async def test_the_verb_says_that_all_is_blocked(box: Box) -> None:
    """With the addresses of this machine, which are the sandbox's too in all but its network, and listeners on them."""
    assert {str(address) for address in host_addresses()} >= {"127.0.0.1", *own_addresses()}
    done = await asyncio.to_thread(
        subprocess.run, [ASP, "probe", "--json", "--listen", "--contract", box.repository / ".asp.json"],
        capture_output=True, text=True, timeout=50, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    result = json.loads(done.stdout)
    jsonschema.validate(result, json.loads((Path(__file__).parents[2] / "schema/asp-probe.schema.json").read_text()))
    assert (done.returncode, result["blocked"], done.stderr) == (0, True, ""), done
    assert result["counts"]["blocked"] == len(result["checks"])
    tried = {check["target"] for check in result["checks"]}
    for address in own_addresses():
        assert {f"tcp:{address}:22", f"udp:{address}:9", f"dns:{address}:53", f"icmp:{address}"} <= tried
    listened = [check for check in result["checks"] if check["origin"] == "given"]
    assert {check["kind"] for check in listened} >= {"tcp", "udp"}


async def test_a_tcp_socket_that_is_inherited_is_found() -> None:
    """Facts 2.3: shut down and connected anew, it connects from the network of who made it."""
    with held_tcp_listener() as held:
        leaky = open_bwrap("--unshare-all", fds=(held.fileno(),), uid=UID)
        report = await probe(leaky, found=False)
        found = [check for check in report.with_verdict(Verdict.REACHED) if check.kind == "inherited"]
        assert any(f"descriptor {held.fileno()} of process" in check.target for check in found), report.checks
        assert any(check.target == f"inherited descriptor {held.fileno()}" for check in found)
        # The control: without it, nothing is held.
        report = await probe(open_bwrap("--unshare-all", uid=UID), found=False)
        assert [check.verdict for check in report.checks if check.kind == "inherited"] == [Verdict.BLOCKED]


async def test_a_tcp_socket_that_only_the_server_holds_is_found() -> None:
    """Close-on-exec does not help: a child takes a copy from its parent, with the same uid (pidfd_getfd)."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not Path("/usr/bin/python3").exists() or (scope.exists() and scope.read_text().strip() != "0"):
        pytest.skip("no python3 to be the server, or no process may take another's descriptors here")
    server = "import os, subprocess, sys; os.set_inheritable(int(sys.argv[1]), False); sys.exit(subprocess.call(sys.argv[2:]))"
    with held_tcp_listener() as held:
        number = str(held.fileno())
        leaky = open_bwrap("--unshare-all", "/usr/bin/python3", "-I", "-c", server, number, fds=(held.fileno(),), uid=UID)
        found = reached(await probe(leaky, found=False))
        assert any(target.startswith(f"descriptor {number} of process") for target in found), found
        assert f"inherited descriptor {number}" not in found


@pytest.mark.root
async def test_kernel_uid_0_is_found() -> None:
    """S3: bubblewrap started by root writes /proc/sys, whatever uid it shows inside and without any capability."""
    if not ROOT:
        missing("root", "kernel uid 0 needs root")
    dropped = ("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL")
    report = await probe(open_bwrap(*dropped), found=False)
    if not os.access("/proc/sys/kernel/core_pattern", os.W_OK):
        pytest.skip("/proc/sys is read-only on this machine, so it is not writable inside either")
    assert "writing /proc/sys/kernel/core_pattern" in reached(report)
    report = await probe(open_bwrap(*dropped, uid=UID), found=False)
    assert "writing /proc/sys/kernel/core_pattern" not in reached(report)
    assert {check.verdict for check in report.checks if check.kind == "kernel"} == {Verdict.BLOCKED}


async def test_a_stock_bubblewrap_leaves_ways_that_ours_closes(box: Box) -> None:
    """The control of the kinds that have no listener: without our filter the same kernel allows what it refuses with it."""
    open_here = reached(await probe(open_bwrap("--unshare-all", uid=UID), found=False))
    ours = await probe_box(box)
    ways = {check.target: check for check in ours.checks if check.kind in {"vsock", "io_uring", "namespace"}}
    assert {check.verdict for check in ways.values()} == {Verdict.BLOCKED}
    if "a new user namespace" in open_here:
        assert ways["a new user namespace"].error == "EPERM"
    if "io_uring_setup" in open_here:
        assert ways["io_uring_setup"].error == "EPERM"
    if "AF_VSOCK stream" in open_here:
        assert ways["AF_VSOCK stream"].error == "EAFNOSUPPORT"


async def test_a_folder_that_runs_no_program_proves_nothing(tmp_path: Path) -> None:
    """No tool, no place: never "blocked"."""
    sandbox = open_bwrap("--unshare-all", "--remount-ro", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/", uid=UID)
    report = await probe(sandbox, [parse("tcp:127.0.0.1:1")], found=False)
    assert {check.verdict for check in report.checks} == {Verdict.NOT_PROVEN}
    assert not report.blocked


async def test_without_proc_what_is_there_to_reach_is_not_known() -> None:
    blind = open_bwrap("--unshare-all", "--tmpfs", "/proc", uid=UID)
    report = await probe(blind)
    not_proven = {check.target: check.why for check in report.with_verdict(Verdict.NOT_PROVEN)}
    assert "cannot be read" in not_proven["/proc/net"]
    assert "/proc is not there" in not_proven["sockets held inside"]
    assert not report.blocked


def seccomp(folder: Path, *families: tuple[int, int]) -> Path:
    """Write a filter that answers socket(FAMILY) with an action, and allows all else."""
    number = 41 if os.uname().machine == "x86_64" else 198
    code = [(0x20, 0, 0, 0), (0x15, 0, 1 + 2 * len(families), number), (0x20, 0, 0, 16)]
    for family, action in families:
        code += [(0x15, 0, 1, family), (0x06, 0, 0, action)]
    path = folder / "filter"
    path.write_bytes(b"".join(struct.pack("<HBBI", *line) for line in (*code, (0x06, 0, 0, 0x7FFF0000))))
    path.chmod(0o644)
    return path


async def test_what_a_filter_refuses_is_blocked_by_name(tmp_path: Path) -> None:
    """An errno or SIGSYS of the filter's is the kernel's own word; no listener is needed to believe it."""
    open_bwrap()  # or skip
    rules = seccomp(tmp_path, (2, 0x00050000 | 1), (40, 0x80000000))  # AF_INET: EPERM; AF_VSOCK: killed
    start = f'exec 9<"{rules}"; exec bwrap {" ".join(FILES)} --unshare-all --seccomp 9 "$@"'
    report = await probe(Command(["sh", "-c", start, "sh"]), [parse("tcp:127.0.0.1:9"), parse("tcp:[::1]:9")], found=False)
    by_target = {check.target: check for check in report.checks}
    assert (by_target["tcp:127.0.0.1:9"].error, by_target["tcp:127.0.0.1:9"].verdict) == ("EPERM", Verdict.BLOCKED)
    assert (by_target["AF_VSOCK stream"].error, by_target["AF_VSOCK stream"].verdict) == ("SIGSYS", Verdict.BLOCKED)
    controls = {control.kind: control for control in report.controls}
    assert (controls["tcp"].worked, controls["tcp"].how) == (True, "no such socket may be made (EPERM)")
    assert controls["tcp6"].worked
    assert by_target["sockets held inside"].verdict is Verdict.BLOCKED
    # Killed at the first socket, the program tells nothing: not proven.
    start = start.replace(str(rules), str(seccomp(tmp_path, (2, 0x80000000))))
    report = await probe(Command(["sh", "-c", start, "sh"]), [parse("tcp:127.0.0.1:9")], found=False)
    assert {check.verdict for check in report.checks} == {Verdict.NOT_PROVEN}
    assert "SIGSYS" in report.checks[0].why
