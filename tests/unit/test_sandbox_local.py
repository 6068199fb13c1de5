"""What holds in a running local sandbox (S3). Started once by the real command; looked at from inside and from outside."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import missing
from sandbox_lab import WAIT_S, Box, Lab

from asp_sandboxes import runtime

pytestmark = pytest.mark.bwrap
ROOT = os.getuid() == 0


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def box(lab: Lab) -> Box:
    repository = lab.repository()
    done = lab.run("up", "local", cwd=repository)
    if done.returncode == 2 and "local sandboxes" in done.stderr:
        missing("bwrap", done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return Box(lab, repository)


async def test_who_and_where(box: Box) -> None:
    status, output = await box.sh("id -un; id -u; id -g; pwd; echo $HOME; hostname; cat /etc/hostname; touch /workspace/made")
    assert (status, output.split()) == (
        0,
        ["agent", "1000", "1000", "/home/agent", "/home/agent", "sandbox", "sandbox"],
    )
    assert (box.folder / "workspace" / "made").exists()


async def test_kernel_uid_is_never_0(box: Box) -> None:
    pids = box.processes()
    assert pids
    for pid in pids:
        inside, outside, count = Path(f"/proc/{pid}/uid_map").read_text().split()
        assert (inside, count) == ("1000", "1")
        assert int(outside) != 0
        assert int(outside) == os.getuid() or ROOT
        status = Path(f"/proc/{pid}/status").read_text()
        uids = next(line.split()[1:] for line in status.splitlines() if line.startswith("Uid:"))
        assert set(uids) == {outside}
        for line in (
            "CapEff:\t0000000000000000",
            "CapBnd:\t0000000000000000",
            "NoNewPrivs:\t1",
            "Seccomp:\t2",
            "Groups:\t",
        ):
            assert line in status


WRITABLE = """
import os
found = []
for top in ("/proc/sys", "/proc/irq", "/proc/bus"):
    for folder, _, files in os.walk(top):
        for name in files:
            path = os.path.join(folder, name)
            try:
                os.close(os.open(path, os.O_WRONLY))
            except OSError:
                continue
            found.append(path)
for path in ("/proc/sysrq-trigger", "/proc/kcore", "/proc/keys"):
    try:
        os.close(os.open(path, os.O_WRONLY))
    except OSError:
        continue
    if os.stat(path).st_rdev != os.stat("/dev/null").st_rdev:
        found.append(path)
print(found)
"""


async def test_nothing_of_proc_sys_opens_for_writing(box: Box) -> None:
    assert (await box.run_python(WRITABLE)).strip() == "[]"


async def test_the_system_is_read_only(box: Box) -> None:
    _, output = await box.sh(
        "for d in / /etc /usr /usr/bin /dev /run/rt /run/rt/lib /home /var /proc; do touch $d/x 2>/dev/null && echo $d; done"
    )
    assert output == ""
    status, output = await box.sh("for d in /tmp /run /dev/shm ~ /workspace /var/tmp; do echo a > $d/x || exit 1; done")
    assert (status, output) == (0, "")


SYSTEM_CALLS = """
import ctypes, errno, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == "x86_64"
numbers = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "fsopen": 430, "fsmount": 432,
    "move_mount": 429, "open_tree": 428, "mount_setattr": 442, "clone3": 435,
    "keyctl": 250 if x86 else 219, "add_key": 248 if x86 else 217, "request_key": 249 if x86 else 218, "bpf": 321 if x86 else 280,
    "perf_event_open": 298 if x86 else 241, "userfaultfd": 323 if x86 else 282, "mount": 165 if x86 else 40,
    "umount2": 166 if x86 else 39,
    "pivot_root": 155 if x86 else 41, "setns": 308 if x86 else 268}
said = {}
for name, number in numbers.items():
    result = libc.syscall(number, 0, 0, 0, 0, 0)
    said[name] = errno.errorcode[ctypes.get_errno()] if result == -1 else "ok"
