"""Ranks wait for a rank that cannot fetch, and follow a rank that has skipped versions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from atoll.agent.coordination import Leading
from atoll.agent.core_view import FragmentTrack
from atoll.agent.fetching import MAX_AHEAD, Fetcher
from atoll.fragments.adoption import Fate, PreparedAnchor
from atoll.fragments.exchange import ThreadExchange
from atoll.ranks.division import Owners, undivided
from atoll.stats import Counters
from atoll_wire import ranks_pb2 as rk
from atoll_wire.layout.layout import FRAME_PARAMETERS, MergeKind, TensorSpec, plan
from atoll_wire.process.clock import SYSTEM

LAYOUT = plan([TensorSpec("w", (2 * FRAME_PARAMETERS,), "float32", MergeKind.DIRECTION)], 0)
NOTHING = np.zeros(0, np.float32)


class Rank0:
    """Rank 0 of two ranks, and what it has told rank 1. begun: fragments that it has begun to fetch."""

    def __init__(self) -> None:
        self.told: list[rk.RankMessage] = []
        self.begun: list[int] = []
        self.exchange = ThreadExchange(SYSTEM)
        self.track = FragmentTrack(undivided(LAYOUT)[0].run, SimpleNamespace(), NOTHING, target=9)
        core = SimpleNamespace(track=lambda _: self.track, session=SimpleNamespace(generation=1))
        messages = SimpleNamespace(
            rank=0, size=2, send=lambda _, sent: self.told.append(rk.RankMessage.FromString(sent))
        )
        self.leading = Leading(messages, core, self.exchange, Counters())
        self.leading.begin_fetch = lambda track: self.begun.append(track.fragment)

    def part(self, version: int) -> None:
        """Receives rank 1's part of a version."""
        part = rk.Part(fragment=0, version=version, generation=1)
        self.leading.receive(rk.RankMessage(sender=1, part=part))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_prepares_only_a_few_versions_that_others_lack(ranks):
    exchange = ThreadExchange(SYSTEM)
    coordination = SimpleNamespace(owners=Owners(0, ranks))
    fetcher = Fetcher(
        SimpleNamespace(), exchange, Counters(), print, SimpleNamespace(), coordination, SimpleNamespace()
    )
    track = FragmentTrack(undivided(LAYOUT)[0].run, SimpleNamespace(), NOTHING, target=99, whole=False)
    while fetcher._may_fetch(track) and track.version < 10:
        track.version += 1
        exchange.offer(PreparedAnchor(0, track.version, NOTHING, Fate()), confirmed=ranks == 1)
    assert track.version == (10 if ranks == 1 else MAX_AHEAD)
    track.skipped_to = 12
    assert fetcher._may_fetch(track), "another rank cannot prepare the versions before"
    track.skipped_to = 0
    exchange.confirm(0, track.version, 0)
    assert fetcher._may_fetch(track), "the other rank has it"


def test_all_ranks_hear_of_a_rank_that_skipped_versions():
    """It fetched the whole fragment, so it will never prepare the versions between."""
    rank0 = Rank0()
    for version in (0, 1, 2):
        rank0.part(version)
    assert (rank0.told, rank0.begun) == ([], [])
    rank0.part(7)
    (message,) = rank0.told
    assert (message.announced.skipped_to, message.announced.version) == (7, 9)
    assert (rank0.track.skipped_to, rank0.begun) == (7, [0])
    rank0.part(8)
    assert len(rank0.told) == 1
