"""How a streaming call is opened: it ends with its block, and counts until it has ended."""

from __future__ import annotations

import contextlib

import pytest
from atoll_wire.calling import open_calls, opened


class Call:
    """Ends when its other side says so."""

    def __init__(self) -> None:
        self.cancelled, self._told = False, []

    def add_done_callback(self, callback) -> None:
        self._told.append(callback)

    def cancel(self) -> None:
        self.cancelled = True

    def end(self) -> None:
        for told in self._told:
            told(self)


@pytest.mark.parametrize("error", [None, KeyError, RuntimeError])
def test_a_call_ends_with_its_block_whatever_ended_that_and_counts_until_it_has_ended(error):
    before, call = open_calls()["Report"], Call()
    with contextlib.suppress(*([error] if error else [])), opened("Report", call) as it:
        assert (it, open_calls()["Report"], call.cancelled) == (call, before + 1, False)
        if error:
            raise error
    assert call.cancelled
    assert open_calls()["Report"] == before + 1, "gRPC has not said that it ended"
    call.end()
    assert open_calls()["Report"] == before
