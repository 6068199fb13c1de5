"""Test doubles that we ship: the local twin of the transport and an in-process SSH server."""

from asp.testing.inprocess import InProcessSandbox
from asp.testing.twin import LocalTwin

__all__ = ["InProcessSandbox", "LocalTwin"]
