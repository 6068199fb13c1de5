"""Who is at the other end of a connection: the check before anything is done for it."""

import socket
import struct
from pathlib import Path

ESTABLISHED = 0x01
_READS = 3
"""The table may change between two reads of it, so that a line is missed: look again before refusing."""


def unix_peer_uid(connection: socket.socket) -> int:
    """Return the uid at the other end of a unix stream. Raises OSError."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def loopback_peer_uid(connection: socket.socket, table: Path = Path("/proc/self/net/tcp")) -> int | None:
    """Return the uid that owns the other end of a TCP connection over 127.0.0.0/8, None if that cannot be said.

    The kernel's table has one line for each end; the other end is the line with our two addresses exchanged. A line without
    an inode is a socket that nobody holds any more, and its uid column is 0 whoever it was: it says nothing.
    """
    try:
        wanted = [_encoded(*connection.getpeername()), _encoded(*connection.getsockname())]
    except (OSError, TypeError):  # gone already, or not IPv4
        return None
    for _ in range(_READS):
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            return None
        for fields in map(str.split, lines):
            if fields[1:3] == wanted and int(fields[3], 16) == ESTABLISHED and int(fields[9]) != 0:
                return int(fields[7])
    return None


def _encoded(host: str, port: int) -> str:
    """Write an address as the table does: the four bytes as one number in the machine's own byte order, in hexadecimal."""
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"
