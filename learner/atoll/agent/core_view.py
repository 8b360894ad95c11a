"""What the agent knows of the run, of each shard, and of each fragment; its parts share it on one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec.block_kernels import F32
from atoll_wire.connections.arrival_estimator import ArrivalEstimator
from atoll_wire.connections.link import Link
from atoll_wire.layout.layout import FrameRun, Layout

from atoll.agent.partial_fetch import PartialFetch
from atoll.errors import NONSENSE, LearnerError
from atoll.fragments.exchange import Submission, ThreadExchange

SHORTEST_WAIT_S, LONGEST_WAIT_S = 4.0, 60.0  # with a shard that is silent; between them, by what was usual
KEPT = 1024  # declined rounds, and adoptions, that wait to be reported


@dataclass(slots=True)
class InFlight:
    """A contribution until its fate is known.

    messages: the run's frames by number, kept to be sent again; table: length and CRC-32C of the payloads.
    """

    taken: Submission
    seq: int
    messages: Mapping[int, bytes] = field(default_factory=dict)
    table: tuple[tuple[int, int], ...] = ()
    session: pb.Session | None = None  # as it was last sent
    acknowledged: bool = False
    asking: bool = False  # what became of it, after it was acknowledged


@dataclass(slots=True, eq=False)
class FragmentTrack:
    """The frames of one fragment that this learner owns, as the agent sees them.

    version, anchor: newest prepared; target: newest heard of.
    """

    run: FrameRun
    shard: ShardView = field(repr=False)
    anchor: F32 = field(default_factory=lambda: np.empty(0, np.float32))
    version: int = 0
    target: int = 0
    whole: bool = True  # the next fetch must be the fragment itself
    drop: bool = False  # ... and gives the outstanding work up
    seq: int = 0  # of the newest contribution
    in_flight: InFlight | None = None
    fetching: asyncio.Task[None] | None = None
    incoming: PartialFetch | None = None  # what has come of the fetch that is under way, or was cut
    setbacks: int = 0  # how often the shard came back with less than was known: from a backup, or a checkpoint
    restores: int = 0  # how often the run was restored to a checkpoint since training began here

    @property
    def fragment(self) -> int:
        """Its number."""
        return self.run.fragment.index

    def behind(self) -> bool:
        """Whether there is something to fetch."""
        return self.whole or self.version < self.target

    def known(self) -> int:
        """The newest version that the shard is known to have had."""
        return self.target if self.whole else max(self.version, self.target)

    def stands_at(self, version: int, known: int) -> None:
        """The shard tells its newest version after a break. known: what it is known to have had before the break."""
        if version >= known:
            self.target = max(self.target, version)
            return
        self.setbacks += 1
        self.whole |= version < self.version
        self.target = version


@dataclass(slots=True, eq=False)
class ShardView:
    """One shard as it was last seen.

    address: empty where the run was joined. link: its own; the first of the shards where the run was joined shares the
    run's. arrivals: of what happens, and of signs of life. declined, adopted: wait to be reported to it.
    """

    address: str
    link: Link
    number: int = 0
    tracks: dict[int, FragmentTrack] = field(default_factory=dict)
    session: pb.Session = field(default_factory=pb.Session)
    log: int = 0  # position of its last notification
    sequence: int = 0
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)  # some call found the session or the shard gone
    arrivals: ArrivalEstimator = field(default_factory=lambda: ArrivalEstimator(SHORTEST_WAIT_S, LONGEST_WAIT_S))
    declined: deque[pb.Declined] = field(default_factory=lambda: deque(maxlen=KEPT))
    adopted: deque[pb.Adopted] = field(default_factory=lambda: deque(maxlen=KEPT))

    def joined(self, session: pb.Session) -> None:
        """Calls may be made with this session."""
        self.session = session
        self.lost.clear()
        self.connected.set()

    def lose(self, session: pb.Session | None) -> None:
        """A call found this session gone: the learner joins again, unless it has a newer one by now."""
        if session is self.session:
            self.connected.clear()
            self.lost.set()

    def track(self, fragment: int) -> FragmentTrack:
        """What is known of a fragment that the shard speaks of. LearnerError when it is none of the shard's."""
        if fragment not in self.tracks:
            raise LearnerError(
                f"the core speaks of fragment {fragment}, this shard has {len(self.tracks)} others: {NONSENSE}"
            )
        return self.tracks[fragment]

    def newest(self, versions: Mapping[int, int]) -> Iterator[tuple[FragmentTrack, int]]:
        """Each track with the version that the shard has of it. LearnerError unless it is every fragment's."""
        if len(versions) != len(self.tracks):
            raise LearnerError(f"the core has {len(versions)} fragments, this shard {len(self.tracks)}: {NONSENSE}")
        return ((self.track(fragment), version) for fragment, version in sorted(versions.items()))


@dataclass(slots=True, eq=False)
class CoreView:
    """The run as it was last seen. link: where it was joined, or will be."""

    link: Link
    session: pb.Session = field(default_factory=pb.Session)
    settings: pb.RunSettings = field(default_factory=pb.RunSettings)
    layout: Layout | None = None
    shards: list[ShardView] = field(default_factory=list)
    tracks: dict[int, FragmentTrack] = field(default_factory=dict)  # of all shards, by fragment, ascending
    said_goodbye: bool = False  # nothing is joined or followed again
    leaving: bool = False  # connections end for good

    def place(self, shards: Sequence[ShardView]) -> None:
        """The run has these shards. What waits for another shard of a fragment goes on at the new one."""
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
        """What is known of a fragment that the core speaks of. LearnerError when there is none of that number."""
        if fragment not in self.tracks:
            raise LearnerError(f"the core speaks of fragment {fragment}, the run has {len(self.tracks)}: {NONSENSE}")
        return self.tracks[fragment]

    def connected(self) -> bool:
        """Whether every shard is there."""
        return all(shard.connected.is_set() for shard in self.shards)

    def sort_answers(self, exchange: ThreadExchange) -> None:
        """Gives each shard what step boundaries declined and adopted of its fragments."""
        while exchange.declined:
            declined = exchange.declined.popleft()
            self.tracks[declined.fragment].shard.declined.append(declined)
        while exchange.adopted:
            adopted = exchange.adopted.popleft()
            self.tracks[adopted.fragment].shard.adopted.append(adopted)

    def near(self) -> list[ShardView]:
        """Shards at the address where the run was joined."""
        return [shard for shard in self.shards if not shard.address]


def checked_places(places: Collection[pb.ShardPlace], fragments: int) -> None:
    """Raises LearnerError unless each fragment of the run is in exactly one shard, and each shard has some."""
    owned = sorted(fragment for place in places for fragment in place.fragments)
    if owned != list(range(fragments)) or not all(place.fragments for place in places):
        raise LearnerError(
            f"the core's {len(places)} shards do not have each of the run's {fragments} fragments once: {NONSENSE}"
        )
