"""Fixtures that more than one folder needs."""

from __future__ import annotations

import socket

import pytest

PROCESSES = {"command": "dashboard", "dashboard": "dashboard", "end_to_end": "end_to_end"}  # folder -> group


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps tests that start many processes in two groups, each on one worker: more at once would miss their limits."""
    for item in items:
        if group := PROCESSES.get(item.path.parent.name):
            item.add_marker(pytest.mark.xdist_group(group))
        elif item.path.name == "test_quality.py":  # its trained models are made once per worker
            item.add_marker(pytest.mark.xdist_group("quality"))


@pytest.fixture
def unused_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
