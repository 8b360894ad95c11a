"""An account of data units tells each broken rule."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.failures.data_units import Account

GOOD = Account(units=4, epochs=2, consumed=8, leased=0, returned=0, repeated=1.5, lost=0.5, merged=9.0, begun=10)


def test_an_account_without_faults():
    assert GOOD.faults() == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"consumed": 7, "returned": 1, "merged": 8.0}, "7 of 8 units are consumed, 0 leased, 1 returned"),
        ({"wrong": {2: 1, 0: 1}}, r"consumed N times: \{2: 1, 0: 1\}"),
        ({"foreign": [(0, 4)]}, r"the dataset lacks: \[\(0, 4\)\]"),
        ({"merged": 9.25}, "9.25 units of merged work, but 1.5 repeated and 0.5 lost"),
    ],
    ids=str,
)
def test_an_account_tells_each_broken_rule(change, told):
    (fault,) = replace(GOOD, **change).faults()
    assert re.search(told, fault)
