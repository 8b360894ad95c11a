"""Threads of a simulated learner's ranks take turns in the same order each time."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from tests.simulation.ranks import Hub, SimulatedRanks


def test_the_lowest_rank_that_need_not_wait_has_the_next_turn():
    hub, told = Hub(3), []

    def call(rank: int) -> None:
        time.sleep(0.01 * (rank == 0))  # others would overtake it if they did not wait for their turns
        told.append((rank, "gives"))
        answer = SimulatedRanks(hub, rank).exchange(np.ones(3, np.float32), [1, 1, 1], [1, 1, 1])()
        told.append((rank, "has"))
        assert list(answer) == [1.0, 1.0, 1.0]

    hub.together([partial(call, rank) for rank in range(3)])
    assert told == [(0, "gives"), (1, "gives"), (2, "gives"), (2, "has"), (0, "has"), (1, "has")]
