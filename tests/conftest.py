"""Fixtures that more than one folder needs."""

from __future__ import annotations

import socket

import pytest

PROCESSES = {"command", "end_to_end", "dashboard"}  # folders whose tests start many processes


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, those tests stay on one: side by side they would be too slow for what they wait for."""
    for item in items:
        if item.path.parent.name in PROCESSES:
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture
def unused_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
