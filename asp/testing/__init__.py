"""Test doubles that we ship: the local twin of the transport and an in-process SSH server."""
