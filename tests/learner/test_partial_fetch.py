"""A fetch over a repeatedly cut link, during merges, ends with exact values and fetches little twice."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from atoll.transfers.partial_fetch import MAX_UPDATES, PartialFetch, UnsoundError
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.layout import layout
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import FragmentLayout, MergeKind, TensorSpec
from hypothesis import given, settings
from hypothesis import strategies as st

FRAMES = 6


def fragment() -> FragmentLayout:
    with mock.patch.object(layout, "FRAME_PARAMETERS", 256):
        return layout.plan([TensorSpec("w", (FRAMES * 256,), "float32", MergeKind.DIRECTION)], 1).fragments[0]


FRAGMENT = fragment()


class Core:
    """A core that publishes versions of a fragment, and answers a fetch frame by frame.

    kept: number of kept updates.
    """

    def __init__(self, kept: int) -> None:
        self.kept, self.updates = kept, dict[int, list[bytes]]()
        self.published = [np.zeros(FRAGMENT.length, np.float32)]
        self.bytes_sent = 0
        self.merge()

    @property
    def version(self) -> int:
        return len(self.published) - 1

    def merge(self) -> None:
        """Makes the next version."""
        version, new = self.version + 1, self.published[-1].copy()
        change = np.random.default_rng(version).standard_normal(FRAGMENT.length).astype(np.float32)
        self.updates[version] = [frame_codec.encode_frame(change, span, Codec.INT4) for span in FRAGMENT.frames]
        for span, payload in zip(FRAGMENT.frames, self.updates[version], strict=True):
            frame_codec.decode_add(payload, span, Codec.INT4, np.ones(len(span.segments), np.float32), new)
        self.published.append(new)
        self.updates.pop(version - self.kept, None)

    def answer(self, incoming: PartialFetch, most: int, *, heard: bool = True) -> bool:
        """Sends at most `most` frames to the next request, then cuts the link.

        Returns whether the fetch is complete.
        """
        ask = incoming.next(self.version if heard else 0)
        if ask is None:
            return True
        if ask.version and ask.version not in self.updates:
            incoming.forget(ask.frames)
            return False
        version = ask.version or self.version
        kind = Codec.INT4 if ask.version else Codec.FLOAT32
        header = pb.FetchHeader(
            version=version, codec=int(kind), crc32c=frame_codec.vector_crc32c(self.published[version])
        )
        took = incoming.took if ask.version == incoming.version else incoming.took_update
        for index in ask.frames[:most]:
            whole = frame_codec.encode_frame(self.published[version], FRAGMENT.frames[index], Codec.FLOAT32)
            payload = self.updates[version][index] if ask.version else whole
            took(header, pb.Frame(index=index, payload=payload))
            self.bytes_sent += len(payload)
        return False

    def check(self, incoming: PartialFetch, base: np.ndarray | None) -> None:
        """Checks that the result is a published version."""
        decoded = incoming.decoded(base)
        assert decoded is not None
        np.testing.assert_array_equal(decoded.values, self.published[incoming.header.version])
        assert decoded.checksum == incoming.header.crc32c


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12), st.booleans()), max_size=30), st.integers(1, 12))
def test_a_whole_fragment_is_assembled_from_frames_of_many_versions(tries, kept):
    core = Core(kept)
    incoming = PartialFetch(FRAGMENT.whole, Codec.INT4, 0)
    for most, merges, heard in tries:
        if core.answer(incoming, most, heard=heard):
            break
        for _ in range(merges):
            core.merge()
    else:
        for _ in range(FRAMES * (MAX_UPDATES + 2)):
            if core.answer(incoming, 1):
                break
    assert incoming.next(0) is None
    core.check(incoming, None)


def test_received_frames_need_only_their_updates_after_a_merge():
    core = Core(kept=2)
    incoming = PartialFetch(FRAGMENT.whole, Codec.INT4, 0)
    core.answer(incoming, 4)
    core.merge()
    while not core.answer(incoming, FRAMES):
        pass
    core.check(incoming, None)
    whole = sum(len(frame_codec.encode_frame(core.published[-1], span, Codec.FLOAT32)) for span in FRAGMENT.frames)
    assert core.bytes_sent < 1.2 * whole, "only 4 of 6 frames may need an update"


def test_a_cut_fetch_of_an_update_continues():
    core = Core(kept=4)
    base = core.published[1]
    core.merge()
    incoming = PartialFetch(FRAGMENT.whole, Codec.INT4, 2)
    core.answer(incoming, 4)
    core.merge()
    assert incoming.next(3).frames == [4, 5]
    while not core.answer(incoming, FRAMES):
        pass
    assert incoming.size_bytes == sum(map(len, core.updates[2])), "each frame must be sent once"
    core.check(incoming, base)


def test_unrequested_data_is_not_accepted():
    update = PartialFetch(FRAGMENT.whole, Codec.INT4, 2)
    frame = pb.Frame(index=0, payload=b"x")
    for header in (pb.FetchHeader(version=3, codec=pb.CODEC_INT4), pb.FetchHeader(version=2, codec=pb.CODEC_FLOAT32)):
        with pytest.raises(UnsoundError):
            update.took(header, frame)
    whole = PartialFetch(FRAGMENT.whole, Codec.INT4, 0)
    whole.took(pb.FetchHeader(version=5, codec=pb.CODEC_FLOAT32), frame)
    assert whole.next(0).frames == [1, 2, 3, 4, 5]
    with pytest.raises(UnsoundError):  # the core was restored from a backup
        whole.took(pb.FetchHeader(version=4, codec=pb.CODEC_FLOAT32), pb.Frame(index=1, payload=b"x"))
    with pytest.raises(UnsoundError):
        whole.took_update(pb.FetchHeader(version=7, codec=pb.CODEC_INT4), frame)