for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000):
    result = libc.syscall(272 if x86 else 97, flag)
    said[f"unshare {flag:x}"] = errno.errorcode[ctypes.get_errno()] if result == -1 else "ok"
    result = libc.syscall(56 if x86 else 220, flag | 17, 0, 0, 0, 0)
    if result == 0:
        os._exit(0)
    said[f"clone {flag:x}"] = errno.errorcode[ctypes.get_errno()] if result == -1 else "ok"
for family in (40, 38, 31, 17, 44):
    try:
        socket.socket(family, socket.SOCK_STREAM if family == 40 else socket.SOCK_SEQPACKET).close()
        said[f"family {family}"] = "ok"
    except OSError as error:
        said[f"family {family}"] = errno.errorcode[error.errno]
master, slave = os.openpty()
for request in (0x5412, 0x541C):
    result = libc.ioctl(slave, request, ctypes.c_char_p(b"x"))
    said[f"ioctl {request:x}"] = errno.errorcode[ctypes.get_errno()] if result == -1 else "ok"
print(json.dumps(said))
"""


async def test_refused_system_calls(box: Box) -> None:
    said: dict[str, str] = json.loads(await box.run_python(SYSTEM_CALLS))
    for name, answer in said.items():
        expected = "ENOSYS" if name == "clone3" else "EAFNOSUPPORT" if name.startswith("family") else "EPERM"
        assert (name, answer) == (name, expected)


async def test_processes_and_threads_still_work(box: Box) -> None:
    script = (
        "import threading, subprocess\nt = threading.Thread(target=print, args=('thread',))\nt.start()\nt.join()\n"
        "print(subprocess.run(['echo', 'child'], capture_output=True).stdout)"
    )
    assert (await box.run_python(script)).split() == ["thread", "b'child\\n'"]


async def test_the_environment_is_built_from_nothing(box: Box) -> None:
    _, output = await box.sh("env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'")
    names = {line.partition("=")[0] for line in output.splitlines() if line}
    assert names <= {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "PWD", "SHLVL", "_", "LD_LIBRARY_PATH"}
    assert "lab-secret-value" not in output


async def test_command_lines_show_no_path_of_this_machine(box: Box) -> None:
    _, output = await box.sh("cat /proc/[0-9]*/cmdline /proc/[0-9]*/comm | tr '\\0' ' '")
    assert "/run/rt/server.py" in output
    for path in private_paths(box.lab):
        assert path not in output


def private_paths(lab: Lab) -> list[str]:
    paths = {
        *runtime.machine_paths(),
        str(lab.folder),
        str(Path(__file__).parents[2]),
        sys.prefix,
        os.path.expanduser("~"),
    }
    return sorted(path for path in paths if path not in {"/", "/root", "/usr"} and not path.startswith("/usr/"))


async def test_no_file_holds_a_path_of_this_machine(box: Box) -> None:
    # /usr is the system's own, the same for every user of it; it is as it came from its packages.
    patterns = "".join(f"{path}\n" for path in private_paths(box.lab))
    status, output = await box.sh(
        "cat > /tmp/patterns; cd /; "
        "grep -rlFaf /tmp/patterns --exclude=patterns --exclude-dir=proc --exclude-dir=usr / 2>/dev/null | head -5",
        patterns.encode(),
    )
    assert (status, output) == (0, "")
    planted = (
        f"echo {private_paths(box.lab)[0]} > /tmp/planted; cat > /tmp/patterns; "
        "grep -rlFaf /tmp/patterns --exclude=patterns /tmp; rm /tmp/planted"
    )
    assert (await box.sh(planted, patterns.encode()))[1] == "/tmp/planted\n"


async def test_accounts_and_secrets_of_the_system_are_absent(box: Box) -> None:
    _, output = await box.sh(
        "ls /root /etc/shadow /etc/ssh /etc/resolv.conf /etc/machine-id /sys /opt /srv /boot 2>/dev/null; "
        "cut -d: -f1 /etc/passwd; ls -A /home"
    )
    assert output.split() == ["root", "agent", "nobody", "agent"]


async def test_another_process_id_space(box: Box) -> None:
    _, output = await box.sh("ls -d /proc/[0-9]*")
    assert len(output.split()) < 10
    assert (await box.sh(f"kill -0 {os.getpid()}"))[0] != 0 or os.getpid() < 1000


async def test_no_internet_socket_is_held_inside(box: Box) -> None:
    if not ROOT:
        pytest.skip("the descriptors of a process that is not dumpable are root's to read")
    held: list[str] = []
    async with box.connect() as connection:
        process = await connection.create_process("sleep 60")
        pids = box.processes()
        for pid in pids:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    held.append(os.readlink(descriptor))
        internet = {inode for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6") for inode in inodes("self", kind, 9)}
        unix = inodes("self", "unix", 6) | inodes(str(pids[0]), "unix", 6)
        process.kill()
        await process.wait()
    sockets = {name[8:-1] for name in held if name.startswith("socket:[")}
    assert sockets
    assert not sockets & internet
    assert sockets <= unix  # the door and its connections; the event loop's own pair
    assert not [name for name in held if name.startswith("/") and not name.startswith(("/dev/", "/run/"))]


def inodes(process: str, kind: str, column: int) -> set[str]:
    """Return the inodes in one table of the network namespace of a process."""
    with contextlib.suppress(OSError):
        return {line.split()[column] for line in Path(f"/proc/{process}/net/{kind}").read_text().splitlines()[1:]}
    return set()


async def test_the_host_key_cannot_be_taken(box: Box) -> None:
    script = (
        "import os\nfor n in ('environ', 'mem', 'fd', 'cwd'):\n"
        " try: (os.listdir if n == 'fd' else open)(f'/proc/2/{n}'); print(n)\n except OSError as e: print(e.errno)"
    )
    assert (await box.run_python(script)).split() == ["13"] * 4
    assert "server.py" in (await box.sh("cat /proc/2/cmdline"))[1]


class Listener:
    """A TCP and a UDP listener on one address; ``connections`` counts what came."""

    def __init__(self, address: str) -> None:
        self.tcp = socket.create_server((address, 0))
        self.port: int = self.tcp.getsockname()[1]
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind((address, self.port))
        for end in (self.tcp, self.udp):
            end.setblocking(False)

    def seen(self) -> int:
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self.tcp.accept()[0].close()
                count += 1
        with contextlib.suppress(BlockingIOError):
            while True:
                self.udp.recv(100)
                count += 1
        return count

    def close(self) -> None:
        self.tcp.close()
        self.udp.close()


REACH = """
import socket, sys
for host, port in [word.rsplit(":", 1) for word in sys.argv[1:]]:
    for family, kind in ((socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM)):
        s = socket.socket(family, kind)
        s.settimeout(2)
        try:
            s.connect((host, int(port)))
            s.send(b"x")
            print("reached", host, port, kind.name)
        except OSError as error:
            print("failed", error.errno)
