"""Files over SFTP (draft-ietf-secsh-filexfer-02, version 3, what OpenSSH speaks), byte paths, never a half file (F2, F3)."""

import asyncio
import contextlib
import posixpath
import secrets
import stat
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

import asyncssh

from asp import errors
from asp.ssh import exec as remote
from asp.ssh.connection import Connection
from asp.ssh.script import quote
from asp.ssh.session import OPEN_BACKOFF_S, OPEN_TRIES, READY_TIMEOUT_S
from asp.transport import MAX_READ_BYTES, DirEntry, FileKind, FileStat

T = TypeVar("T")

CHUNK = 1 << 20
"""Bytes asked for at a time; asyncssh splits it into requests of the server's size and joins short answers."""

LINK_LIMIT = 40
"""As Linux: more links in one path are a loop (ELOOP, path_resolution(7))."""

NEW_FILE_MODE = 0o644
"""umask 022, whatever umask the SFTP server was started with (Harbor's has 0077)."""

REQUEST_TIMEOUT_S = 60.0
"""For one SFTP request, of at most CHUNK bytes. A server that is silent for longer is treated as gone."""

_COMMIT_TIMEOUT_S = 600.0
_KEPT = 3  # status of the copy in place when the old content could not be put back


async def _start_sftp(ssh: asyncssh.SSHClientConnection) -> asyncssh.SFTPClient:
    """Start an SFTP client; a refused open is tried again, since a session that has just ended may still be counted."""
    for attempt in range(1, OPEN_TRIES):
        try:
            return await ssh.start_sftp_client(path_encoding=None)
        except asyncssh.ChannelOpenError as error:
            if ssh.is_closed() or error.code != asyncssh.OPEN_CONNECT_FAILED:
                raise
            await asyncio.sleep(OPEN_BACKOFF_S * 2**attempt)
    return await ssh.start_sftp_client(path_encoding=None)


async def _soon(answer: Awaitable[T]) -> T:
    """Wait for one answer of the SFTP server, at most a minute. Raises SFTPConnectionLost for a server that is silent."""
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            return await answer
    except TimeoutError as error:
        silent = f"no answer in {REQUEST_TIMEOUT_S:.0f} s"
        raise asyncssh.SFTPConnectionLost(silent) from error


async def _client(connection: Connection) -> asyncssh.SFTPClient:
    """Return the connection's SFTP client; opened once, and one opening serves all that wait, also when some are cancelled.

    Raises ExecNotAllowed when the server has no SFTP, LoginShellFailed when a login file prints into it, NotStarted.
    """
    if connection.sftp is None:
        connection.sftp = asyncio.ensure_future(_start_sftp(connection.ssh))
    opening = connection.sftp
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            return await asyncio.shield(opening)
    except TimeoutError as error:
        msg = f"the server did not answer in {READY_TIMEOUT_S:.0f} s when SFTP was asked for"
        raise errors.NotStarted(msg) from error
    except (asyncssh.Error, OSError) as error:
        if connection.sftp is opening:
            connection.sftp = None
        if connection.ssh.is_closed():
            msg = "the connection ended before the file was touched"
            raise errors.NotStarted(msg) from error
        if isinstance(error, asyncssh.ChannelOpenError):
            msg = f"the server offers no SFTP, which the file verbs need: {errors.quoted(error.reason)}"
            raise errors.ExecNotAllowed(msg) from error
        msg = f"the server's SFTP does not speak SFTP (does a login file print?): {errors.quoted(str(error))}"
        raise errors.LoginShellFailed(msg) from error


def _kind(attrs: asyncssh.SFTPAttrs) -> FileKind:
    mode = attrs.permissions
    if mode is None:
        return FileKind.SPECIAL
    if stat.S_ISREG(mode):
        return FileKind.FILE
    if stat.S_ISDIR(mode):
        return FileKind.DIRECTORY
    return FileKind.SYMLINK if stat.S_ISLNK(mode) else FileKind.SPECIAL


