"""The agent's view of the run, of each shard and of each fragment. All parts of the agent share it on one loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec.block_kernels import F32
from atoll_wire.connections.arrival_estimator import ArrivalEstimator
from atoll_wire.connections.link import Link
from atoll_wire.layout.layout import FrameRun, Layout
from atoll_wire.messages.frame_messages import EncodedFrame

from atoll.errors import NONSENSE, LearnerError
from atoll.fragments.exchange import Submission, ThreadExchange
from atoll.transfers.partial_fetch import PartialFetch

SHORTEST_WAIT_S, LONGEST_WAIT_S = 4.0, 60.0  # bounds on the wait for a silent shard; see ArrivalEstimator
KEPT = 1024  # limit on unreported declined rounds and on unreported adoptions


@dataclass(slots=True)
class InFlight:
    """A contribution whose fate is unknown.

    messages: this rank's frames as messages, by frame number. They are kept so that they can be sent again. table: the
    length and CRC-32C of each payload, from all ranks.
    """

    taken: Submission
    seq: int
    messages: Mapping[int, EncodedFrame] = field(default_factory=dict)
    table: tuple[tuple[int, int], ...] = ()
    session: pb.Session | None = None  # the session of the last upload
    acknowledged: bool = False
    asking: bool = False  # the learner is asking for the fate of an acknowledged contribution


@dataclass(slots=True, eq=False)
class FragmentTrack:
    """The agent's view of one fragment and of this rank's frames in it.

    version, anchor: the newest prepared version and its anchor. target: the newest version that the shard announced.
    """

    run: FrameRun
    shard: ShardView = field(repr=False)
    anchor: F32 = field(default_factory=lambda: np.empty(0, np.float32))
    version: int = 0
    target: int = 0
    whole: bool = True  # the next fetch must get the whole fragment
    drop: bool = False  # the next fetch drops the outstanding work
    ended: int = 0  # number of the newest contribution that ended without a merge
    merged: int = 0  # number of the newest contribution that was merged
    in_flight: InFlight | None = None
    fetching: asyncio.Task[None] | None = None
    copying: asyncio.Task[None] | None = None  # see Fetcher.opened
    incoming: PartialFetch | None = None  # frames of a running or interrupted fetch
    skipped_to: int = 0  # a rank has skipped versions up to this one, so all ranks may need it; too high after setbacks
    setbacks: int = 0  # number of restores from a backup or checkpoint that removed known versions
    restores: int = 0  # number of restores to a checkpoint since this learner began to train

    @property
    def fragment(self) -> int:
        """The fragment's number."""
        return self.run.fragment.index

    def behind(self) -> bool:
        """Returns whether a fetch is needed."""
        return self.whole or self.version < self.target

    def known(self) -> int:
        """Returns the newest version that the shard is known to have had."""
        return self.target if self.whole else max(self.version, self.target)

    def stands_at(self, version: int, known: int) -> None:
        """Records the shard's newest version after an outage. known: the newest version known before the outage."""
        if version >= known:
            self.target = max(self.target, version)
            return
        self.setbacks += 1
        self.whole |= version < self.version
        self.target = version


@dataclass(slots=True, eq=False)
class ShardView:
    """The agent's view of one shard.

    address: HOST:PORT, or empty for the address where the learner joined the run. link: the shard's own link. The first
    shard at the joining address uses the run's link instead. arrivals: estimates the time of the next notification.
    declined, adopted: declined rounds and adoptions that have not been reported yet.
    """

    address: str
    link: Link
    number: int = 0
    tracks: dict[int, FragmentTrack] = field(default_factory=dict)
    session: pb.Session = field(default_factory=pb.Session)
    log: int = 0  # `log` and `sequence` are the last notification's position
    sequence: int = 0
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)  # set when a call fails because the session is unknown
    arrivals: ArrivalEstimator = field(default_factory=lambda: ArrivalEstimator(SHORTEST_WAIT_S, LONGEST_WAIT_S))
    declined: deque[pb.Declined] = field(default_factory=lambda: deque(maxlen=KEPT))
    adopted: deque[pb.Adopted] = field(default_factory=lambda: deque(maxlen=KEPT))

    def joined(self, session: pb.Session) -> None:
        """Sets the session and lets calls to the shard begin."""
        self.session = session
        self.lost.clear()
        self.connected.set()

    def lose(self, session: pb.Session | None) -> None:
        """Records that the shard does not know this session. The learner joins again unless it has a newer session."""
        if session is self.session:
            self.connected.clear()
            self.lost.set()

    def track(self, fragment: int) -> FragmentTrack:
        """Returns a fragment's track. Raises LearnerError if the fragment is not in this shard."""
        if fragment not in self.tracks:
            raise LearnerError(
                f"the core sent fragment {fragment}, but this shard has {len(self.tracks)} other fragments: {NONSENSE}"
            )
        return self.tracks[fragment]

    def newest(self, versions: Mapping[int, int]) -> Iterator[tuple[FragmentTrack, int]]:
        """Yields each track with its fragment's version. Raises LearnerError unless `versions` contains all
        fragments."""
        if len(versions) != len(self.tracks):
            raise LearnerError(
                f"the core sent {len(versions)} versions, but this shard has {len(self.tracks)} fragments: {NONSENSE}"
            )
        return ((self.track(fragment), version) for fragment, version in sorted(versions.items()))


@dataclass(slots=True, eq=False)
class CoreView:
    """The agent's view of the run. link: the link to the address where the learner joins."""

    link: Link
    session: pb.Session = field(default_factory=pb.Session)
    settings: pb.RunSettings = field(default_factory=pb.RunSettings)
    layout: Layout | None = None
    shards: list[ShardView] = field(default_factory=list)
    tracks: dict[int, FragmentTrack] = field(default_factory=dict)  # tracks of all shards by fragment, in order
    said_goodbye: bool = False  # the learner will not join or follow again
    leaving: bool = False  # all connections are being closed

    def place(self, shards: Sequence[ShardView]) -> None:
        """Sets the run's shards. Calls that wait for a fragment's old shard continue at the new shard."""
        before = [shard for shard in self.shards if shard not in shards]
        self.shards = list(shards)
        for shard in shards:
            for fragment in shard.tracks:
                shard.tracks[fragment] = self.tracks.setdefault(fragment, shard.tracks[fragment])
                self.tracks[fragment].shard = shard
        self.tracks = dict(sorted(self.tracks.items()))
        for shard in before:
            shard.connected.set()

    def track(self, fragment: int) -> FragmentTrack:
        """Returns a fragment's track. Raises LearnerError if the run does not have this fragment."""
        if fragment not in self.tracks:
            raise LearnerError(
                f"the core sent fragment {fragment}, but the run has only {len(self.tracks)} fragments: {NONSENSE}"
            )
        return self.tracks[fragment]

    def connected(self) -> bool:
        """Returns whether every shard is connected."""
        return all(shard.connected.is_set() for shard in self.shards)

    def sort_answers(self, exchange: ThreadExchange) -> None:
        """Passes the step boundaries' declined rounds and adoptions to the shards of their fragments."""
        while exchange.declined:
            declined = exchange.declined.popleft()
            self.tracks[declined.fragment].shard.declined.append(declined)
        while exchange.adopted:
            adopted = exchange.adopted.popleft()
            self.tracks[adopted.fragment].shard.adopted.append(adopted)

    def near(self) -> list[ShardView]:
        """Returns the shards at the address where the learner joined the run."""
        return [shard for shard in self.shards if not shard.address]