"""


async def reach_from_inside(box: Box, targets: list[str]) -> str:
    _, output = await box.sh(f"{box.python} -I -S - {' '.join(targets)}", REACH.encode())
    for target in targets:
        host, _, port = target.rpartition(":")
        _, more = await box.sh(f"timeout 2 bash -c 'echo x > /dev/tcp/{host}/{port}' 2>/dev/null && echo reached by bash")
        output += more
    return output


async def reach_from_here(targets: list[str]) -> str:
    control = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", REACH, *targets, stdout=subprocess.PIPE)
    return (await control.communicate())[0].decode()


async def test_listeners_of_this_machine_hear_nothing(box: Box) -> None:
    everywhere, loopback = Listener("0.0.0.0"), Listener("127.0.0.1")
    try:
        addresses = {address for name in [socket.gethostname()] for address in own_addresses(name)}
        targets = [f"{address}:{everywhere.port}" for address in {"127.0.0.1", *addresses}] + [f"127.0.0.1:{loopback.port}"]
        output = await reach_from_inside(box, targets)
        assert "SOCK_STREAM" not in output  # a datagram can be sent to one's own loopback without a listener
        assert "by bash" not in output
        assert (everywhere.seen(), loopback.seen()) == (0, 0)
        assert (await reach_from_here(targets)).count("reached") == 2 * len(targets)  # else the listeners would prove nothing
        assert everywhere.seen() > 0
        assert loopback.seen() > 0
    finally:
        everywhere.close()
        loopback.close()


def own_addresses(name: str) -> set[str]:
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        return set()


IN_THE_NAMESPACE = """
import select, socket, sys
tcp = socket.create_server((sys.argv[1], 9))
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
print("listening", flush=True)
while True:
    for ready in select.select([tcp, wire, sys.stdin], [], [])[0]:
        if ready is tcp:
            tcp.accept()[0].close()
            print("connection", flush=True)
        elif ready is wire:
            if socket.inet_aton(sys.argv[1]) == wire.recv(2000)[30:34]:
                print("packet", flush=True)
        else:
            sys.exit()