@contextlib.asynccontextmanager
async def _errors_of(connection: Connection, path: bytes, shown: str) -> AsyncIterator[asyncssh.SFTPClient]:
    """Give the SFTP client; turn its errors into ours. ``path`` is absolute, ``shown`` is how the caller wrote it."""
    sftp = await _client(connection)
    try:
        yield sftp
    except (asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection, asyncssh.ConnectionLost) as error:
        if connection.sftp is not None and connection.sftp.done():  # it alone may have died: the next verb starts another
            connection.sftp = None
        sftp.exit()
        msg = f"the connection was lost while {errors.quoted(shown)} was used; what was written may or may not be in place"
        raise errors.ConnectionLost(msg) from error
    except asyncssh.SFTPError as error:
        raise await _explain(sftp, path, shown, error) from error


async def _explain(  # noqa: C901 - one decision, in order
    sftp: asyncssh.SFTPClient, path: bytes, shown: str, error: asyncssh.SFTPError,
) -> errors.AspError:
    """Tell path errors apart: version 3 has one code for "no such file, not a directory, loop" and one for all the rest."""
    try:
        if isinstance(error, asyncssh.SFTPPermissionDenied):
            return errors.PathDenied(shown)
        if isinstance(error, asyncssh.SFTPNoSpaceOnFilesystem | asyncssh.SFTPQuotaExceeded):
            return errors.NoSpace(shown)
        prefix = b"/"
        for part in path.split(b"/")[1:-1]:
            prefix = posixpath.join(prefix, part)
            kind = await _kind_or_none(sftp, prefix)
            if kind is not None and kind is not FileKind.DIRECTORY:
                return errors.PathNotDirectory(shown)
        if await _soon(sftp.lexists(path)):
            kind = await _kind_or_none(sftp, path)
            if kind is None and await _soon(sftp.islink(path)):
                target = await _resolve(sftp, path, shown)
                return errors.PathLoop(shown) if await _soon(sftp.lexists(target)) else errors.PathMissing(shown)
            if kind is FileKind.DIRECTORY:
                return errors.PathIsDirectory(shown)
            if isinstance(error, asyncssh.SFTPFailure) and await _is_full(sftp, path):
                return errors.NoSpace(shown)
        elif isinstance(error, asyncssh.SFTPNoSuchFile | asyncssh.SFTPNoSuchPath):
            return errors.PathMissing(shown)
    except errors.RemotePathError as found:
        return found
    except asyncssh.SFTPError:
        pass
    return errors.RemotePathError(shown, f"the server refused: {errors.quoted(error.reason)}")


async def _kind_or_none(sftp: asyncssh.SFTPClient, path: bytes) -> FileKind | None:
    try:
        return _kind(await _soon(sftp.stat(path)))
    except asyncssh.SFTPError:
        return None


async def _is_full(sftp: asyncssh.SFTPClient, path: bytes) -> bool:
    with contextlib.suppress(asyncssh.SFTPError):
        space = await _soon(sftp.statvfs(posixpath.dirname(path)))
        return space.bavail == 0 or space.favail == 0
    return False


async def _resolve(sftp: asyncssh.SFTPClient, path: bytes, shown: str) -> bytes:
    """Follow the last component's links by hand, so that a link to nothing names the file to make. Raises PathLoop."""
    for _ in range(LINK_LIMIT):
        if not await _soon(sftp.islink(path)):
            return path
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), await _soon(sftp.readlink(path))))
    raise errors.PathLoop(shown)


async def read(connection: Connection, path: bytes, shown: str, *, offset: int, max_bytes: int | None) -> bytes:
    """Read a regular file; see :meth:`asp.transport.Transport.read`."""
    limit = MAX_READ_BYTES if max_bytes is None else max_bytes
    data = bytearray()
    async with _errors_of(connection, path, shown) as sftp:
        kind = _kind(await _soon(sftp.stat(path)))
        if kind is FileKind.DIRECTORY:
            raise errors.PathIsDirectory(shown)
        if kind is not FileKind.FILE:
            raise errors.PathSpecial(shown)
        file = await _soon(sftp.open(path, "rb"))
        try:
            # To the end, not to the size: a size of 0 (/proc) and short answers are normal.
            while len(data) <= limit:
                piece: bytes = await _soon(file.read(min(CHUNK, limit + 1 - len(data)), offset + len(data)))
                if not piece:
                    break
                data += piece
        finally:
            await _soon(file.close())
    if max_bytes is None and len(data) > limit:
        raise errors.FileTooLarge(shown, f"larger than {limit >> 20} MiB; read a part of it")
    return bytes(data[:limit])


