"""Fixtures that more than one folder needs."""

from __future__ import annotations

import socket

import pytest

PROCESSES = {"command", "dashboard", "end_to_end"}  # folders whose tests start many processes


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps tests that start many processes in two groups, each on one worker: more at once would miss their limits."""
    for item in items:
        if item.path.parent.name in PROCESSES:
            item.add_marker(pytest.mark.xdist_group(f"processes {item.path.name < 'test_kill.py'}"))


@pytest.fixture
def unused_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
