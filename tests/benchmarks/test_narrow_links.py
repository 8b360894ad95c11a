"""The benchmark behind the twenty-fold claim: its scale by hand, and a short run of both sides (needs root)."""

from __future__ import annotations

import pytest

from benchmarks.narrow_links.__main__ import atoll, data_parallel, link_mbit
from benchmarks.narrow_links.pace import tokens_of_step

STEP_S, MBIT, PARAMETERS = 0.4, 20.0, 1_049_984


def test_a_link_has_the_papers_bits_per_parameter_and_step():
    assert link_mbit(2.0, 12_000_000_000, 3.0) == pytest.approx(2000)
    assert link_mbit(2.0, 1_200_000, 3.0) == pytest.approx(0.2)
    assert link_mbit(2.0, 1_200_000, 0.3) == pytest.approx(2.0)


@pytest.mark.root
def test_both_sides_train_over_the_link():
    ours = atoll(0.0, MBIT, STEP_S, 60, PARAMETERS, exports=True)
    theirs = data_parallel(0.0, MBIT, STEP_S, 5, "bf16", 1.0, save=True)
    assert ours.utilisation > 0.8
    assert ours.tokens_s == pytest.approx(4 * tokens_of_step() / ours.step_s, rel=0.2)
    gradients_s = 16 * PARAMETERS * 1.5 / (MBIT * 1e6)
    assert theirs.step_s > STEP_S + 0.9 * gradients_s
    assert theirs.up_bits_s < MBIT * 1e6
    assert ours.tokens_s > 2 * theirs.tokens_s
    assert theirs.loss_at[0][1] < 5.5
    assert len(ours.loss_at) > 2
