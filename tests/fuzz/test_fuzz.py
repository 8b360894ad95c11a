"""The short form of fuzzing: hypothesis chooses the seeds. `make fuzz` is the long form."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.run import TARGETS
from tests.fuzz.watch import generator, in_time


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_gives_a_value_or_the_declared_error(name):
    target = TARGETS[name][0]()

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.integers(0, 1 << 48))
    def feed(seed: int) -> None:
        with in_time():
            target.one(generator(name, seed))

    feed()
    target.close()
