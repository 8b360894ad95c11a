"""PURE: the number of shards that a model needs, and what each shard's process needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll_server.memory_budget import needed_bytes
from atoll_wire.layout.sharding import MAX_SHARDS

# Bytes on disk per parameter
SNAPSHOT_BYTES = 12.0
SNAPSHOTS = 4  # --keep-snapshots, and one being written
FREE_BYTES = 12.0  # a core with less free space accepts no contributions
INITIAL_BYTES = 4.0  # size of the initial parameters' file
WAITING_BYTES = 0.5  # size of a waiting contribution; also per learner and per outer step of allowed staleness
BACKUPS = 4  # --keep of `atoll checkpoint backup`, and one being written
SHARD_SNAPSHOTS = 3  # snapshots in a backup, if the run has several shards
BACKUP_MEMORY = 20.0  # bytes of memory per parameter of the largest fragment, for `atoll checkpoint backup`
BACKUP_PROCESS = 512 << 20  # bytes of memory of a backup's process, without a fragment


@dataclass(frozen=True, slots=True)
class Sharding:
    """The division of a model among shards. share: part of the parameters in the largest shard.

    memory_bytes, disk_bytes: needs of the largest shard's process, which is also the registrar. backup_bytes: disk
    space for the backups of that shard.
    """

    shards: int
    share: float
    memory_bytes: int
    disk_bytes: float
    backup_bytes: float


def disk_bytes(held: float, parameters: float, waiting_bytes: float) -> float:
    """Returns the size of a core's volume. The planner's table and the chart's values both use it.

    held: number of parameters in the core's fragments. parameters: number of parameters of the whole run, whose initial
    file the registrar stores. waiting_bytes: contributions that may wait on disk, in bytes per parameter.
    """
    return (SNAPSHOTS * SNAPSHOT_BYTES + FREE_BYTES + waiting_bytes) * held + INITIAL_BYTES * parameters


def backup_bytes(held: float, parameters: float, waiting_bytes: float, *, shards: int) -> float:
    """Returns the size of a volume for a core's backups, which share only the initial parameters' file.

    held, parameters, waiting_bytes: as in `disk_bytes`. shards: the run's number of shards.
    """
    snapshots = 1 if shards == 1 else SHARD_SNAPSHOTS
    return BACKUPS * (snapshots * SNAPSHOT_BYTES + waiting_bytes) * held + INITIAL_BYTES * parameters


def backup_memory(parameters: float, fragments: int) -> float:
    """Returns the memory in bytes of a process that takes backups, which checks one fragment at a time."""
    return BACKUP_PROCESS + BACKUP_MEMORY * parameters / fragments


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
    disk = disk_bytes(held, parameters, waiting_bytes)
    backups = backup_bytes(held, parameters, waiting_bytes, shards=shards)
    return Sharding(shards, share(shards), needed_bytes(held), disk, backups)
