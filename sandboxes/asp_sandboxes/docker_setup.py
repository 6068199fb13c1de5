"""Dependencies before the block (S4): a build step with a network, whose result is an image that sandboxes start from.

The step runs in a throw-away container, with the files that ``asp push`` would send and nothing else of the person's: no keys, no
environment. What it leaves in the workspace beside these files (``node_modules``, ``.venv``) is kept at a neutral path and linked
into each sandbox's workspace, read-only. The image is found again by a digest of the base image, the command and the lock files.
"""

import contextlib
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asp import archive
from asp.errors import AspError, UsageError, quoted
from asp.terminal import printable
from asp_sandboxes import docker_engine
from asp_sandboxes.docker_engine import Engine
from asp_sandboxes.openssh_bundle import MOUNT, Bundle

REPOSITORY = "asp-setup"
DEPENDENCIES = "/opt/deps"
WORKSPACE = "/workspace"
LOCK_FILES = (
    "package.json", "package-lock.json", "npm-shrinkwrap.json", "yarn.lock", "pnpm-lock.yaml", "bun.lock", "requirements.txt",
    "requirements-dev.txt",
    "constraints.txt", "pyproject.toml", "setup.cfg", "uv.lock", "poetry.lock", "Pipfile.lock", "pdm.lock",
    "Cargo.lock", "go.sum", "go.mod", "Gemfile.lock", "composer.lock", "mix.lock", "pom.xml", "build.gradle", "gradle.lockfile",
)  # fmt: skip
_FORMAT = "1"
_SHOWN_LINES = 20

# Everything that was sent goes; folders that this empties go too; the rest is what the step made.
_KEEP_WHAT_IS_NEW = f"""
cd {WORKSPACE} || exit 1
{MOUNT}/bin/xargs -0 {MOUNT}/bin/rm -f -- < /tmp/.sent
{MOUNT}/bin/find . -mindepth 1 -depth -type d -exec {MOUNT}/bin/rmdir {{}} + 2>/dev/null
{MOUNT}/bin/rm -rf {DEPENDENCIES} && {MOUNT}/bin/mkdir -p {DEPENDENCIES} || exit 1
for f in * .[!.]* ..?*; do
    if [ -e "$f" ] || [ -L "$f" ]; then {MOUNT}/bin/mv -- "$f" {DEPENDENCIES}/ || exit 1; fi
done
{MOUNT}/bin/rm -f /tmp/.sent
"""

LINK = f"""for f in {DEPENDENCIES}/* {DEPENDENCIES}/.[!.]* {DEPENDENCIES}/..?*; do
    if [ -e "$f" ] || [ -L "$f" ]; then {MOUNT}/bin/ln -s "$f" {WORKSPACE}/; fi
done"""
"""Run in a new sandbox: what the set-up made is in the workspace."""


class SetUpFailed(AspError):
    """The build step did not end well; its last lines are in the text."""


def image(
    engine: Engine, base_id: str, command: str, repository: Path, bundle: Bundle, network: str, tell: Callable[[str], None]
) -> str:
    """Return the image that ``command`` makes of the base image; made now if there is none for this digest.

    Raises SetUpFailed, DockerFailed, TreeError.
    """
    from docker.errors import APIError, ImageNotFound  # noqa: PLC0415 - an extra, and 0.2 s

    name = f"{REPOSITORY}:{digest(base_id, command, repository)}"
    with contextlib.suppress(ImageNotFound):
        return str(engine.inspect_image(name)["Id"])
    tell(f"setting up, with a network, once for this command and these lock files: {printable(command, newlines=False)}")
    try:
        return _made(engine, base_id, command, repository, bundle, network, name)
    except APIError as error:
        msg = f"the set-up cannot run: {docker_engine.explain(error)}"
        raise docker_engine.DockerFailed(msg) from error


