"""Faults of learners with several ranks: a slow rank, a rank whose fetches fail, and a death between two uploads.

They have their own random stream, so that seeds without such faults do not change.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from atoll.ranks.division import owned_runs
from atoll_server.uploads.upload_state import UploadState
from atoll_server.uploads.uploads import Upload
from atoll_wire import outer_pb2 as pb

from tests.simulation.bookkeeping import shard_of
from tests.simulation.island import Island
from tests.simulation.loop import Process
from tests.simulation.network import Call

if TYPE_CHECKING:
    from tests.simulation.world import World

FAULTY = 0.4  # share of the seeds with such faults, if they have a learner with several ranks
SLOW, DIES, FAILS = 0.6, 0.9, 0.8  # share of these with each fault
LATEST_S = 10.0  # end of the storm, if no learner has died between two uploads
FAILING = 0.3  # share of fetches that fail, in seeds with failing fetches


class RankFaults:
    """The faults of one world, and its counts of what happens to learners with several ranks."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._rng = world, random.Random(f"{seed} rank faults")
        faulty = self._rng.random() < FAULTY
        self._slow, self._dies, self._fails = (self._rng.random() < each and faulty for each in (SLOW, DIES, FAILS))
        self._passed = self._rng.choice((0, 0, 1))  # number of chances to die that are left out
        self._first: dict[tuple[str, int, int, int], int] = {}  # contribution -> rank whose stream began first
        self._second: set[tuple[str, int, int, int]] = set()  # contributions with streams of two ranks
        world.network.began = self._began

    def plan_none(self) -> None:
        """Disables all faults of ranks."""
        self._slow = self._dies = self._fails = False

    def slow_rank(self, size: int) -> int | None:
        """Returns the slow rank of a starting learner, if it has one. size: its number of ranks."""
        return self._rng.randrange(size) if self._slow and size > 1 else None

    # ------------------------------------------------------------------------------ a death between two uploads

    def between_uploads(self, island: Island) -> bool:
        """Returns whether the core has all frames from one rank for a contribution, but not from another rank."""
        shard = shard_of(self._world.core)
        growing = shard.uploads._growing() if shard is not None and len(island.ranks) > 1 else []
        return any(self._is_of(upload, island) and self._is_between(upload, island) for upload in growing)

    def _is_of(self, upload: Upload, island: Island) -> bool:
        session = island.session
        joined = session is not None and island.layout is not None
        return joined and upload.key[:2] == (island.name, session.core.session.incarnation)

    def _is_between(self, upload: Upload, island: Island) -> bool:
        runs = owned_runs(upload.part.fragment, len(island.ranks))
        done = {all(span.index in upload.part.received for span in run.frames) for run in runs if run.frames}
        return len(done) > 1

    def awaited(self) -> bool:
        """Returns whether the storm must last longer, because a learner must still die."""
        several = any(len(island.ranks) > 1 and not island.leaving for island in self._world.islands.values())
        return self._dies and several and self._world.loop.now < LATEST_S

    def frames_came(self, upload: Upload) -> None:
        """Called after the core has written frames. May kill their learner between two ranks' uploads."""
        world, island = self._world, self._world.islands.get(upload.key.learner)
        if not (self._dies and world.stormy and island is not None and island.process.alive and not island.leaving):
            return
        if upload.state is not UploadState.GROWING or not self.between_uploads(island):
            return
        if self._passed:
            self._passed -= 1
            return
        self._dies = False
        world.counts["learner crashes"] += 1
        members = [rank.process for rank in island.ranks[1:]]
        island.process.kill()
        for call in [call for call in world.network.calls if call.learner in members]:
            call.cut(self._rng.uniform(0.0, 4.0))
        world.loop.after(self._rng.uniform(0.05, 2.0), world.start_island, island.name)

    # ------------------------------------------------------------------------------ streams

    def _began(self, call: Call) -> None:
        """Called when a call's first message reaches its server."""
        rank = rank_of(call.learner)
        if rank is None or not call.learner.alive:
            return
        if call.method == "Push":
            self._streams_began(call.first.header, rank)
        elif call.method == "Fetch":
            call.add_done_callback(self._fetch_ended)
            if self._fails and self._world.stormy and self._rng.random() < FAILING:
                self._world.loop.after(self._rng.uniform(0.0, 0.02), call.cut, 0.0)

    def _streams_began(self, header: pb.PushHeader, rank: int) -> None:
        key = (header.session.learner, header.session.incarnation, header.fragment, header.seq)
        first = self._first.setdefault(key, rank)
        if first != rank and key not in self._second:
            self._second.add(key)
            order = "in the ranks' order" if first < rank else "in another order"
            self._world.counts[f"uploads whose streams began {order}"] += 1

    def _fetch_ended(self, call: Call) -> None:
        self._world.counts["fetches of a rank that failed"] += call.lost and call.learner.alive


def rank_of(process: Process) -> int | None:
    """Returns the number of a process among the ranks of its learner, or None if it has no other ranks."""
    _, point, number = process.name.rpartition(".")
    return int(number) if point else None
