"""What moved the parameters, judged row by row."""

from __future__ import annotations

import numpy as np
from atoll.moves import Adoption, Cycle, Moves, Verdict

PLACES, VALUES = 8, 16


class Rows:
    """A fragment's values as they move."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.moves = Moves(np.arange(PLACES) * VALUES, np.zeros(PLACES, np.int64), np.full(PLACES, 1e-7, np.float32))
        self.values = self.noise(1.0)

    def noise(self, size: float) -> np.ndarray:
        return (size * self.random.standard_normal(PLACES * VALUES)).astype(np.float32)

    def step(self, beside: np.ndarray | float = 0.0, usual: float = 0.01) -> Verdict:
        start, before = self.values, self.values + beside
        after = self.values = (before + self.noise(usual)).astype(np.float32)
        return self.moves.look(np.stack([start, before, after, after]), [Cycle(0, 1, 2, 3)])

    def adopt(self) -> np.ndarray:
        before, change = self.values, self.noise(0.2)
        self.values = before + change
        self.moves.look(np.stack([before, self.values]), [Adoption(0, 1, (0,))])
        return change


def test_an_adoption_that_is_undone_among_others_that_were_not_is_one_vote_and_three_are_enough():
    rows = Rows()
    for _ in range(10):
        assert rows.step() is Verdict.FINE
    rows.adopt()
    assert rows.step() is Verdict.FINE
    verdicts = []
    for _ in range(3):
        change = rows.adopt()
        undoing = rows.values - change
        verdicts.append(rows.moves.look(np.stack([rows.values, undoing]), [Cycle(0, 0, 1, 1)]))
        rows.values = undoing
        assert rows.step() is Verdict.FINE
    assert verdicts == [Verdict.UNDONE, Verdict.UNDONE, Verdict.COPIES]


def test_what_moves_beside_the_optimizer_is_work_up_to_eight_of_its_steps_and_not_from_there_on():
    rows = Rows()
    for _ in range(10):
        rows.step()
    assert rows.step(rows.noise(0.05)) is Verdict.FINE
    assert rows.step(rows.noise(0.15)) is Verdict.WRITTEN


def test_a_projection_may_go_as_far_as_an_adoption_led():
    rows = Rows()
    for _ in range(10):
        rows.step()
    change = rows.adopt()
    assert rows.step(-0.5 * change) is Verdict.FINE
    assert rows.step(-0.5 * change) is Verdict.WRITTEN


def test_what_is_not_finite_is_left_to_who_takes_it():
    rows = Rows()
    rows.step()
    assert rows.step(np.float32(np.nan)) is Verdict.FINE
