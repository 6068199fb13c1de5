"""The SSH client side: the only place that talks to asyncssh as a client."""

from asp.ssh.connection import open_connection
from asp.ssh.transport import SSHTransport, open_transport

__all__ = ["SSHTransport", "open_connection", "open_transport"]