async def look(connection: Connection, path: bytes, shown: str, *, follow: bool) -> FileStat:
    """Return what a path is; see :meth:`asp.transport.Transport.stat`."""
    async with _errors_of(connection, path, shown) as sftp:
        attrs = await _soon(sftp.stat(path) if follow else sftp.lstat(path))
    return FileStat(_kind(attrs), attrs.size or 0, stat.S_IMODE(attrs.permissions or 0), float(attrs.mtime or 0))


async def names(connection: Connection, path: bytes, shown: str, *, max_entries: int) -> Sequence[DirEntry]:
    """List a directory; see :meth:`asp.transport.Transport.list`."""
    found: list[DirEntry] = []
    async with _errors_of(connection, path, shown) as sftp:
        if _kind(await _soon(sftp.stat(path))) is not FileKind.DIRECTORY:
            raise errors.PathNotDirectory(shown)
        await _soon(_scan(sftp, path, found, max_entries * 4))  # bounded, whatever an endless directory sends
    return sorted(found, key=lambda entry: entry.name)[:max_entries]


async def _scan(sftp: asyncssh.SFTPClient, path: bytes, found: list[DirEntry], most: int) -> None:
    seen = 0
    async for entry in sftp.scandir(path):
        seen += 1
        if seen > most:
            return
        name = entry.filename if isinstance(entry.filename, bytes) else entry.filename.encode()
        if name in {b".", b".."} or b"/" in name or not name:
            continue  # a name with a slash would point elsewhere: a hostile server's
        found.append(DirEntry(name, _kind(entry.attrs)))


async def write(connection: Connection, path: bytes, shown: str, data: bytes) -> None:
    """Write a file whole or not at all; see :meth:`asp.transport.Transport.write`."""
    guard = await connection.live_guard()
    async with _errors_of(connection, path, shown) as sftp:
        target = await _resolve(sftp, path, shown)
        old = await _soon(sftp.stat(target)) if await _soon(sftp.lexists(target)) else None
        if old is not None and _kind(old) is FileKind.DIRECTORY:
            raise errors.PathIsDirectory(shown)
        if old is not None and _kind(old) is not FileKind.FILE:
            raise errors.PathSpecial(shown)
        if old is not None and not await _may_write(sftp, target):
            raise errors.PathDenied(shown)
        folder = posixpath.dirname(target)
        # In the same directory, so that the rename is one step; the name tells nothing.
        temporary = posixpath.join(folder, b"." + secrets.token_hex(8).encode())
        connection.temporary_files += 1
        in_place = False
        try:
            await guard.remove_if_cut(temporary)
            try:
                await _fill(sftp, temporary, data, stat.S_IMODE(old.permissions or 0) if old is not None else NEW_FILE_MODE)
            except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath):
                await _soon(sftp.makedirs(folder, exist_ok=True))
                await _fill(sftp, temporary, data, NEW_FILE_MODE)
            await _commit(connection, sftp, temporary, target, old)
            in_place = True
        finally:
            connection.temporary_files -= 1
            if not in_place:
                connection.left_behind |= not await asyncio.shield(_removed(sftp, temporary))
            if not connection.temporary_files and not connection.left_behind:
                guard.keep_all()  # else the guard removes what is left, at the end of the connection


async def _removed(sftp: asyncssh.SFTPClient, temporary: bytes) -> bool:
    """Remove a temporary file; return whether it is known to be gone."""
    try:
        await _soon(sftp.remove(temporary))
    except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath):
        return True
    except (asyncssh.Error, OSError):
        return False
    return True


async def _may_write(sftp: asyncssh.SFTPClient, target: bytes) -> bool:
    """A rename would replace a read-only file; a write must be refused as any local program's would be."""
    try:
        file = await _soon(sftp.open(target, asyncssh.FXF_WRITE, encoding=None))
    except asyncssh.SFTPPermissionDenied:
        return False
    await _soon(file.close())
    return True


