"""A fragment handled as two runs of its frames gives the same bytes as one run."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
from atoll.agent import sending
from atoll.fragments.adoption import Fate, PreparedAnchor, Track
from atoll.fragments.exchange import Submission
from atoll.fragments.segments import FragmentShape
from atoll.transfers.partial_fetch import PartialFetch
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import joined
from atoll_wire.connections.link_speed import LinkSpeed
from atoll_wire.layout import layout
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import FragmentLayout, FrameRun, MergeKind, TensorSpec
from atoll_wire.messages import frame_messages
from atoll_wire.process.clock import SYSTEM

SIZES = (700, 100, 20, 256, 3, 610)  # some tensors span several frames, some share one; sizes are odd
ROUNDS = 4


def fragment() -> FragmentLayout:
    with mock.patch.object(layout, "FRAME_PARAMETERS", 256):
        tensors = [TensorSpec(f"t{n}", (size,), "float32", MergeKind.DIRECTION) for n, size in enumerate(SIZES)]
        return layout.plan(tensors, 1).fragments[0]


FRAGMENT = fragment()
COUNT = len(FRAGMENT.frames)


@dataclass
class Owner:
    """The owner of a run of frames, with its track."""

    run: FrameRun
    track: Track


class Island:
    """A learner's values of the fragment, whose frames are divided among owners."""

    def __init__(self, kind: Codec, *counts: int) -> None:
        self._kind = kind
        self.values = np.zeros(FRAGMENT.length, np.float32)
        self.owners = []
        first = 0
        for count in counts:
            run = FRAGMENT.whole if count == COUNT else FRAGMENT.run(first, count)
            shape, anchor = FragmentShape.of(run, kind), np.zeros(run.length, np.float32)
            self.owners.append(Owner(run, Track(shape, 0, anchor, 0)))
            first += count

    def train(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.values += rng.standard_normal(FRAGMENT.length).astype(np.float32) * np.float32(0.01)

    def of(self, run: FrameRun) -> np.ndarray:
        return self.values[run.offset : run.offset + run.length]

    def take(self, steps: int) -> tuple[dict[int, bytes], list[tuple[int, int]], list[Fate]]:
        """Returns the sent frames, the table for the header's digest, and the fates to adopt once merged."""
        messages, table, fates = {}, [], []
        for owner in self.owners:
            values = self.of(owner.run).copy()
            outstanding = owner.track.take(lambda values=values: values, steps, steps)
            taken = Submission(0, 0, outstanding)
            mine, lengths = sending._messages(LinkSpeed(None, SYSTEM), taken, owner.run, compressed=True)
            messages |= {index: b"".join(frame.pieces) for index, frame in mine.items()}
            table += lengths
            fates.append(Fate(outstanding.coded))
        return messages, table, fates

    def adopt(self, header: pb.FetchHeader, payloads: list[bytes], fates: list[Fate], *, whole: bool) -> None:
        """Fetches each owner's frames. Their joint checksum must be the published one."""
        version, anchors = header.version, []
        for owner in self.owners:
            incoming = PartialFetch(owner.run, self._kind, 0 if whole else version)
            ask = incoming.next(version)
            assert ask is not None
            assert list(ask.frames) == [span.index for span in owner.run.frames]
            for index in ask.frames:
                incoming.took(header, pb.Frame(index=index, payload=payloads[index]))
            assert incoming.next(version) is None
            decoded = incoming.decoded(None if whole else owner.track.anchor)
            assert decoded is not None
            anchors.append((decoded.values, decoded.checksum))
        assert joined((checksum, anchor.nbytes) for anchor, checksum in anchors) == header.crc32c
        for owner, (anchor, _), fate in zip(self.owners, anchors, fates, strict=True):
            newer = PreparedAnchor(0, version, anchor, fate)
            self.of(owner.run)[:] += owner.track.change_to(newer)
            owner.track.adopt(newer, version, version, keep=True)

    def anchor(self) -> bytes:
        return b"".join(owner.track.anchor.tobytes() for owner in self.owners)

    def local(self) -> bytes:
        return self.values.tobytes()


@pytest.mark.parametrize("kind", Codec)
@pytest.mark.parametrize("first", range(1, COUNT))
def test_two_runs_of_frames_give_the_bytes_of_one(kind, first):
    one, two = Island(kind, COUNT), Island(kind, first, COUNT - first)
    published = np.zeros(FRAGMENT.length, np.float32)
    for version in range(1, ROUNDS + 1):
        for island in (one, two):
            island.train(version)
        (whole, table, fate), (parts, tables, fates) = one.take(version), two.take(version)
        assert parts == whole
        assert frame_codec.frames_digest(tables) == frame_codec.frames_digest(table)
        update = [bytes(each.payload) for n in range(COUNT) for each in frame_messages.push_request(whole[n])]
        before, published = published, np.empty_like(published)
        for span, payload in zip(FRAGMENT.frames, update, strict=True):
            frame_codec.content_advance(frame_codec.decompress(payload, span, kind), span, kind, before, published)
        header = pb.FetchHeader(version=version, codec=int(kind), crc32c=frame_codec.vector_crc32c(published))
        last = version == ROUNDS  # the owners fetch this version whole
        if last:
            header.codec = pb.CODEC_FLOAT32
            update = [frame_codec.encode_frame(published, span, Codec.FLOAT32) for span in FRAGMENT.frames]
        one.adopt(header, update, fate, whole=last)
        two.adopt(header, update, fates, whole=last)
        assert two.local() == one.local()
        assert two.anchor() == one.anchor() == published.tobytes()


@pytest.mark.parametrize(("first", "count"), [(0, 0), (-1, 2), (COUNT, 1), (1, COUNT)])
def test_a_run_has_only_frames_of_its_fragment(first, count):
    with pytest.raises(IndexError):
        FRAGMENT.run(first, count)
