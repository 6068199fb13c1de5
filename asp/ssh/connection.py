"""One authenticated SSH connection to one sandbox. :func:`open_connection` is the only place that opens any."""

import asyncio
import contextlib
import getpass
import os
import shutil
import socket
import tempfile
from pathlib import Path

import asyncssh

from asp import hostkey, identity
from asp.contract import Contract, effective_user
from asp.errors import (
    AspError,
    AuthenticationFailed,
    IdentityError,
    NotSSH,
    NotStarted,
    SameHost,
    Unreachable,
    quoted,
)
from asp.ssh.guard import Guard
from asp.ssh.session import Session
from asp.trust import TrustedContract

CONNECT_TIMEOUT_S = 10.0
"""For the TCP connection; one round trip, so anything above some seconds means that nobody is there."""

LOGIN_TIMEOUT_S = 20.0
"""For key exchange and authentication on a slow machine."""

KEEPALIVE_S = 10
KEEPALIVE_COUNT = 3
"""A silent peer is given up after KEEPALIVE_S x KEEPALIVE_COUNT = 30 s (P2)."""

SESSIONS = 6
"""Commands at once on one connection. sshd's MaxSessions default is 10 and counts the guard, SFTP, and sessions whose
command ended but whose background child may hold them (P1)."""

CLOSE_TIMEOUT_S = 3.0

SHORT_LIFE_S = 5.0
MOST_SHORT_LIVES = 5
"""The agent can kill guards in a loop; after so many in a row that lived under 5 s the connection is given up."""


class Connection:
    """A connection with a live guard. Made by :func:`open_connection`."""

    def __init__(self, trusted: TrustedContract, ssh: asyncssh.SSHClientConnection, guard: Guard) -> None:
        """Own ``ssh`` and ``guard``."""
        self.contract = trusted.contract
        self.ssh = ssh
        self.guard = guard
        self.slots = asyncio.Semaphore(SESSIONS)
        self.running: dict[Session, asyncio.Future[None]] = {}
        self.abandoned: set[Session] = set()
        self.sftp: asyncio.Future[asyncssh.SFTPClient] | None = None  # opened when first needed; see files.py
        self.temporary_files = 0
        self.left_behind = False
        # dropbear sends EOF and CLOSE as soon as the process exits, so a background child cannot be seen: always drain.
        self.hides_children = "dropbear" in str(ssh.get_extra_info("server_version")).lower()
        # The commands that files.py needs must not wait for the user's: a half-done write would.
        self.file_slots = asyncio.Semaphore(1)
        self._replacing: asyncio.Task[None] | None = None
        self._short_lives = 0
        self._closing = False
        self._watch(guard)

    def __repr__(self) -> str:
        """Show the state; never the user, which may be a token (C7)."""
        state = "closed" if self.closed else "open"
        return f"<Connection {self.contract.host}:{self.contract.port} {state}, {len(self.running)} running>"

    @property
    def closed(self) -> bool:
        """Whether the connection is gone."""
        return self._closing or self.ssh.is_closed()

    def _watch(self, guard: Guard) -> None:
        guard.dead.add_done_callback(lambda _dead: self._guard_died(guard))

    def _guard_died(self, guard: Guard) -> None:
        """The agent may kill or stop our guard. What ran under it is killed and reported, and a new guard takes over."""
        if guard is self.guard and not self.closed and (self._replacing is None or self._replacing.done()):
            self._replacing = asyncio.create_task(self._replace_guard(guard, dict(self.running)))

    async def _replace_guard(self, dead: Guard, orphans: dict[Session, "asyncio.Future[None]"]) -> None:
        # The drains of the dead guard may have been continued by the kernel (SIGCONT to an orphaned group) and eat output
        # that belongs to a result: so what ran is killed and its outcome reported as unknown, never as a success.
        lived_s = asyncio.get_running_loop().time() - dead.born
        self._short_lives = self._short_lives + 1 if lived_s < SHORT_LIFE_S else 0
        try:
            if self._short_lives > MOST_SHORT_LIVES:  # somebody kills each of them: not a connection to work on
                raise NotStarted("the guards of this connection are killed one after the other")
            self.guard = await Guard.start(self.ssh, b"/")
        except NotStarted:
            self.ssh.abort()
            return
        self._watch(self.guard)
        self.guard.kill(dead.pid)  # it may only have been stopped
        for session, abandoned in orphans.items():
            if session.pid is not None:
                self.guard.kill(session.pid)
            if not abandoned.done():
                abandoned.set_result(None)

    async def live_guard(self) -> Guard:
        """Return a guard that lives; without one no command starts (E6). Raises NotStarted."""
        while self.guard.dead.done():
            self._guard_died(self.guard)
            if self._replacing is None or self.closed:
                msg = "the guard of this connection ended"
                raise NotStarted(msg)
            await asyncio.wait({self._replacing})  # not awaited itself: close() cancels it, which is not our cancel
        return self.guard

    async def close(self) -> None:
        """Kill what runs, close, and leave no task behind; bounded by some seconds."""
        self._closing = True
        if self._replacing is not None:
            self._replacing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._replacing
        if not self.ssh.is_closed():
            self.guard.close()
            await self.guard.wait_closed(CLOSE_TIMEOUT_S)
        self.ssh.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.ssh.wait_closed()
        except TimeoutError:
            self.ssh.abort()
        if self.sftp is not None:  # an opening that nobody waits for ends with the connection
            self.sftp.cancel()
            await asyncio.wait({self.sftp})
            if not self.sftp.cancelled():
                self.sftp.exception()


