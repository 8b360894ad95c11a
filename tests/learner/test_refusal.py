"""`atoll learner` after a refusal: it keeps the exit status of the error."""

from __future__ import annotations

import pytest
from atoll.errors import LearnerError
from atoll.reference.refusal import handle_refusal
from atoll_wire.errors import ExitStatus


@pytest.mark.parametrize(
    ("status", "wait"),
    [(ExitStatus.REFUSED, False), (ExitStatus.FAILED, True), (ExitStatus.UNREACHABLE, True)],
)
def test_only_a_refusal_waits_and_only_if_it_was_asked_to(status, wait):
    def train() -> None:
        raise LearnerError("no", status)

    with pytest.raises(LearnerError, match="no") as raised:
        handle_refusal(train, wait=wait)
    assert raised.value.exit_status is status
