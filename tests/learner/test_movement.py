"""The detector's verdicts on movements, row by row."""

from __future__ import annotations

import numpy as np
from atoll.boundary.movement import Adoption, BoundaryRows, Movement, MovementDetector

PLACES, VALUES = 8, 16


class Rows:
    """Moving values of fragments of equal size."""

    def __init__(self, fragments: int = 1) -> None:
        self.random = np.random.default_rng(0)
        self.fragments = tuple(range(fragments))
        numbers = np.repeat(np.arange(fragments), PLACES // fragments)
        self.moves = MovementDetector(np.arange(PLACES) * VALUES, numbers, np.full(PLACES, 1e-7, np.float32))
        self.values = self.noise(1.0)

    def noise(self, size: float) -> np.ndarray:
        return (size * self.random.standard_normal(PLACES * VALUES)).astype(np.float32)

    def step(self, beside: np.ndarray | float = 0.0, usual: float = 0.01) -> Movement:
        start, before = self.values, self.values + beside
        after = self.values = (before + self.noise(usual)).astype(np.float32)
        return self.moves.look(np.stack([start, before, after, after]), [BoundaryRows(0, 1, 2, 3)])

    def moving(self, change: np.ndarray) -> Movement:
        """Takes a step that is announced to the detector."""
        start, self.values = self.values, (self.values + change).astype(np.float32)
        return self.moves.look(np.stack([start, self.values]), [BoundaryRows(0, 0, 1, 1)])

    def adopt(self, change: np.ndarray | None = None, *, reset: bool = False) -> np.ndarray:
        before, change = self.values, self.noise(0.2) if change is None else change
        self.values = before + change
        self.moves.look(np.stack([before, self.values]), [Adoption(0, 1, self.fragments, reset)])
        return change


def test_three_undone_adoptions_are_enough_for_a_verdict():
    rows = Rows()
    for _ in range(10):
        assert rows.step() is Movement.FINE
    rows.adopt()
    assert rows.step() is Movement.FINE
    verdicts = []
    for _ in range(3):
        change = rows.adopt()
        undoing = rows.values - change
        verdicts.append(rows.moves.look(np.stack([rows.values, undoing]), [BoundaryRows(0, 0, 1, 1)]))
        rows.values = undoing
        assert rows.step() is Movement.FINE
    assert verdicts == [Movement.UNDONE, Movement.UNDONE, Movement.COPIES]


def test_a_step_back_of_unusual_size_is_no_reversal():
    rows = Rows()
    for _ in range(10):
        rows.step()
    for _ in range(3):
        change = rows.adopt()
        assert rows.moving(-1.3 * np.sign(change) * np.abs(change).mean()) is Movement.FINE, "as AdamW's first steps"


def test_a_step_back_is_no_reversal_if_all_steps_have_one_direction():
    rows = Rows()
    direction = rows.noise(0.01)
    for size in (1, 2, 0.5, 1, 3, 1, -1, 0.5, 2, 1):
        assert rows.moving(np.float32(size) * direction) is Movement.FINE
    for _ in range(3):
        rows.adopt(-6 * direction)
        assert rows.moving(np.float32(6) * direction) is Movement.FINE


def test_a_skipped_step_is_not_the_first_after_an_adoption():
    rows = Rows()
    for _ in range(10):
        rows.step()
    change = rows.adopt()
    assert rows.moving(np.zeros_like(change)) is Movement.FINE
    assert rows.moving(rows.noise(0.02) - change) is Movement.UNDONE


def test_adoptions_without_a_step_in_between_are_undone_together():
    rows = Rows()
    for _ in range(10):
        rows.step()
    first, second = rows.adopt(), rows.adopt()
    assert rows.moving(rows.noise(0.01) - first - second) is Movement.UNDONE
    rows.adopt()
    second = rows.adopt()
    assert rows.moving(rows.noise(0.01) - second) is Movement.UNDONE, "the copies were made in between"


def test_an_undone_fragment_is_found_among_others_that_hardly_moved():
    """Seed 3600001567: all fragments were reset to their anchors, and one of them was far from its anchor."""
    rows = Rows(fragments=4)
    for _ in range(10):
        rows.step()
    change = rows.noise(0.001)
    change[64:96] *= 60.0
    rows.adopt(change)
    assert rows.moving(rows.noise(0.01) - change) is Movement.UNDONE


def test_weights_loaded_after_each_reset_are_found_each_time():
    rows = Rows()
    for _ in range(10):
        rows.step()
    anchor = rows.values
    for _ in range(4):
        assert rows.step(beside=rows.noise(0.5)) is Movement.WRITTEN
        rows.adopt(anchor - rows.values, reset=True)


def test_a_projection_after_a_reset_is_no_write():
    """The run's values are outside the allowed set by 0.5 of a standard deviation. The program projects them back."""
    rows = Rows()
    for _ in range(10):
        rows.step()
    allowed, outside = rows.values, rows.noise(0.5)
    assert rows.step(beside=rows.noise(1.0)) is Movement.WRITTEN
    rows.adopt(allowed + outside - rows.values, reset=True)
    assert rows.step(beside=-outside) is Movement.FINE


def test_reversals_too_small_to_be_found_do_not_hide_larger_ones():
    rows = Rows()
    direction = rows.noise(1.0)
    for _ in range(10):
        rows.step()
    for _ in range(8):
        change = rows.adopt(0.035 * direction)
        rows.moving(rows.noise(0.01) - change)
    change = rows.adopt(0.06 * direction)
    assert rows.moving(rows.noise(0.01) - change) is Movement.UNDONE


def test_other_movements_count_as_work_up_to_eight_optimizer_steps():
    rows = Rows()
    for _ in range(10):
        rows.step()
    assert rows.step(rows.noise(0.05)) is Movement.FINE
    assert rows.step(rows.noise(0.15)) is Movement.WRITTEN


def test_a_projection_may_move_as_far_as_an_adoption():
    rows = Rows()
    for _ in range(10):
        rows.step()
    change = rows.adopt()
    assert rows.step(-0.5 * change) is Movement.FINE
    assert rows.step(-0.5 * change) is Movement.WRITTEN


def test_values_that_are_not_finite_are_left_to_take():
    rows = Rows()
    rows.step()
    assert rows.step(np.float32(np.nan)) is Movement.FINE
