"""``asp probe``: its program, what its answers mean, and the verb over a real SSH server with nothing blocked."""

import asyncio
import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
from conftest import missing, trusted
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_lab import Listeners, checksum, dns_name

from asp.errors import UsageError
from asp.probe import Origin, Report, Target, Verdict, parse, probe
from asp.probe.attempts import Happened, _Ping, dns_query
from asp.probe.kernel import MAX_SOCKETS, HeldSocket, SocketCheck, Way, held_sockets
from asp.probe.listening import HostListeners
from asp.probe.probing import _judge
from asp.probe.program import AARCH64, X86_64, Machine, Program, Returned, elf, script
from asp.probe.report import Check, Control, Evidence, Outcome
from asp.probe.targets import Surroundings
from asp.ssh import open_transport
from asp.testing import InProcessSandbox
from asp.transport import ExecResult

WAIT_S = 50
SCHEMA = json.loads((Path(__file__).parents[2] / "schema/asp-probe.schema.json").read_text())
MACHINES = {"x86_64": X86_64, "aarch64": AARCH64}
HERE = MACHINES.get(os.uname().machine)
pytestmark = pytest.mark.timeout(300)
linux = pytest.mark.skipif(HERE is None or sys.platform != "linux", reason="the program is for Linux on x86_64 and aarch64")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tcp:192.0.2.1:80", None),
        ("udp:[2001:db8::1]:9", None),
        ("dns:127.0.0.11", "dns:127.0.0.11:53"),
        ("icmp:192.0.2.1", None),
        ("icmp:[2001:db8::1]", "icmp:2001:db8::1"),
        ("icmp:2001:db8::1", None),
        ("tcp:[fe80::1%3]:22", None),
        ("abstract:name with spaces", None),
        ("unix:/var/run/docker.sock", None),
        ("dns:[2001:db8::1]:5353", None),
    ],
)
def test_targets_are_read_as_they_are_shown(text: str, shown: str | None) -> None:
    assert str(parse(text)) == (shown or text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no target"),
        ("tcp", "is no target"),
        ("tcp:", "is no target"),
        ("http:192.0.2.1:80", "is no target"),
        ("tcp:example.com:80", "names are not looked up"),
        ("tcp:192.0.2.1", "needs a port"),
        ("tcp:192.0.2.1:0", "needs a port"),
        ("tcp:192.0.2.1:65536", "needs a port"),
        ("icmp:192.0.2.1:8", "needs no port"),
        ("tcp:2001:db8::1:80", "is no target"),
        ("unix:", "is no target"),
        ("abstract:" + "a" * 108, "cannot be a unix socket"),
        ("tcp:[fe80::1%eth0]:1", "by its number"),
        ("tcp:192.0.2.1:80\x1b[2J", "is no target"),
        ("tcp:[fe80::1%²]:1", "by its number"),
    ],
)
def test_what_is_no_target_is_said_in_one_line(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        parse(text)
    assert "\x1b" not in str(caught.value)


def test_pings_and_questions_are_well_formed() -> None:
    for target, first in (("icmp:192.0.2.1", 8), ("icmp:2001:db8::1", 128)):
        body = _Ping(parse(target))._ways[0]._payload
        assert body[0] == first
        assert checksum(body) == 0
    assert dns_name(dns_query(b"asp-probe.invalid")) == "asp-probe.invalid"


def run_program(machine: Machine, program: Program, folder: Path) -> subprocess.CompletedProcess[bytes]:
    path = folder / "program"
    path.write_bytes(elf(machine))
    path.chmod(0o700)
    emulator: list[str] = []
    if machine is not HERE:
        found = shutil.which(f"qemu-{machine.name}-static") or shutil.which(f"qemu-{machine.name}")
        if found is None or os.uname().sysname != "Linux":
            missing("qemu", f"no emulator of {machine.name}")
        emulator = [str(found)]
    return subprocess.run([*emulator, path], input=program.image(), capture_output=True, timeout=WAIT_S, check=False)


@linux
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_the_program_makes_the_calls_and_tells_what_the_kernel_said(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"hello")
    program = Program(machine)
    missing_file = program.call("openat", -100, program.data(b"/nowhere/at/all\0"), 0)
    with program.only_after(missing_file):
        skipped = program.call("getpid")
        program.call("getpid")
    stored = program.data(b"\xff" * 8)
    file = program.call("openat", -100, program.data(str(tmp_path / "text").encode() + b"\0"), 0, store=stored)
    buffer = program.space(64)
    with program.only_after(file):
        read = program.call("read", Returned(file), buffer, 64)
    again = program.call("read", Returned(file), buffer, 64)
    bad = program.call("socket", 999, 1, 0)
    done = run_program(machine, program, tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    answer = program.answer(done.stdout)
    assert answer is not None
    assert answer.result(missing_file) == -2
    assert answer.result(skipped) is None
    assert answer.integer(stored) == answer.result(file) >= 3
    assert answer.read_into(buffer, read) == b"hello"
    assert (answer.result(again), answer.result(bad)) == (0, -97)
    assert program.answer(done.stdout[:-1]) is None
    assert program.answer(b"") is None


def test_a_wrong_program_is_not_built() -> None:
    program = Program(X86_64)
    call = program.call("getpid")
    program.call("getpid")
    with pytest.raises(ValueError, match=str(call)), program.only_after(call):
        pass
    with pytest.raises(ValueError, match="read"):
        program.call("read", 0, 0, Returned(0))
    program.space(1 << 20)
    with pytest.raises(ValueError):
        program.image()


def test_what_the_sandbox_shows_becomes_targets() -> None:
    shown = Surroundings(
        route=b"Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
        b"eth0\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\neth0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\nbroken\n",
        arp=b"IP address HW type\n192.0.2.7 0x1\n???\n",
        if_inet6=b"fe800000000000000042acfffe110002 0c 40 20 80 eth0\n00000000000000000000000000000001 01 80 10 80 lo\n",
        dev=b"Inter-|\n face |\n    lo: 0\n  eth0: 0\n",
        resolv=b"# c\nnameserver 192.0.2.53\nnameserver fe80::1%eth0\nnameserver fe80::2%gone\nnameserver\nnameserver x\n",
        unix=b"Num RefCount Protocol Flags Type St Inode Path\n"
        b"0000000000000000: 00000002 00000000 00010000 0001 01 4711 @/tmp/a b\n"
        b"0000000000000000: 00000002 00000000 00000000 0001 03 4712 @client\n"
        b"0000000000000000: 00000002 00000000 00010000 0001 01 4713 /run/by/path\n",
    )
    assert [str(target) for target in shown.targets()] == [
        "tcp:172.17.0.1:22", "tcp:192.0.2.7:22", "icmp:172.17.0.1", "icmp:192.0.2.7", "dns:192.0.2.53:53", "dns:[fe80::1%12]:53",
        "dns:[fe80::2%2147483647]:53",
        "icmp:ff02::1%12",
    ]  # fmt: skip
    assert {target.origin for target in shown.targets()} == {Origin.FOUND}
    assert shown.abstract_listeners() == [b"/tmp/a b"]
    assert shown.interfaces == ["eth0"]
    assert Surroundings().targets() == []


WORKED, FAILED = Control("tcp", worked=True, how=""), Control("tcp", worked=False, how="no")


@pytest.mark.parametrize(
    ("target", "origin", "happened", "verdict", "evidence"),
    [
        ("tcp:192.0.2.1:80", Origin.GIVEN, Happened(Outcome.REACHED), "reached", "strong"),
        ("tcp:192.0.2.1:80", Origin.DEFAULT, Happened(Outcome.UNREACHABLE, "ENETUNREACH", at_once=True), "blocked", "strong"),
        # A router said it, so a packet got to a router.
        ("tcp:192.0.2.1:80", Origin.DEFAULT, Happened(Outcome.UNREACHABLE, "EHOSTUNREACH"), "not proven", "weak"),
        ("tcp:192.0.2.1:80", Origin.GIVEN, Happened(Outcome.TIMED_OUT), "blocked", "weak"),
        ("tcp:192.0.2.1:80", Origin.DEFAULT, Happened(Outcome.TIMED_OUT), "not proven", "weak"),
        ("tcp:192.0.2.1:80", Origin.GIVEN, Happened(Outcome.REFUSED, "ECONNREFUSED"), "not proven", "weak"),
        ("tcp:127.0.0.1:80", Origin.GIVEN, Happened(Outcome.REFUSED, "ECONNREFUSED"), "blocked", "strong"),
        ("udp:192.0.2.1:80", Origin.GIVEN, Happened(Outcome.TIMED_OUT), "not proven", "weak"),
        ("icmp:192.0.2.1", Origin.DEFAULT, Happened(Outcome.DENIED, "EACCES", at_once=True), "blocked", "strong"),
        # A firewall on the way forbids it: the packet got as far as there.
        ("tcp:192.0.2.1:80", Origin.DEFAULT, Happened(Outcome.DENIED, "EACCES"), "not proven", "weak"),
        ("unix:/run/docker.sock", Origin.DEFAULT, Happened(Outcome.ABSENT, "ENOENT", at_once=True), "blocked", "strong"),
        ("tcp:192.0.2.1:80", Origin.GIVEN, Happened(Outcome.NOT_TRIED, "EINVAL", at_once=True), "not proven", "none"),
        ("abstract:a", Origin.FOUND, Happened(Outcome.REACHED, peer=7), "blocked", "strong"),
        ("abstract:a", Origin.FOUND, Happened(Outcome.REACHED, peer=0), "reached", "strong"),
        ("abstract:a", Origin.FOUND, Happened(Outcome.REACHED), "reached", "strong"),
        ("abstract:a", Origin.GIVEN, Happened(Outcome.REACHED, peer=7), "reached", "strong"),
    ],
)  # fmt: skip
def test_what_an_outcome_means(target: str, origin: Origin, happened: Happened, verdict: str, evidence: str) -> None:
    read = parse(target)
    read = Target(read.kind, read.address, read.port, read.scope, read.name, origin)
    check = _judge(read, happened, WORKED)
    assert (check.verdict.value, check.evidence.value) == (verdict, evidence)
    without = _judge(read, happened, FAILED)
    if verdict == "blocked":
        assert (without.verdict, without.evidence) == (Verdict.NOT_PROVEN, Evidence.NONE)
    else:
        assert without.verdict.value == verdict


@pytest.mark.parametrize(
    ("kind", "result", "killed", "verdict", "error"),
    [
        ("vsock", 3, False, "reached", None),
        ("vsock", -97, False, "blocked", "EAFNOSUPPORT"),
        ("vsock", None, True, "blocked", "SIGSYS"),
        ("vsock", None, False, "not proven", None),
        ("vsock", -22, False, "not proven", "EINVAL"),
        ("kernel", -2, False, "blocked", "ENOENT"),
        ("namespace", -2, False, "not proven", "ENOENT"),
        ("kernel", -30, False, "blocked", "EROFS"),
    ],
)
def test_what_a_refused_system_call_means(kind: str, result: int | None, killed: bool, verdict: str, error: str | None) -> None:
    check = Way(kind, "x", ()).check(result, killed=killed)
    assert (check.verdict.value, check.error) == (verdict, error)


@settings(max_examples=60, deadline=None, database=None)  # no file beside wherever we are
@given(st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=9))
def test_what_the_sandbox_shows_may_be_anything(text: bytes, words: list[bytes]) -> None:
    """Whoever is inside may have written it: odd texts name no target, and raise nothing."""
    for content in (text, b"\n" + text, b"\n" + b" ".join(words), b"nameserver " + text):
        shown = Surroundings(*[content] * len(fields(Surroundings)))
        for target in shown.targets():
            assert str(target)
            assert target.sockaddr()
        assert all(shown.abstract_listeners())
        assert "lo" not in shown.interfaces
    held_sockets(text)


@pytest.mark.parametrize("line", [b"e\tFFFFFFFF\t00000000\t1\t0\t0\t0\t0000FFFF", b"e\t00000000\t00000000\t1\t0\t0\t0\tFFFFFFFF"])
def test_a_route_may_be_odd(line: bytes) -> None:
    assert all(target.sockaddr() for target in Surroundings(route=b"\n" + line).targets())


def test_a_listing_of_sockets_may_hold_anything() -> None:
    listing = (
        b"/proc/12/fd/3\n/proc/self/fd/4\n/proc/99999999999999999999/fd/1\n/proc/12/fd/x\n\n/proc/1/fd/9/..\n/proc/13/fd/0\n"
    )
    assert held_sockets(listing) == [HeldSocket(12, 3), HeldSocket(13, 0)]


def verdicts(report: Report) -> dict[str, str]:
    return {check.target: check.verdict.value for check in report.checks}


@linux
async def test_with_nothing_blocked_each_listener_is_reached(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """The control of the whole probe, over SSH: real listeners see it, and it says so."""
    async with Listeners() as listeners:
        tcp = await listeners.add("tcp", "127.0.0.1", "tcp")
        udp = await listeners.add("udp", "127.0.0.1", "udp")
        dns = await listeners.add("dns", "127.0.0.1", "dns")
        path = f"/tmp/asp-probe-{os.getpid()}"  # short: a socket's name holds 107 bytes
        await listeners.add("unix", path, "unix")
        abstract = f"asp-probe-test-{os.getpid()}"
        await listeners.add("abstract", b"\0" + abstract.encode(), "abstract")
        given = [f"tcp:127.0.0.1:{tcp}", f"udp:127.0.0.1:{udp}", f"dns:127.0.0.1:{dns}", f"unix:{path}", f"abstract:{abstract}"]
        try:
            async with open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True) as transport:
                targets = [parse(text) for text in (*given, "tcp:127.0.0.1:1", "unix:/nowhere/s", "abstract:asp-nobody")]
                report = await probe(transport, targets, found=False, wait_s=WAIT_S)
        finally:
            os.unlink(path)
        for name in ("tcp", "udp", "dns", "unix", "abstract"):
            assert await listeners.has_seen(name), (name, listeners.seen)
        assert "dns asp-probe.invalid" in listeners.seen
    found = verdicts(report)
    assert [found[text] for text in given] == ["reached"] * 5
    assert [found[text] for text in ("tcp:127.0.0.1:1", "unix:/nowhere/s", "abstract:asp-nobody")] == ["blocked"] * 3
    assert not report.blocked
    worked = {control.kind: control.worked for control in report.controls}
    assert all(worked[kind] for kind in ("tcp", "udp", "abstract", "unix")), report.controls
    assert os.listdir(sandbox.workspace) == []
    jsonschema.validate(report.as_json(), SCHEMA)


class Saying:
    """A sandbox whose shell answers the same to everything."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self._answers = list(answers)

    async def exec(self, script: str | bytes, **_options: object) -> ExecResult:
        status, out = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return ExecResult(status, None, out, b"", len(out), 0)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([(0, b"riscv64\n")], "no program for this machine"),
        ([(0, b"")], "nothing known"),
        ([(0, b"x86_64\n"), (125, b"")], "written to"),
        ([(0, b"x86_64\n"), (126, b"")], "lets the probe's program run"),
        ([(0, b"x86_64\n"), (0, b"lies")], "is not from"),
        ([(0, b"x86_64\n"), (139, b"")], "status 139"),
        ([(0, b"x86_64\n"), (159, b"")], "SIGSYS"),
    ],
)
async def test_a_sandbox_that_cannot_be_probed_is_not_proven(answers: list[tuple[int, bytes]], why: str) -> None:
    """Never "blocked": an image without tools must not look safe."""
    report = await probe(Saying(*answers), [parse("tcp:127.0.0.1:1")], found=False)  # type: ignore[arg-type]
    assert not report.blocked
    assert {check.verdict for check in report.checks} == {Verdict.NOT_PROVEN}
    assert len(report.checks) > 10
    jsonschema.validate(report.as_json(), SCHEMA)
    assert all(why in check.why for check in report.checks), report.checks[0]


@linux
async def test_many_targets_are_tried_in_turn(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """More than one program holds, of the largest kind; the program of so many fits."""
    many = [parse(f"icmp:127.0.{number // 256}.{number % 256}") for number in range(1, 452)]
    async with open_transport(trusted(sandbox.document(), tmp_path), allow_same_host=True) as transport:
        report = await probe(transport, many, found=False, wait_s=WAIT_S)
    assert [check.target for check in report.checks if check.kind == "icmp"] == [str(target) for target in many]
    assert "not tried" not in {check.outcome.value for check in report.checks if check.kind == "icmp"}


@linux
async def test_what_is_left_out_is_not_proven(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """More abstract sockets than are tried, no /proc, more held sockets than are looked at: each is said."""
    assert HERE is not None
    looking = SocketCheck(HERE, [HeldSocket(1 << 22, 1)] * (MAX_SOCKETS + 1))
    blind = SocketCheck(HERE, [], sees_others=False)
    for one, why in ((looking, "1 sockets more"), (blind, "/proc is not there")):
        answer = one.program.answer(run_program(HERE, one.program, tmp_path).stdout)
        assert answer is not None
        (check,) = one.checks(answer, one.control(answer))
        assert check.verdict is Verdict.NOT_PROVEN
        assert why in check.why


@pytest.mark.parametrize(
    ("outcome", "verdict", "came", "silent", "after"),
    [
        (Outcome.UNREACHABLE, Verdict.BLOCKED, True, False, (Verdict.REACHED, Evidence.STRONG)),  # a sandbox that lies
        (Outcome.TIMED_OUT, Verdict.NOT_PROVEN, False, False, (Verdict.BLOCKED, Evidence.STRONG)),
        (Outcome.TIMED_OUT, Verdict.NOT_PROVEN, False, True, (Verdict.NOT_PROVEN, Evidence.WEAK)),
        (Outcome.TIMED_OUT, Verdict.BLOCKED, False, True, (Verdict.NOT_PROVEN, Evidence.NONE)),
        (Outcome.TIMED_OUT, Verdict.BLOCKED, False, False, (Verdict.BLOCKED, Evidence.WEAK)),
    ],
)
async def test_a_listener_outweighs_the_sandbox(
    outcome: Outcome, verdict: Verdict, came: bool, silent: bool, after: tuple[Verdict, Evidence]
) -> None:
    """``silent``: the listener does not hear us either, as behind a firewall."""
    async with HostListeners([ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("203.0.113.1")]) as listeners:
        assert [target.kind for target in listeners.targets] == ["tcp", "udp"]  # nobody can listen at the second
        (target,) = (one for one in listeners.targets if one.kind == "udp")
        if came:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"x", ("127.0.0.1", target.port))
        if silent:
            for one in listeners._closers:
                one.close()
        check = Check("udp", str(target), verdict, outcome, Evidence.WEAK, "before")
        other = Check("udp", "udp:192.0.2.1:9", verdict, outcome, Evidence.WEAK, "before")
        if silent:
            listeners._hears = no  # type: ignore[method-assign]
        judged, untouched = (await listeners.judged(Report("x86_64", checks=(check, other)))).checks
        assert (judged.verdict, judged.evidence) == after
        assert untouched == other


async def no(_target: Target) -> bool:
    return False


def test_no_checks_are_no_proof() -> None:
    assert not Report(None).blocked


async def test_too_many_targets_are_refused() -> None:
    with pytest.raises(UsageError, match="too many"):
        await probe(Saying((0, b"")), [parse("tcp:127.0.0.1:1")] * 2001, found=False)  # type: ignore[arg-type]


@linux
@pytest.mark.parametrize("shell", ["dash", "bash", "busybox"])
def test_the_script_needs_no_more_than_a_shell(shell: str, tmp_path: Path) -> None:
    """Run, and nothing left; no folder that may run a program is status 125, and nothing is tried."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"no {shell}")
    assert HERE is not None
    program = Program(HERE)
    mine = program.call("getpid")
    words, tools = ([found, "sh"], "/nowhere") if shell == "busybox" else ([found], os.environ["PATH"])  # it is its own tools
    done = subprocess.run(
        [*words, "-c", script(HERE).decode().replace("/tmp /var/tmp /dev/shm /run", f"/nowhere {tmp_path}")],
        input=program.image(), capture_output=True, timeout=WAIT_S, check=False, env={"PATH": tools, "HOME": ""},
    )  # fmt: skip
    answer = program.answer(done.stdout)
    assert done.returncode == 0
    assert answer is not None
    assert answer.ok(mine)
    assert os.listdir(tmp_path) == ["home"]
    nowhere = script(HERE).decode().replace('/tmp /var/tmp /dev/shm /run "$HOME" "$PWD"', "/nowhere")
    done = subprocess.run([*words, "-c", nowhere], input=program.image(), capture_output=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (125, b"")


@linux
async def test_the_verb(sandbox: InProcessSandbox, tmp_path: Path) -> None:
    """Exit 1 for what is reached, with the check in the JSON; 2 for a bad target."""
    project = tmp_path / "project"
    project.mkdir()
    (project / ".asp.json").write_text(json.dumps(sandbox.document()))
    (project / ".asp.json").chmod(0o600)

    async def run(*words: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            Path(sys.executable).with_name("asp"), "probe", "--contract", project / ".asp.json", "--allow-same-host",
            "--only-targets", *words, cwd=project, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={name: os.environ[name] for name in ("PATH", "HOME", "XDG_STATE_HOME")},
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
        return process.returncode or 0, out.decode(), err.decode()

    async with Listeners() as listeners:
        port = await listeners.add("tcp", "127.0.0.1", "tcp")
        status, out, err = await run("--json", "--target", f"tcp:127.0.0.1:{port}")
        result = json.loads(out)
        jsonschema.validate(result, SCHEMA)
        assert (status, err, result["type"], result["blocked"]) == (1, "", "result", False)
        assert {"target": f"tcp:127.0.0.1:{port}", "verdict": "reached", "evidence": "strong", "origin": "given"}.items() <= (
            result["checks"][0].items()
        )
        assert result["controls"]["tcp"]["worked"]
        status, out, err = await run("--target", f"tcp:127.0.0.1:{port}")
        assert status == 1
        assert out.startswith(f"reached     tcp:127.0.0.1:{port}: it answered\n")
        assert err.startswith("asp: not blocked (")
    for words, why in (
        (("--target", "x"), "is no target"),
        (("--wait", "0"), "not a number of seconds"),
        (("--wait", "nan"), "number"),
    ):
        status, out, err = await run(*words)
        assert (status, out) == (2, "")
        assert why in err
        assert len(err.splitlines()) == 1
