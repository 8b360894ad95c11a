"""Fixtures that more than one folder needs."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def unused_port() -> int:
    """Returns a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
