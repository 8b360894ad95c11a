"""The state of one fragment, in the shard that owns the fragment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from atoll_wire import outer_pb2 as pb
from atoll_wire.layout import layout

from atoll_server.ledger.rows import ContributionRow
from atoll_server.merging.merge import FragmentState
from atoll_server.merging.norm_limit import NormLimiter
from atoll_server.rounds.round_state import RoundState
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.storage.spool import StoredPayload


@dataclass(frozen=True, slots=True)
class HeldContribution:
    """A pending contribution: its row in the ledger, and its payload."""

    row: ContributionRow
    stored: StoredPayload


@dataclass(slots=True, eq=False)
class Fragment:
    """One fragment. The event loop owns all state. Worker threads change arrays of `state` only while `lock` is held.

    place: layout of the fragment. state: the newest durable version. rounds: the rounds, changed only by the syncer.
    """

    place: layout.FragmentLayout
    state: FragmentState
    rounds: RoundState
    norms: NormLimiter
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held during a merge and during a snapshot's write
    held: dict[ContributionKey, HeldContribution] = field(default_factory=dict)  # contributions that wait for a merge
    refused: list[pb.Receipt] = field(default_factory=list)  # refusals to send with the next update
    published_at: float | None = None  # publication time of the newest version, in monotonic seconds
    fetched_by: set[bool] = field(default_factory=set)  # links that fetched the newest version; True: a fast one

    @property
    def index(self) -> int:
        return self.place.index

    @property
    def version(self) -> int:
        """The newest durable version."""
        return self.state.version
