"""`atoll learner` after a refusal: it keeps the exit status of the error."""

from __future__ import annotations

import signal

import pytest
from atoll.errors import LearnerError
from atoll.reference import refusal
from atoll_wire.errors import ExitStatus


@pytest.mark.parametrize(
    ("status", "wait"),
    [(ExitStatus.REFUSED, False), (ExitStatus.FAILED, True), (ExitStatus.UNREACHABLE, True)],
)
def test_only_a_refusal_waits_and_only_if_it_was_asked_to(status, wait):
    def train() -> None:
        raise LearnerError("no", status)

    with pytest.raises(LearnerError, match="no") as raised:
        refusal.handle_refusal(train, wait=wait)
    assert raised.value.exit_status is status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_follows_the_logged_line_at_once_ends_the_wait(monkeypatch, number):
    def train() -> None:
        raise LearnerError("no", ExitStatus.REFUSED)

    def logged(event: str, **_: object) -> None:
        assert "waits for SIGTERM" in event
        signal.raise_signal(number)

    before = {each: signal.signal(each, _too_early) for each in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(refusal.log, "error", logged)
    try:
        with pytest.raises(LearnerError, match="no"):
            refusal.handle_refusal(train, wait=True)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _too_early(*_: object) -> None:
    raise AssertionError("the signal came before its handler")
