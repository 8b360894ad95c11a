"""The division of a run's fragments among its shards.

The division depends only on the layout and the number of shards, so every process computes the same one.
"""

from __future__ import annotations

from atoll_wire.layout.layout import Layout, LayoutError

MAX_SHARDS = 1024


def divide(layout: Layout, shards: int) -> tuple[tuple[int, ...], ...]:
    """Returns the fragments of each shard, in ascending order. Each shard gets at least one fragment.

    The largest fragment goes to the shard with the fewest parameters, then the next largest, and so on. The largest
    shard is then at most 4/3 of the optimum (Graham 1969). Raises LayoutError for more shards than fragments.
    """
    if not 1 <= shards <= len(layout.fragments):
        raise LayoutError(
            f"{shards} shards are too many for {len(layout.fragments)} fragments: use at most one shard per fragment"
        )
    owned: list[list[int]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for fragment in sorted(layout.fragments, key=lambda each: (-each.length, each.index)):
        emptiest = min(range(shards), key=lambda shard: (loads[shard], len(owned[shard]), shard))
        owned[emptiest].append(fragment.index)
        loads[emptiest] += fragment.length
    return tuple(tuple(sorted(each)) for each in owned)
