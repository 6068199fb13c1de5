"""The SSH client side: the only place that talks to asyncssh as a client."""
