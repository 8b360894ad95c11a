"""Payloads are compressed unless a short link without a front is faster than the compressor."""

from __future__ import annotations

import time

import pytest
from atoll_wire.connections.link_speed import LOOK_S
from torch import nn

from tests.end_to_end.world import Core, Trainee, core, eventually, front

CODES = 0.5  # bytes per parameter of int4 without compression, excluding scales


def wide_model() -> nn.Module:
    """Returns a model of a million parameters, so that the kernel can measure a rate."""
    return nn.Sequential(nn.Embedding(32, 1024), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 32))


def bytes_per_parameter(it: Core) -> float:
    """Returns the size of the next contributions."""
    before = it.status()
    eventually(lambda: it.status().contributions.merged >= before.contributions.merged + 4)
    wire = it.status().wire
    return (wire.up - before.wire.up) / (wire.up_parameters - before.wire.up_parameters)


@pytest.mark.parametrize("through_a_front", [False, True])
def test_only_payloads_for_a_fast_link_to_the_core_are_not_compressed(tmp_path, through_a_front):
    over: list[bool] = []
    with core(tmp_path / "home") as it, front(tmp_path / "eu", it.address) as eu:
        trainee = Trainee(eu.address if through_a_front else it.address, "a", lambda _: bool(over), model=wide_model())
        trainee.start()
        eventually(lambda: it.status().contributions.merged > 4)
        size, ends = bytes_per_parameter(it), time.monotonic() + (2 if through_a_front else 15) * LOOK_S
        while size < CODES and time.monotonic() < ends:
            size = bytes_per_parameter(it)
        assert (size < CODES) == through_a_front, size
        over.append(True)
        trainee.done()
