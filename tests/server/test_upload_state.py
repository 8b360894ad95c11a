"""The table of an upload's transitions: its entries, and the errors for all other transitions."""

from __future__ import annotations

from itertools import product

import pytest
from atoll_server.uploads.upload_state import NEXT, TransitionError, UploadEvent, UploadState, after


@pytest.mark.parametrize(("state", "saw"), [at for at in product(UploadState, UploadEvent) if at not in NEXT])
def test_a_transition_that_is_not_in_the_table_names_both_ends(state, saw):
    with pytest.raises(TransitionError) as error:
        after(state, saw)
    assert state.value in str(error.value)
    assert saw.value in str(error.value)


def test_a_complete_upload_is_never_dropped_and_an_ended_one_stays_ended():
    assert (UploadState.WHOLE, UploadEvent.GIVEN_UP) not in NEXT
    assert {state for state, _ in NEXT} == {UploadState.GROWING, UploadState.WHOLE}


def test_every_state_is_reached_from_growing():
    reached = {UploadState.GROWING}
    while more := {following for (state, _), following in NEXT.items() if state in reached} - reached:
        reached |= more
    assert reached == set(UploadState)
