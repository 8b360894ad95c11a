"""What the agent knows of the core and of each fragment; its parts share it on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from atoll_wire import outer_pb2 as pb
from atoll_wire.blocks import F32
from atoll_wire.layout import Fragment, Layout
from atoll_wire.links import Link

from atoll.agent.partial_fetch import Incoming
from atoll.errors import NONSENSE, LearnerError
from atoll.fragments.exchange import Taken


@dataclass(slots=True)
class Flight:
    """A contribution until its fate is known.

    messages: its frames, kept to be sent again; table: length and CRC-32C of their payloads.
    """

    taken: Taken
    seq: int
    messages: tuple[bytes, ...] = ()
    table: tuple[tuple[int, int], ...] = ()
    session: pb.Session | None = None  # as it was last sent
    acknowledged: bool = False
    asking: bool = False  # what became of it, after it was acknowledged


@dataclass(slots=True)
class Line:
    """One fragment as the agent sees it. version, anchor: newest prepared; target: newest heard of."""

    fragment: int
    anchor: F32
    version: int = 0
    target: int = 0
    whole: bool = True  # the next fetch must be the fragment itself
    drop: bool = False  # ... and gives the outstanding work up
    seq: int = 0  # of the newest contribution
    flight: Flight | None = None
    fetching: asyncio.Task[None] | None = None
    incoming: Incoming | None = None  # what has come of the fetch that is under way, or was cut
    setbacks: int = 0  # how often the core came back with less than was known: from a backup, or a checkpoint
    restores: int = 0  # how often the run was restored to a checkpoint since training began here

    def behind(self) -> bool:
        """Whether there is something to fetch."""
        return self.whole or self.version < self.target


@dataclass(slots=True)
class Standing:
    """The core as it was last seen."""

    link: Link
    session: pb.Session = field(default_factory=pb.Session)
    settings: pb.RunSettings = field(default_factory=pb.RunSettings)
    layout: Layout | None = None
    lines: list[Line] = field(default_factory=list)
    log: int = 0  # position of the last happening
    sequence: int = 0
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)  # some call found the session or the core gone
    leaving: bool = False  # connections end for good

    def lose(self, session: pb.Session | None) -> None:
        """A call found this session gone: the learner joins again, unless it has a newer one by now."""
        if session is self.session:
            self.connected.clear()
            self.lost.set()

    def line(self, fragment: int) -> Line:
        """What is known of a fragment that the core speaks of. LearnerError when there is none of that number."""
        if fragment >= len(self.lines):
            raise LearnerError(f"the core speaks of fragment {fragment}, the run has {len(self.lines)}: {NONSENSE}")
        return self.lines[fragment]

    def newest(self, versions: Mapping[int, int]) -> Iterator[tuple[Line, int]]:
        """Each line with the version that the core has of it. LearnerError unless it is every fragment's."""
        if len(versions) != len(self.lines):
            raise LearnerError(f"the core has {len(versions)} fragments, the run {len(self.lines)}: {NONSENSE}")
        return ((self.line(fragment), version) for fragment, version in sorted(versions.items()))

    def fragment(self, index: int) -> Fragment:
        """The layout's fragment."""
        assert self.layout is not None, "a session comes with a layout"
        return self.layout.fragments[index]