class _Client(asyncssh.SSHClient):
    """Notes the host key that was refused, for the message."""

    def __init__(self) -> None:
        self.refused: asyncssh.SSHKey | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Refuse: asyncssh asks only for keys that are not the pinned one."""
        self.refused = key
        return False


async def open_connection(
    trusted: TrustedContract, *, allow_same_host: bool = False,
) -> Connection:
    """Connect, check the pinned host key, log in, start the guard, make sure that it is not this machine.

    It takes nothing but a TrustedContract, offers no key but the contract's, and reads no configuration of the user's
    (no agent, no default keys, no ``~/.ssh``: C5).

    Raises HostKeyMissing, HostKeyMismatch, IdentityError (nothing was sent that authenticates), Unreachable, NotSSH,
    AuthenticationFailed, ExecNotAllowed, LoginShellFailed, SameHost.
    """
    if not isinstance(trusted, TrustedContract):  # pyright: ignore[reportUnnecessaryIsInstance] - the one door
        msg = "open_connection takes a TrustedContract, not a contract that nobody has agreed to"  # type: ignore[unreachable]
        raise TypeError(msg)
    contract = trusted.contract
    if contract.host_key is None:
        raise hostkey.missing(contract)
    pin = hostkey.parse(contract.host_key)
    keys = _client_keys(trusted)
    user = effective_user(contract)
    _have_a_local_name()
    where = f"{contract.host}:{contract.port}"
    client = _Client()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S + LOGIN_TIMEOUT_S):
            outcome: asyncssh.SSHClientConnection | AspError = await asyncssh.connect(
                contract.host, contract.port,
                username=user,
                client_factory=lambda: client, client_keys=keys,
                known_hosts=([asyncssh.import_public_key(pin.line())], [], []),
                server_host_key_algs=list(pin.algorithms()),
                # aes128-gcm is the fastest on machines with AES instructions; the rest is for servers without it.
                encryption_algs=["aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "chacha20-poly1305@openssh.com",
                                 "aes128-ctr", "aes256-ctr"],
                compression_algs=["none"],
                preferred_auth=["publickey"] if keys else ["none"],
                config=None, agent_path=None, agent_forwarding=False, gss_host=None,
                x509_trusted_certs=None, x509_trusted_cert_paths=None,
                password=None, kbdint_auth=False, password_auth=False, host_based_auth=False,
                connect_timeout=CONNECT_TIMEOUT_S, login_timeout=LOGIN_TIMEOUT_S,
                keepalive_interval=KEEPALIVE_S, keepalive_count_max=KEEPALIVE_COUNT,
            )  # fmt: skip
    except (asyncssh.Error, OSError, ValueError) as error:
        # TimeoutError is an OSError; malformed packets and version lines reach us as ValueError.
        outcome = _named(error, pin, client, contract, offered_key=bool(keys))
    if isinstance(outcome, AspError):
        # Raised outside the except block: asyncssh's texts hold the user name, which may be a token (C7), and a traceback
        # prints causes and contexts.
        raise outcome
    ssh = outcome
    try:
        guard = await _guarded(ssh, where, allow_same_host=allow_same_host)
    except BaseException:
        ssh.abort()
        await ssh.wait_closed()
        raise
    return Connection(trusted, ssh, guard)


def _named(
    error: asyncssh.Error | OSError | ValueError,
    pin: hostkey.PinnedKey,
    client: _Client,
    contract: Contract,
    *,
    offered_key: bool,
) -> AspError:
    """Return our error for what asyncssh or the socket said while a connection was opened."""
    where = f"{contract.host}:{contract.port}"
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        offered = "unknown" if client.refused is None else client.refused.get_fingerprint()
        return hostkey.mismatch(pin, offered, contract.host, contract.port)
    if isinstance(error, asyncssh.PermissionDenied):
        offer = "the identity" if offered_key else "a login without a key (the contract names no identity)"
        return AuthenticationFailed(
            f"{where}: the server did not accept {offer}; check connection.user and connection.identity",
        )
    if isinstance(error, asyncssh.KeyExchangeFailed):
        if "host key" in error.reason.lower():
            return hostkey.mismatch(pin, f"no key of type {pin.algorithm}", contract.host, contract.port)
        return NotSSH(f"{where}: no common algorithms with this server: {quoted(error.reason)}")
    if isinstance(error, asyncssh.Error | ConnectionResetError | BrokenPipeError | ValueError):
        return NotSSH(f"{where}: the server ended the connection before the login was complete, or does not speak SSH")
    if isinstance(error, socket.gaierror):
        return Unreachable(f"{contract.host}: no such host")
    if isinstance(error, TimeoutError):
        return Unreachable(f"{where}: no answer in time")
    hint = "; is the sandbox up?" if hostkey.is_loopback(contract.host) else ""
    reason = os.strerror(error.errno) if error.errno else "no address answered"
    return Unreachable(f"{where}: cannot connect ({reason}){hint}")


async def _guarded(ssh: asyncssh.SSHClientConnection, where: str, *, allow_same_host: bool) -> Guard:
    """Start the guard, and stop if it can see a folder that we just made on this machine (C4)."""
    folder = Path(tempfile.mkdtemp(prefix=""))
    try:
        guard = await Guard.start(ssh, str(folder).encode())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if guard.same_host and not allow_same_host:
        guard.close()
        msg = (
            f"{where}: this endpoint is the machine you are on, so a tool call would act on it; "
            "nothing was run. If you mean it, pass --allow-same-host"
        )
        raise SameHost(msg)
    return guard


def _have_a_local_name() -> None:
    """Let asyncssh find a local user name: it asks for one although it needs none, and fails for a uid without an account."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = "nobody"


def _client_keys(trusted: TrustedContract) -> list[asyncssh.SSHKey] | None:
    text = identity.load_identity(trusted.contract)
    if text is None:
        return None
    try:
        return [asyncssh.import_private_key(text)]
    except asyncssh.KeyEncryptionError:
        reason = "it is protected by a passphrase"
    except (asyncssh.KeyImportError, ValueError):
        reason = "it is not a private key that can be used"
    msg = f"the identity of {trusted.contract.path} cannot be used: {reason}"
    raise IdentityError(msg)