"""


@pytest.mark.root
async def test_a_network_beside_this_machine_hears_nothing(box: Box) -> None:
    if not ROOT:
        missing("root", "a network namespace of the test's own needs root")
    mark = os.urandom(3).hex()
    namespace, ours, theirs = f"asp-test-{mark}", f"aspa{mark}", f"aspb{mark}"
    address = "192.0.2.10"  # TEST-NET-1: on no network but the one made here
    steps = [
        f"ip netns add {namespace}", f"ip link add {ours} type veth peer name {theirs} netns {namespace}",
        f"ip addr add 192.0.2.9/30 dev {ours}", f"ip link set {ours} up", f"ip -n {namespace} addr add {address}/30 dev {theirs}",
        f"ip -n {namespace} link set {theirs} up", f"ip -n {namespace} link set lo up",
    ]  # fmt: skip
    made = subprocess.run(steps[0].split(), check=False, capture_output=True)
    if made.returncode != 0:  # root in a container may not
        missing("netns", f"a network namespace cannot be made here: {made.stderr.decode(errors='replace').strip()}")
    try:
        for step in steps[1:]:
            subprocess.run(step.split(), check=True, capture_output=True)
        listener = await asyncio.create_subprocess_exec(
            "ip", "netns", "exec", namespace, sys.executable, "-I", "-c", IN_THE_NAMESPACE, address,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert listener.stdout is not None
        assert listener.stdin is not None
        assert await listener.stdout.readline() == b"listening\n"
        output = await reach_from_inside(box, [f"{address}:9", "192.0.2.9:9"])
        assert "reached" not in output
        listener.stdout.feed_data(b"-- what follows is the control\n")
        assert "reached" in await reach_from_here([f"{address}:9"])
        heard = []
        async with asyncio.timeout(WAIT_S):
            while b"connection\n" not in heard:
                heard.append(await listener.stdout.readline())
        assert heard[0].startswith(b"--"), heard
        listener.stdin.close()
        await listener.wait()
    finally:
        subprocess.run(["ip", "link", "del", ours], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


async def test_abstract_sockets_of_this_machine_are_out_of_reach(box: Box) -> None:
    name = f"asp-test-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        output = await box.run_python(f"import socket\ns = socket.socket(socket.AF_UNIX)\nprint(s.connect_ex('\\0{name}'))")
        assert output.strip() == "111"  # ECONNREFUSED
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(f"\0{name}")


async def test_only_a_loopback_interface(box: Box) -> None:
    _, output = await box.sh("cat /proc/net/dev /proc/net/route /proc/net/ipv6_route")
    interfaces = {line.partition(":")[0].strip() for line in output.splitlines() if ":" in line}
    assert interfaces == {"lo"}
