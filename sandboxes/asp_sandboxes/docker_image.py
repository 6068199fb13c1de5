"""What an image brings: its user, environment, working directory, shell and locale. Asked once, kept by the image's id."""

import contextlib
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import BytesIO
from typing import Any

from asp.errors import UsageError, quoted
from asp.state import state_dir, write_private
from asp_sandboxes import docker_engine
from asp_sandboxes.docker_engine import Engine

AGENT, AGENT_ID, AGENT_HOME = "agent", 1000, "/home/agent"
_FORMAT = 2
_MAX_FILE_BYTES = 1 << 20
_ACCOUNT = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
_SHELLS = ("/bin/bash", "/bin/sh")
_LOCALES = ("/usr/lib/locale/C.utf8", "/usr/lib/locale/C.UTF-8")


@dataclass(frozen=True)
class Account:
    """Who the agent is in the sandbox."""

    name: str
    uid: int
    gid: int
    home: str


@dataclass(frozen=True)
class ImageFacts:
    """``user`` is what the image says, such as ``app``, ``1000:1000`` or nothing; ``present`` are paths that it has."""

    id: str
    user: str
    environment: dict[str, str]
    passwd: str
    group: str
    present: list[str] = field(default_factory=list[str])

    @property
    def has_sh(self) -> bool:
        """Whether there is a ``/bin/sh``."""
        return "/bin/sh" in self.present

    def account(self, wanted: str | None) -> Account:
        """Return the account for ``--user``, else the image's own, else ours. Raises UsageError for one that is not there."""
        asked = wanted if wanted is not None else self.user
        name, _, group = asked.partition(":")
        if not name:
            return Account(AGENT, AGENT_ID, AGENT_ID, AGENT_HOME)
        for entry, uid, gid, home in self._accounts():
            if name in {entry, str(uid)}:
                return Account(entry, uid, self._gid(group, gid), home if home.startswith("/") else AGENT_HOME)
        if name.isdecimal():
            uid = int(name)
            return Account("root" if uid == 0 else AGENT, uid, self._gid(group, uid), "/root" if uid == 0 else AGENT_HOME)
        if name == "root":
            return Account("root", 0, 0, "/root")
        msg = f"the image has no user {quoted(name)}"
        raise UsageError(msg)

    def _gid(self, group: str, otherwise: int) -> int:
        if group.isdecimal():
            return int(group)
        for line in self.group.splitlines():
            fields = line.split(":")
            if group and fields[0] == group and len(fields) > 2 and fields[2].isdecimal():  # noqa: PLR2004 - NAME:x:GID:
                return int(fields[2])
        return otherwise

    def _accounts(self) -> Iterator[tuple[str, int, int, str]]:
        for line in self.passwd.splitlines():
            fields = line.split(":")
            if len(fields) >= 7 and _ACCOUNT.fullmatch(fields[0]) and fields[2].isdecimal() and fields[3].isdecimal():  # noqa: PLR2004 - passwd(5)
                yield fields[0], int(fields[2]), int(fields[3]), fields[5]


def facts(engine: Engine, image: str) -> ImageFacts:
    """Return the facts of a local image. Raises UsageError if there is no such image, DockerFailed."""
    from docker.errors import APIError, ImageNotFound  # noqa: PLC0415 - 0.2 s, and an extra

    try:
        found: dict[str, Any] = engine.inspect_image(image)
    except ImageNotFound as error:
        msg = f"there is no image {quoted(image)} on this engine; get it with: docker pull {image}"
        raise UsageError(msg) from error
    except APIError as error:
        msg = f"the image {quoted(image)} cannot be used: {docker_engine.explain(error)}"
        raise docker_engine.DockerFailed(msg) from error
    image_id = str(found["Id"])
    kept = state_dir("images") / f"{image_id.removeprefix('sha256:')[:64]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        stored = json.loads(kept.read_bytes())
        if stored.pop("format") == _FORMAT:
            return ImageFacts(**stored)
    config: dict[str, Any] = found.get("Config") or {}
    environment = dict(pair.split("=", 1) for pair in config.get("Env") or () if "=" in pair)
    made = _look_inside(engine, image_id, str(config.get("User") or ""), environment)
    write_private(kept, json.dumps({"format": _FORMAT, **asdict(made)}).encode())
    return made


def _look_inside(engine: Engine, image_id: str, user: str, environment: dict[str, str]) -> ImageFacts:
    """Read what we need from a container that is never started."""
    from docker.errors import APIError  # noqa: PLC0415 - as above

    try:
        host = engine.create_host_config(network_mode="none")
        container = str(engine.create_container(image_id, ["none"], host_config=host, network_disabled=True)["Id"])
        try:
            texts = [_file(engine, container, path) for path in ("/etc/passwd", "/etc/group")]
            present = [path for path in (*_SHELLS, *_LOCALES) if _is_there(engine, container, path)]
        finally:
            engine.remove_container(container, force=True, v=True)
    except APIError as error:
        msg = f"the image cannot be looked into: {docker_engine.explain(error)}"
        raise docker_engine.DockerFailed(msg) from error
    return ImageFacts(image_id, user, environment, texts[0], texts[1], present)


def _file(engine: Engine, container: str, path: str) -> str:
    """Return a text file of the image; nothing if it is not there, is no regular file, or is absurdly long."""
    from docker.errors import NotFound  # noqa: PLC0415 - as above

    try:
        pieces, status = engine.get_archive(container, path)
    except NotFound:
        return ""
    with contextlib.closing(pieces):
        if int(status["size"]) > _MAX_FILE_BYTES or status.get("linkTarget"):
            return ""
        data = b"".join(pieces)
    with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=BytesIO(data)) as archive:
        member = archive.next()
        content = archive.extractfile(member) if member is not None and member.isfile() else None
        if content is not None:
            return content.read().decode("utf-8", "replace")
    return ""


def _is_there(engine: Engine, container: str, path: str) -> bool:
    from docker.errors import NotFound  # noqa: PLC0415 - as above

    try:
        pieces, _ = engine.get_archive(container, path)
    except NotFound:
        return False
    with contextlib.closing(pieces):
        return True


def passwd_line(account: Account, shell: str) -> str:
    """Return the account's line of passwd(5)."""
    return f"{account.name}:x:{account.uid}:{account.gid}:{account.name}:{account.home}:{shell}\n"
