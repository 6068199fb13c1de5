"""A real SSH server inside the test process: about 5 ms to start and connect, no Docker, no mock."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import asyncssh

from asp.server import SandboxServer, ServerSettings


class InProcessSandbox:
    """An SSH server on 127.0.0.1 whose commands run on *this* machine, with an environment built from nothing.

    ``async with InProcessSandbox(folder) as sandbox`` gives ``port``, ``host_key`` (the line to pin), ``identity`` (the
    path of the private key) and :meth:`document`, the contract to write.
    """

    def __init__(
        self, folder: Path, *, workspace: Path | None = None, env: Mapping[str, str] | None = None, sftp: bool = True,
        allow_exec: bool = True, shell: str = "/bin/bash", login: str = "key", user: str = "agent",
    ) -> None:  # fmt: skip
        """Keep keys in ``folder``; serve ``workspace`` (default: a folder ``workspace`` in it)."""
        self.folder = folder
        self.workspace = workspace if workspace is not None else folder / "workspace"
        self.user = user
        self._host = asyncssh.generate_private_key("ssh-ed25519")
        self._client = asyncssh.generate_private_key("ssh-ed25519")
        self.identity = folder / "identity"
        self.server = SandboxServer(
            ServerSettings(
                host_key=self._host.export_private_key().decode(),
                authorized_keys=self._client.export_public_key().decode(),
                env=env if env is not None else {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder)},
                home=str(folder), shell=shell, user=user, login=login,
            ),
            sftp=sftp, allow_exec=allow_exec,
        )  # fmt: skip
        self.port = 0

    @property
    def host_key(self) -> str:
        """The line that pins this server: ``ssh-ed25519 BASE64``."""
        return " ".join(self._host.export_public_key().decode().split()[:2])

    def document(self) -> dict[str, Any]:
        """Return the contract for this server, ready for ``json.dumps``."""
        return {
            "version": "0", "transport": "ssh",
            "connection": {
                "host": "127.0.0.1", "port": self.port, "user": self.user,
                "identity": {"file": str(self.identity)}, "host_key": self.host_key,
            },
            "workspace": str(self.workspace),
        }  # fmt: skip

    async def start(self) -> None:
        """Make the folder, the key and the workspace; listen on a free port."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.workspace.mkdir(parents=True, exist_ok=True)
        self.identity.write_bytes(self._client.export_private_key())
        self.identity.chmod(0o600)
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        await self.server.listen(listener)

    async def aclose(self) -> None:
        """Close every connection and kill what still runs."""
        await self.server.aclose()

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        """Close."""
        await self.aclose()