async def _fill(sftp: asyncssh.SFTPClient, temporary: bytes, data: bytes, mode: int) -> None:
    """Write a new file and give it its mode."""
    flags = asyncssh.FXF_WRITE | asyncssh.FXF_CREAT | asyncssh.FXF_EXCL
    file = await _soon(sftp.open(temporary, flags, asyncssh.SFTPAttrs(permissions=0o600), encoding=None))
    try:
        for offset in range(0, len(data), CHUNK):
            await _soon(file.write(data[offset : offset + CHUNK], offset))
        await _soon(file.setstat(asyncssh.SFTPAttrs(permissions=mode)))
        with contextlib.suppress(asyncssh.SFTPOpUnsupported):
            await _soon(file.fsync())
    finally:
        await _soon(file.close())


async def _commit(
    connection: Connection, sftp: asyncssh.SFTPClient, temporary: bytes, target: bytes, old: asyncssh.SFTPAttrs | None,
) -> None:
    """Put the new content in place; keep owner and hard links of what was there."""
    if old is not None and not await _can_replace(connection, sftp, temporary, target, old):
        await _overwrite(connection, temporary, target)
        return
    try:
        await _soon(sftp.posix_rename(temporary, target))
    except asyncssh.SFTPOpUnsupported:
        if old is not None:  # version 3 rename does not replace; the in-place copy is whole or undone
            await _overwrite(connection, temporary, target)
        else:
            await _soon(sftp.rename(temporary, target))


async def _can_replace(
    connection: Connection, sftp: asyncssh.SFTPClient, temporary: bytes, target: bytes, old: asyncssh.SFTPAttrs,
) -> bool:
    """Whether a rename keeps what must be kept: one hard link only, and the same owner (root gives it away)."""
    new = await _soon(sftp.stat(temporary))
    if (new.uid, new.gid) != (old.uid, old.gid):
        try:
            await _soon(sftp.setstat(temporary, asyncssh.SFTPAttrs(uid=old.uid, gid=old.gid)))
            await _soon(sftp.setstat(temporary, asyncssh.SFTPAttrs(permissions=stat.S_IMODE(old.permissions or 0))))
        except asyncssh.SFTPError:
            return False
    # SFTP version 3 does not tell the number of links; POSIX ls does, in its second field. GNU ls cannot look at anything
    # under a gVisor of 2022, whose statx knows no AT_NO_AUTOMOUNT; find can.
    look = b"LC_ALL=C ls -ldn -- %s 2>/dev/null || find %s -prune -links 1 -exec echo - 1 \\;" % (quote(target), quote(target))
    listing = await _shell(connection, look)
    fields = listing.split()
    return len(fields) > 1 and fields[1] == b"1"


async def _overwrite(connection: Connection, temporary: bytes, target: bytes) -> None:
    """Copy in place, in the sandbox, in a session of its own: neither a cut connection nor the guard can stop it half way.

    If it fails (a full disk), the old content is put back; if that fails too, it is kept beside the file and the error says so.
    """
    copy = (
        b'umask 077; cp -p -- "$f" "$t.o" || { rm -f -- "$t.o"; exit 1; }; '
        b'if cat -- "$t" >"$f"; then rm -f -- "$t.o" "$t"; '
        b'elif cat -- "$t.o" >"$f"; then rm -f -- "$t.o"; exit 1; else exit %d; fi'
    ) % _KEPT
    script = (
        b"trap '' TERM HUP INT; export t=%s f=%s; copy=%s; "
        b'if command -v setsid >/dev/null 2>&1; then setsid /bin/sh -c "$copy" & wait $!; else eval "$copy"; fi'
    ) % (quote(temporary), quote(target), quote(copy))
    await _shell(connection, script)


async def _shell(connection: Connection, script: bytes) -> bytes:
    result = await remote.run(
        connection,
        remote.Command(script, b"/", None, None, merge_streams=False, timeout_s=_COMMIT_TIMEOUT_S, keep_bytes=4096,
                       on_output=None),
        slots=connection.file_slots,
    )  # fmt: skip
    if result.status == _KEPT:
        msg = "neither the new content nor the old would fit; the old is kept beside the file, with a name that ends in .o"
        raise asyncssh.SFTPFailure(msg)
    if result.status != 0:
        full = b"o space left" in result.stderr
        raise (asyncssh.SFTPNoSpaceOnFilesystem if full else asyncssh.SFTPFailure)(result.stderr.decode("utf-8", "replace"))
    return result.stdout
