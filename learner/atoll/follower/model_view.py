"""PURE: the follower's view of the run, of the addresses that serve it, and of each fragment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec.block_kernels import F32
from atoll_wire.layout.layout import FrameRun
from atoll_wire.model_file.model_file import RunId

from atoll.errors import NONSENSE, FollowerError
from atoll.follower.cuts import FragmentValues
from atoll.transfers.partial_fetch import PartialFetch


@dataclass(slots=True, eq=False)
class FollowedFragment:
    """The follower's view of one fragment. shard: the Upstream that serves it, which the retry loop reads.

    values: the newest verified version, or None. target: the newest announced version. floor: the lowest version that a
    consistent cut may contain, or None until the shard has announced a version. whole: whether the next fetch must get
    the whole fragment. restarts: number of times that the fragment's history may have changed. incoming: the unfinished
    fetch, or None.
    """

    run: FrameRun
    shard: Any
    values: FragmentValues | None = None
    target: int = 0
    floor: int | None = None
    whole: bool = True
    restarts: int = 0
    incoming: PartialFetch | None = None
    fetching: Any = None  # the running task

    @property
    def index(self) -> int:
        """The fragment's number."""
        return self.run.fragment.index

    @property
    def version(self) -> int:
        """The newest verified version, or 0 before the first."""
        return self.values.version if self.values is not None else 0

    @property
    def anchor(self) -> F32:
        """The newest verified values, float32 (run.length,), or an empty array before the first version."""
        return self.values.theta_pub if self.values is not None else np.empty(0, np.float32)

    def behind(self) -> bool:
        """Returns whether a fetch is needed."""
        return self.floor is not None and (self.whole or self.version < self.target)

    def ready(self) -> bool:
        """Returns whether the values may be part of a cut."""
        return self.values is not None and self.floor is not None and not self.whole and self.version >= self.floor

    def forget(self) -> None:
        """Drops the announcements and received frames, because the run has a new generation."""
        self.target, self.floor, self.whole, self.incoming = 0, None, True, None
        self.restarts += 1

    def announced(self, published: pb.PublishedVersion, *, new_log: bool) -> None:
        """Records an announced version. new_log: whether this is the first announcement by a new process.

        A new process of the shard may have been restored from a backup. It may then have a lower version, or other
        values at the same version.
        """
        if not new_log and self.floor is not None:
            self.target = max(self.target, published.version)
            return
        self.restarts += 1
        self.incoming = None
        self.target = self.floor = published.version
        if self.values is not None and self.version >= published.version:
            same = (self.version, self.values.checksum) == (published.version, published.crc32c)
            self.whole |= not same


@dataclass(slots=True, eq=False)
class ModelView:
    """The view of a run. fragments: by number. places: the fragments of each shard. logs: `log` in each shard's
    last reply. leaving: whether all connections are being closed."""

    run: RunId | None = None
    settings: pb.RunSettings = field(default_factory=pb.RunSettings)
    fragments: dict[int, FollowedFragment] = field(default_factory=dict)
    places: list[frozenset[int]] = field(default_factory=list)
    logs: dict[int, int] = field(default_factory=dict)
    leaving: bool = False

    def begins(self, run: RunId) -> None:
        """Sets the run. A new generation resets all fragments. Raises FollowerError if the server has another run."""
        if self.run is not None and self.run.run != run.run:
            text = f"the server now has run {run.run}, but this follower follows {self.run.run}"
            raise FollowerError(f"{text}: correct the server address, or create a new follower")
        if self.run is not None and self.run != run:
            self.logs.clear()
            for fragment in self.fragments.values():
                fragment.forget()
        self.run = run

    def heard(self, reply: pb.WatchReply) -> list[FollowedFragment]:
        """Records a Watch reply. Returns the fragments that it names. Raises FollowerError if the reply is invalid."""
        if reply.shard >= len(self.places):
            raise FollowerError(f"the server sent the unknown shard {reply.shard}: {NONSENSE}")
        new_log = self.logs.get(reply.shard) != reply.log
        named = {version.fragment: version for version in reply.versions}
        mine = self.places[reply.shard]
        if not named.keys() <= mine or (new_log and named.keys() != mine):
            raise FollowerError(f"the fragments in the server's reply are not those of the shard: {NONSENSE}")
        self.logs[reply.shard] = reply.log
        for index, version in named.items():
            self.fragments[index].announced(version, new_log=new_log)
        return [self.fragments[index] for index in named]
