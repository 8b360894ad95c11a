"""A learner after a refusal: its error keeps its exit status and is the only one that is shown."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import grpc
import pytest
from atoll.agent import sending
from atoll.errors import LearnerError
from atoll.reference import refusal
from atoll_wire.errors import ExitStatus

from tests.learner.fake_core import fake_core
from tests.learner.loops import Loop


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


def test_the_first_of_several_refusals_is_the_only_one_shown(monkeypatch, caplog):
    """gRPC raises a status that arrived just before a task was cancelled. Here, the second refusal arrives then."""
    upload, refusals, both = sending.upload, 0, asyncio.Event()

    async def refused_in_turn(*arguments: object, **options: object) -> object:
        nonlocal refusals
        try:
            return await upload(*arguments, **options)
        except grpc.aio.AioRpcError:
            refusals += 1
            if refusals == 1:
                await both.wait()
            else:
                both.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            raise

    monkeypatch.setattr(sending, "upload", refused_in_turn)
    with fake_core() as core:
        core.fail("Push", grpc.StatusCode.PERMISSION_DENIED, 'the certificate of "a" is revoked', times=100)
        loop = Loop(core.address)
        with pytest.raises(LearnerError, match="is revoked") as raised, loop.learner:  # noqa: PT012
            core.hang()
            for fragment in (0, 1):
                core.open(fragment)
            loop.until(lambda: core.asked["Push"] == 2)
            core.go_on()
            loop.until(lambda: False)
    assert refusals == 2
    assert raised.value.exit_status is ExitStatus.REFUSED
    assert not [line.getMessage() for line in caplog.records if line.name == "asyncio"]
