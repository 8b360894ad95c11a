"""The order of units is a permutation, differs between seeds and epochs, and never changes between versions."""

from __future__ import annotations

import doctest

import pytest
from atoll_wire import unit_order
from atoll_wire.unit_order import unit_at
from hypothesis import given, settings
from hypothesis import strategies as st


@given(st.integers(1, 700), st.integers(0, 2**64 - 1), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_each_unit_has_one_position(units, seed, epoch):
    assert sorted(unit_at(each, units, seed, epoch) for each in range(units)) == list(range(units))


def test_epochs_and_seeds_have_different_orders():
    orders = [tuple(unit_at(each, 1000, seed, epoch) for each in range(50)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert all(order != tuple(sorted(order)) for order in orders)


@pytest.mark.parametrize(
    ("units", "first"), [(10, [8, 3, 1, 6]), (10**9, [679422667, 927662952, 576450703, 342423954])]
)
def test_a_resumed_run_has_the_same_order(units, first):
    """Values from the first version. Another order would repeat units that older versions handed out."""
    assert [unit_at(each, units, seed=7, epoch=2) for each in range(4)] == first


def test_the_example_is_correct():
    assert doctest.testmod(unit_order).failed == 0
