"""Fixtures for tests of learners: a core that the test controls, the log, and a gate before the disk."""

from __future__ import annotations

import threading

import pytest
import structlog
from atoll.boundary import movement_watch
from atoll.checkpoints import storage

from tests.learner.fake_core import fake_core
from tests.learner.late_block import LateBlock


@pytest.fixture
def core():
    with fake_core() as it:
        yield it


@pytest.fixture
def said():
    with structlog.testing.capture_logs() as logs:
        yield logs


@pytest.fixture
def gate(monkeypatch):
    """Returns an event. Writes of checkpoints wait until it is set."""
    event, write = threading.Event(), storage._Writer.write_data

    def waiting(self, *given):
        assert event.wait(60)
        return write(self, *given)

    monkeypatch.setattr(storage._Writer, "write_data", waiting)
    yield event
    event.set()


@pytest.fixture(params=["at once", "late"])
def rows(request, monkeypatch):
    """Makes the watch's rows arrive at once, as from host memory, or some steps later, as from a GPU.

    Returns the class of rows.
    """
    monkeypatch.setattr(LateBlock, "waits", 0)
    if request.param == "late":
        monkeypatch.setattr(movement_watch, "Block", LateBlock)
    return movement_watch.Block