def build(engine: Engine, dockerfile: Path, repository: Path, tell: Callable[[str], None]) -> str:
    """Return the image of a Dockerfile, its context the files that ``asp push`` would send. Raises SetUpFailed, DockerFailed."""
    from docker.errors import APIError, ImageNotFound  # noqa: PLC0415 - as above

    try:
        text = dockerfile.read_bytes()
        inside = str(dockerfile.resolve().relative_to(repository.resolve()))
    except OSError as error:
        msg = f"{printable(str(dockerfile), newlines=False)}: cannot be read ({error.strerror})"
        raise UsageError(msg) from error
    except ValueError as error:
        msg = f"{printable(str(dockerfile), newlines=False)}: is not in the repository"
        raise UsageError(msg) from error
    name = f"{REPOSITORY}:{digest('dockerfile', text.decode('utf-8', 'replace'), repository)}"
    with contextlib.suppress(ImageNotFound):
        return str(engine.inspect_image(name)["Id"])
    tell(f"building {printable(inside, newlines=False)}, once for it and these lock files")
    lines: list[str] = []
    with tempfile.TemporaryFile() as context:
        archive.pack(repository, context)
        context.seek(0)
        try:
            for piece in engine.build(
                fileobj=context, custom_context=True, dockerfile=inside, tag=name, rm=True, forcerm=True, decode=True
            ):
                lines += str(piece.get("stream") or piece.get("error") or "").splitlines()
                if piece.get("error"):
                    raise SetUpFailed(_with_lines(f"{inside} cannot be built", lines))
        except APIError as error:
            msg = f"{printable(inside, newlines=False)} cannot be built: {docker_engine.explain(error)}"
            raise docker_engine.DockerFailed(msg) from error
    return str(engine.inspect_image(name)["Id"])


def digest(base: str, command: str, repository: Path) -> str:
    """Return what an image is found by: base, command, and the names and contents of the lock files at the top."""
    found = hashlib.sha256(f"{_FORMAT}\0{base}\0{command}".encode("utf-8", "surrogateescape"))
    for name in LOCK_FILES:
        with contextlib.suppress(OSError):
            content = (repository / name).read_bytes()
            found.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:32]


def _made(engine: Engine, base_id: str, command: str, repository: Path, bundle: Bundle, network: str, name: str) -> str:
    mounts = [{"Type": "bind", "Source": str(bundle.folder), "Target": str(MOUNT), "ReadOnly": True}]
    host = engine.create_host_config(network_mode=network, mounts=mounts, security_opt=["no-new-privileges:true"], init=False)
    container = str(engine.create_container(
        base_id, [Bundle.shell(), "-c", "while :; do sleep 3600 & wait; done"], host_config=host, entrypoint=[],
        working_dir=WORKSPACE, healthcheck={"test": ["NONE"]},
    )["Id"])  # fmt: skip
    try:  # the container has the image's own user, since the new image gets its settings from it; the steps are root's
        engine.start(container)
        _send(engine, container, repository)
        status, said = _run(engine, container, ["/bin/sh", "-c", command])
        if status:
            raise SetUpFailed(_with_lines(f"the set-up ended with status {status}", said.splitlines()))
        status, said = _run(engine, container, [Bundle.shell(), "-c", _KEEP_WHAT_IS_NEW])
        if status:
            raise SetUpFailed(_with_lines("what the set-up made cannot be kept", said.splitlines()))
        found: dict[str, Any] = engine.inspect_image(base_id).get("Config") or {}
        conf = {key: found.get(key) for key in ("Env", "Cmd", "Entrypoint", "User", "WorkingDir", "Labels") if found.get(key)}
        repository_name, _, tag = name.partition(":")
        return str(engine.commit(container, repository=repository_name, tag=tag, conf=conf)["Id"])
    finally:
        engine.remove_container(container, force=True, v=True)


def _send(engine: Engine, container: str, repository: Path) -> None:
    with tempfile.TemporaryFile() as packed:
        archive.pack(repository, packed)
        packed.seek(0)
        names = list(archive.read_entries(packed)[0])
        packed.seek(0)
        engine.put_archive(container, WORKSPACE, packed)
    engine.put_archive(container, "/tmp", archive.single(".sent", b"".join(name + b"\0" for name in names)))  # noqa: S108


def _run(engine: Engine, container: str, words: list[str]) -> tuple[int, str]:
    started = engine.exec_create(container, words, user="0:0", workdir=WORKSPACE)["Id"]
    said = engine.exec_start(started)
    return int(engine.exec_inspect(started)["ExitCode"]), said.decode("utf-8", "replace")


def _with_lines(head: str, lines: list[str]) -> str:
    last = [printable(line, newlines=False) for line in lines if line.strip()][-_SHOWN_LINES:]
    return "\n".join([head, *(f"  {line[:300]}" for line in last)]) if last else f"{head}; it said {quoted('nothing')}"
