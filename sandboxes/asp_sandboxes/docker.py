"""A sandbox in a container of any image: no network interface, no capability, a read-only root (S2).

The container runs nothing but a loop of sleeps; each connection is an ``sshd -i`` that the engine starts in it. Keys, accounts
and the server come from folders of ours that it can only read. What the agent writes lies in memory (tmpfs): the workspace,
``/tmp`` and a home; their sizes are added to the memory limit.
"""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from asp.errors import UsageError, quoted
from asp.state import write_private
from asp_sandboxes import docker_engine, docker_image, docker_seccomp, docker_setup, openssh_bundle
from asp_sandboxes.docker_engine import Engine
from asp_sandboxes.docker_image import Account, ImageFacts
from asp_sandboxes.docker_stream import DockerOrder
from asp_sandboxes.openssh_bundle import MOUNT, Bundle

LABEL = "asp-sandbox"
OWNER_LABEL = "asp-sandbox-owner"
CONF = PurePosixPath("/opt/conf")
WORKSPACE = PurePosixPath("/workspace")
_SIZE = re.compile(r"([1-9][0-9]{0,8})([kmgKMG]?)")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_LEAST_MEMORY = 16 << 20
_SHM_BYTES = 64 << 20
_NOT_FOR_SETENV = re.compile("[\x00-\x1f\x7f]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ROOT_CAPABILITIES = ["SYS_CHROOT", "SETUID", "SETGID"]
"""What sshd needs as root, and no more (measured, facts/sandboxes.md 1.5). As another user it needs none."""

_GVISOR_PIDS = 4096
"""gVisor's own threads count too, some for each process inside, and it ends when it gets none (measured: 20 commands at once)."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# It survives `kill -9 -1`, since a kernel never delivers that to the first process of its namespace, and it reaps whatever
# becomes its child: `sleep infinity` leaves zombies, an init that ends with its child ends the sandbox (facts/sandboxes.md 1.4).
_FIRST_PROCESS = "trap : TERM INT HUP; while :; do sleep 3600 & wait; done"


@dataclass(frozen=True)
class Wish:
    """What the person asked for. Sizes in bytes; ``disk`` is the workspace's."""

    image: str
    user: str | None = None
    allow_root: bool = False
    memory: int = 2 << 30
    cpus: float = 2.0
    pids: int = 512
    disk: int = 2 << 30
    runtime: str | None = None
    setup: str | None = None
    dockerfile: str | None = None
    setup_network: str = "bridge"

    @property
    def files(self) -> int:
        """What all writable places hold together: they are in memory and count there."""
        return self.disk + 2 * (self.disk // 4)

    def as_json(self) -> dict[str, Any]:
        """Return it as it is kept in the record."""
        return asdict(self)


@dataclass(frozen=True)
class Made:
    """A container that runs, what the gateway must know of it, and what the person should."""

    order: DockerOrder
    account: Account
    workspace: PurePosixPath
    remarks: list[str]


def size(text: str) -> int:
    """Read ``512m``, ``2g`` or bytes. Raises UsageError."""
    match = _SIZE.fullmatch(text)
    if match is None:
        msg = f"{quoted(text)} is not a size; write one as 512m or 2g"
        raise UsageError(msg)
    return int(match[1]) * _UNITS[match[2].lower()]


def start(
    wish: Wish,
    folder: Path,
    name: str,
    host_key: str,
    authorized_keys: str,
    bundle: Bundle,
    repository: Path,
    tell: Callable[[str], None],
) -> Made:
    """Make a container and start it. ``folder`` is the sandbox's own, where what the container reads is kept.

    Raises UsageError, DockerFailed, EngineGone; then there is no container.
    """
    from docker.errors import APIError  # noqa: PLC0415 - an extra, and 0.2 s

    engine = docker_engine.connect()
    with contextlib.closing(engine):
        info: dict[str, Any] = engine.info()
        remarks = docker_engine.known_escapes(engine.version())
        _check(wish, info)
        facts = docker_image.facts(engine, _image(engine, wish, repository, bundle, tell))
        account = facts.account(wish.user)
        if account.uid == 0 and not wish.allow_root:
            whose = "the image runs as root" if wish.user is None else "--user is root"
            msg = f"{whose}; name another user with --user 1000, or say --allow-root if you mean it"
            raise UsageError(msg)
        if account.uid == 0:
            remarks.insert(0, f"the agent is root inside, with what sshd needs then: {', '.join(_ROOT_CAPABILITIES)}")
        rootless = any("rootless" in option for option in info.get("SecurityOptions") or ())
        _write_configuration(folder / "conf", facts, account, host_key, authorized_keys, rootless=rootless)
        try:
            container = _create(engine, wish, folder / "conf", name, facts, account, bundle)
            try:
                engine.start(container)
                if wish.setup is not None:
                    words = [Bundle.shell(), "-c", docker_setup.LINK]
                    linked = engine.exec_create(container, words, user=f"{account.uid}:{account.gid}")
                    engine.exec_start(linked["Id"])
            except BaseException:
                engine.remove_container(container, force=True, v=True)
                raise
        except APIError as error:
            msg = f"the container does not start: {docker_engine.explain(error)}"
            raise docker_engine.DockerFailed(msg) from error
        api = str(engine.api_version)
    command = Bundle.sshd(f"{CONF}/sshd_config")
    order = DockerOrder(container, str(docker_engine.socket_path()), f"{account.uid}:{account.gid}", command, f"v{api}")
    return Made(order, account, WORKSPACE, remarks)


def _image(engine: Engine, wish: Wish, repository: Path, bundle: Bundle, tell: Callable[[str], None]) -> str:
    """Return the image to start from: the one that was named or is built, or what the set-up makes of it."""
    base = wish.image
    if wish.dockerfile is not None:
        base = docker_setup.build(engine, Path(wish.dockerfile), repository, tell)
    if wish.setup is None:
        return base
    base_id = docker_image.facts(engine, base).id
    return docker_setup.image(engine, base_id, wish.setup, repository, bundle, wish.setup_network, tell)


def remove(container: str) -> None:
    """Remove a container, whatever it does. One that is not there is fine. Raises DockerFailed, EngineGone."""
    with contextlib.closing(docker_engine.connect()) as engine:
        _remove(engine, container)


def remove_all(owner: Path, name: str) -> None:
    """Remove every container of a sandbox, also one that a killed ``up`` had no time to note. Raises DockerFailed, EngineGone."""
    with contextlib.closing(docker_engine.connect()) as engine:
        labels = [f"{OWNER_LABEL}={owner}", f"{LABEL}={name}"]
        for found in engine.containers(all=True, filters={"label": labels}):
            _remove(engine, str(found["Id"]))


def _remove(engine: Engine, container: str) -> None:
    from docker.errors import APIError, NotFound  # noqa: PLC0415 - as above

    try:
        engine.remove_container(container, force=True, v=True)
    except NotFound:
        pass
    except APIError as error:
        if "already in progress" in docker_engine.explain(error):  # somebody else does it
            return
        msg = f"the container {container[:12]} cannot be removed: {docker_engine.explain(error)}"
        raise docker_engine.DockerFailed(msg) from error


def is_running(container: str) -> bool:
    """Whether a container runs. Raises EngineGone, DockerFailed."""
    from docker.errors import APIError, NotFound  # noqa: PLC0415 - as above

    with contextlib.closing(docker_engine.connect()) as engine:
        try:
            return bool(engine.inspect_container(container)["State"]["Running"])
        except NotFound:
            return False
        except APIError as error:
            msg = f"the container {container[:12]} cannot be looked at: {docker_engine.explain(error)}"
            raise docker_engine.DockerFailed(msg) from error


def _check(wish: Wish, info: dict[str, Any]) -> None:
    runtimes = sorted(info.get("Runtimes") or {})
    if wish.runtime is not None and wish.runtime not in runtimes:
        msg = f"the engine has no runtime {quoted(wish.runtime)}; it has: {', '.join(runtimes)}"
        raise UsageError(msg)
    if info.get("OSType") != "linux":
        msg = "the Docker engine does not run Linux containers"
        raise UsageError(msg)
    if info.get("Architecture") not in {os.uname().machine, "amd64" if os.uname().machine == "x86_64" else "arm64"}:
        msg = (
            f"the engine runs on {quoted(str(info.get('Architecture')))}, and what we mount into the sandbox is for this machine"
        )
        raise UsageError(msg)
    if wish.memory < _LEAST_MEMORY:
        msg = "--memory must be at least 16m"
        raise UsageError(msg)


def _write_configuration(
    folder: Path, facts: ImageFacts, account: Account, host_key: str, authorized_keys: str, *, rootless: bool
) -> None:
    shell = "/bin/bash" if "/bin/bash" in facts.present else "/bin/sh"
    folder.mkdir(mode=0o755, exist_ok=True)  # read inside by another uid; the folder above is 0700
    folder.chmod(0o755)  # whatever the umask is
    passwd = "".join(line + "\n" for line in facts.passwd.splitlines() if line.split(":")[0] != account.name)
    if account.uid == 0 and "\nsshd:" not in f"\n{passwd}":
        passwd += "sshd:x:65533:65534::/run/sshd:/bin/false\n"  # to whom it drops what speaks before the login
    # sshd refuses a key that others can read only if the key's file is its own.
    seen_as = 0 if rootless else os.getuid()
    texts = {
        "passwd": docker_image.passwd_line(account, f"{CONF}/shell") + passwd,
        "group": f"{account.name}:x:{account.gid}:\n" + facts.group,
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "resolv.conf": "",
        "host_key": host_key,
        "authorized_keys": authorized_keys,
        "sshd_config": _sshd_config(facts, account),
        # When memory runs out, what the agent runs is killed before its server and the first process. Anybody may make himself
        # the first victim; making oneself the last one needs rights that not every engine has.
        "shell": f'#!/bin/sh\necho 500 2>/dev/null >/proc/self/oom_score_adj\nexec {shell} "$@"\n',
    }
    for name, text in texts.items():
        write_private(folder / name, text.encode())
        mode = 0o755 if name == "shell" else 0o600 if name == "host_key" and seen_as == account.uid else 0o644
        (folder / name).chmod(mode)


def _sshd_config(facts: ImageFacts, account: Account) -> str:
    variables = {name: value for name, value in facts.environment.items() if _VARIABLE.fullmatch(name)}
    variables.setdefault("PATH", _PATH)
    if not facts.has_sh:
        variables["PATH"] += f":{MOUNT}/bin"
    if "LANG" not in variables and any(path.startswith("/usr/lib/locale/") for path in facts.present):
        variables["LANG"] = "C.UTF-8"
    variables["HOME"] = account.home
    pairs = [f"{name}={value}" for name, value in variables.items() if not _NOT_FOR_SETENV.search(value)]
    escaped = [pair.replace("\\", "\\\\").replace('"', '\\"') for pair in pairs]
    return "\n".join([
        f"HostKey {CONF}/host_key",
        f"AuthorizedKeysFile {CONF}/authorized_keys",
        f"AllowUsers {account.name}",
        f"PermitRootLogin {'prohibit-password' if account.uid == 0 else 'no'}",
        *("StrictModes no", "UsePAM no", "PasswordAuthentication no", "KbdInteractiveAuthentication no", "PidFile none"),
        *("UseDNS no", "AllowTcpForwarding no", "AllowStreamLocalForwarding no", "AllowAgentForwarding no"),
        *("PermitTunnel no", "GatewayPorts no", "X11Forwarding no", "PermitUserRC no", "PermitUserEnvironment no"),
        *("PrintMotd no", "PrintLastLog no", "MaxSessions 64", "LoginGraceTime 20", "LogLevel QUIET"),
        "Subsystem sftp internal-sftp",
        "SetEnv " + " ".join(f'"{pair}"' for pair in escaped),
    ]) + "\n"  # fmt: skip


def _create(engine: Engine, wish: Wish, conf: Path, name: str, facts: ImageFacts, account: Account, bundle: Bundle) -> str:
    home = account.home if account.uid == 0 else docker_image.AGENT_HOME
    owner = f"uid={account.uid},gid={account.gid}"
    writable = {
        str(WORKSPACE): f"rw,exec,nosuid,nodev,size={wish.disk},mode=0755,{owner}",
        **({"/run/sshd": "ro,noexec,nosuid,nodev,size=4096,mode=0755"} if account.uid == 0 else {}),
        "/tmp": f"rw,exec,nosuid,nodev,size={wish.disk // 4},mode=1777",  # noqa: S108 - the sandbox's own
        home: f"rw,exec,nosuid,nodev,size={wish.disk // 4},mode=0700,{owner}",
    }
    read_only = {
        str(bundle.folder): str(MOUNT),
        str(conf): str(CONF),
        **{str(conf / file): f"/etc/{file}" for file in ("passwd", "group", "hosts", "resolv.conf")},
    }
    if not facts.has_sh:
        read_only[str(bundle.folder / "bin" / "busybox")] = "/bin/sh"
    memory, root = wish.memory + wish.files, account.uid == 0
    processes = wish.pids + (_GVISOR_PIDS if wish.runtime is not None and "runsc" in wish.runtime else 0)
    host = engine.create_host_config(
        network_mode="none", cap_drop=["ALL"], cap_add=_ROOT_CAPABILITIES if root else [], read_only=True,
        privileged=False, init=False, ipc_mode="private",
        security_opt=["no-new-privileges:true", f"seccomp={docker_seccomp.profile(root=root)}"],
        tmpfs=writable, shm_size=_SHM_BYTES, pids_limit=processes, mem_limit=memory, memswap_limit=memory,
        nano_cpus=int(wish.cpus * 1e9), runtime=wish.runtime,
        log_config={"Type": "none", "Config": {}},
        ulimits=[{"Name": "core", "Soft": 0, "Hard": 0}],
        mounts=[{"Type": "bind", "Source": source, "Target": target, "ReadOnly": True} for source, target in read_only.items()],
    )  # fmt: skip
    made: dict[str, Any] = engine.create_container(
        facts.id, [Bundle.shell(), "-c", _FIRST_PROCESS], host_config=host, user=f"{account.uid}:{account.gid}",
        hostname="sandbox", working_dir=str(WORKSPACE), entrypoint=[], stop_signal="SIGKILL", healthcheck={"test": ["NONE"]},
        environment={"PATH": f"{MOUNT}/bin"}, network_disabled=True,
        labels={LABEL: name, OWNER_LABEL: str(conf.parent.parent.parent)},
    )  # fmt: skip
    return str(made["Id"])


def described(wish: Wish, made: Made) -> str:
    """Return the limits in one line, for ``up``."""
    megabytes = 1 << 20
    who = f"{made.account.name} ({made.account.uid})"
    return (
        f"image {wish.image or wish.dockerfile}, user {who}, memory {wish.memory // megabytes} MiB and "
        f"{wish.files // megabytes} MiB for files in memory (workspace {wish.disk // megabytes}), {wish.cpus:g} CPUs, "
        f"{wish.pids} processes" + (f", runtime {wish.runtime}" if wish.runtime else "")
    )


def bundle(tell: Callable[[str], None]) -> Bundle:
    """Return the OpenSSH bundle; ``tell`` is called first if it must be made."""
    if not openssh_bundle.is_made():
        tell("preparing an OpenSSH server that runs in any image, once for this version (under a second)")
    return openssh_bundle.make()
