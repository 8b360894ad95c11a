"""Fixtures for tests of learners: a core that the test controls, the log, and a gate before the disk."""

from __future__ import annotations

import threading

import pytest
import structlog
from atoll.boundary import movement_watch
from atoll.checkpoints import storage
from atoll.model import samples

from tests.learner.fake_core import fake_core


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


class LateBlock(samples.Block):
    """Rows that arrive only at the third look, like those of a GPU that lags by some steps."""

    waits = 0  # number of waits for rows

    def __init__(self, rows):
        super().__init__(rows)
        self._looks = 0

    @property
    def there(self):
        self._looks += 1
        return self._looks > 2

    def rows(self):
        LateBlock.waits += self._looks <= 2
        return super().rows()


@pytest.fixture(params=["at once", "late"])
def rows(request, monkeypatch):
    """Makes the watch's rows arrive at once, as from host memory, or some steps later, as from a GPU.

    Returns the class of rows.
    """
    monkeypatch.setattr(LateBlock, "waits", 0)
    if request.param == "late":
        monkeypatch.setattr(movement_watch, "Block", LateBlock)
    return movement_watch.Block
