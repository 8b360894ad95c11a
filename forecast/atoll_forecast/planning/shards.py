"""PURE: the number of shards that a model needs, and what each shard's process needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll_server.memory_budget import needed_bytes
from atoll_wire.layout.sharding import MAX_SHARDS

SNAPSHOT_BYTES, INITIAL_BYTES = (
    4 * 12.0,
    4.0,
)  # bytes on disk per parameter: four snapshots, and the initial parameters' file
WAITING_BYTES = 0.5  # bytes on disk per parameter, learner and outer step of allowed staleness


@dataclass(frozen=True, slots=True)
class Sharding:
    """The division of a model among shards. share: part of the parameters in the largest shard.

    memory_bytes, disk_bytes: needs of the largest shard's process, which is also the registrar.
    """

    shards: int
    share: float
    memory_bytes: int
    disk_bytes: float


def sharding(parameters: float, fragments: int, limit_bytes: float, waiting_bytes: float) -> Sharding:
    """Returns the smallest number of shards for which each process needs at most `limit_bytes` of memory.

    If even one fragment per shard needs more, returns one shard per fragment. The fragments are assumed to be equally
    large. waiting_bytes: contributions that may wait on disk, in bytes per parameter.
    """
    most = min(fragments, MAX_SHARDS)

    def share(shards: int) -> float:
        return math.ceil(fragments / shards) / fragments

    fitting = (n for n in range(1, most + 1) if needed_bytes(share(n) * parameters) <= limit_bytes)
    shards = next(fitting, most)
    held = share(shards) * parameters
    disk_bytes = (SNAPSHOT_BYTES + waiting_bytes) * held + INITIAL_BYTES * parameters
    return Sharding(shards, share(shards), needed_bytes(held), disk_bytes)
