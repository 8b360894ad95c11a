"""The division of fragments among shards."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from atoll_wire.layout.layout import Layout, LayoutError, MergeKind, TensorSpec, plan
from atoll_wire.layout.sharding import divide


def layout_of(rows: list[int], fragments: int) -> Layout:
    tensors = [TensorSpec(f"t{n}", (each, 64), "float32", MergeKind.AVERAGE) for n, each in enumerate(rows)]
    return plan(tensors, fragments)


def uneven(lengths: list[int]) -> Any:
    """Returns an object that replaces a layout with fragments of these lengths."""
    return SimpleNamespace(fragments=[SimpleNamespace(index=n, length=each) for n, each in enumerate(lengths)])


def loads(layout: Any, shards: int) -> list[int]:
    return [sum(layout.fragments[index].length for index in owned) for owned in divide(layout, shards)]


@pytest.mark.parametrize("shards", range(1, 9))
def test_each_fragment_belongs_to_one_shard_and_no_shard_is_empty(shards):
    layout = layout_of([random.Random(shards).randrange(1, 400) for _ in range(30)], 8)
    assert len(layout.fragments) == 8
    divided = divide(layout, shards)
    assert sorted(index for owned in divided for index in owned) == list(range(8))
    assert len(divided) == shards
    assert all(owned == tuple(sorted(owned)) and owned for owned in divided)


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_shard_is_at_most_a_third_above_the_best(seed):
    rng = random.Random(seed)
    layout, shards = uneven([rng.randrange(1, 900) for _ in range(12)]), rng.randrange(2, 6)
    lengths = [each.length for each in layout.fragments]
    least = max(*lengths, -(-sum(lengths) // shards))  # a lower bound on the largest shard
    assert max(loads(layout, shards)) <= least * 4 / 3
    assert divide(layout, shards) == divide(uneven(lengths), shards)


def test_equal_fragments_are_divided_evenly():
    layout = layout_of([64] * 8, 8)
    assert len({each.length for each in layout.fragments}) == 1
    assert [len(owned) for owned in divide(layout, 3)] == [3, 3, 2]


@pytest.mark.parametrize("shards", [0, -1, 5])
def test_a_number_of_shards_that_leaves_one_empty_is_refused(shards):
    with pytest.raises(LayoutError, match=f"{shards} shards are too many for 4 fragments"):
        divide(layout_of([64] * 4, 4), shards)
