"""Frames that are written and parsed without protobuf match protobuf's encoding."""

from __future__ import annotations

import pytest
from atoll_wire import outer_pb2 as pb
from atoll_wire.messages import frame_messages
from atoll_wire.messages.frame_messages import WireFrame
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

KINDS = [(pb.PushRequest, frame_messages.push_request), (pb.FetchReply, frame_messages.fetch_reply)]
NUMBERS = st.one_of(st.integers(0, 300), st.integers(0, 2**28 - 1))


@pytest.mark.parametrize(("kind", "read"), KINDS)
@given(index=NUMBERS, crc=st.integers(1, 2**32 - 1), payload=st.binary(min_size=1, max_size=40_000))
def test_a_frame_is_the_message_that_protobuf_makes(kind, read, index, crc, payload):
    message = frame_messages.encode(index, crc, payload)
    assert message == kind(frames=[pb.Frame(index=index, crc32c=crc, payload=payload)]).SerializeToString()
    assert frame_messages.serialise(message) is message
    [found] = read(message)
    assert isinstance(found, WireFrame)
    assert (found.index, found.crc32c, bytes(found.payload)) == (index, crc, payload)
    assert found.payload.obj is message, "the payload must be a view, not a copy"


@pytest.mark.parametrize(
    "message", [b"\x0a\x00" + 100_000 * b"\x12\x00", 5_000_000 * b"\x08\x00", 5_000_000 * b"\x80", b"\x0b\x0c"]
)
def test_a_message_of_many_fields_is_refused_before_protobuf_makes_objects_of_them(message):
    with pytest.raises(DecodeError):
        frame_messages.push_request(message)


def test_a_join_of_more_tensors_than_there_may_be_is_refused_before_protobuf_makes_objects_of_them():
    with pytest.raises(DecodeError, match="tensors"):
        frame_messages.join_request(5_000_000 * b"\x32\x00")
    most = pb.JoinRequest(
        learner="a", tensors=[pb.Tensor(name=f"{n}", shape=[n, 300]) for n in range(frame_messages.TENSORS)]
    )
    assert frame_messages.join_request(most.SerializeToString()) == most


@pytest.mark.parametrize(("kind", "read"), KINDS)
@given(message=st.one_of(st.binary(max_size=60), st.binary(max_size=60).map(lambda rest: b"\x12" + rest)))
def test_other_bytes_are_read_as_protobuf_reads_them(kind, read, message):
    try:
        expected = kind.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            read(message)
        return
    try:
        found = read(message)
    except DecodeError as refused:
        assert "frames" in str(refused), "only messages with too many fields may be refused"
        return
    if isinstance(found, list):
        found = kind(frames=[pb.Frame(index=f.index, crc32c=f.crc32c, payload=bytes(f.payload)) for f in found])
    assert found.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


@given(cut=st.integers(0, 60), flips=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 7)), max_size=3))
def test_a_changed_frame_is_read_as_protobuf_reads_it(cut, flips):
    changed = bytearray(frame_messages.encode(70_000, 12345, bytes(range(48)))[: 61 - cut if cut < 20 else None])
    for at, bit in flips:
        if at < len(changed):
            changed[at] ^= 1 << bit
    test_other_bytes_are_read_as_protobuf_reads_them.hypothesis.inner_test(
        pb.PushRequest, frame_messages.push_request, bytes(changed)
    )


def test_fields_in_another_order_are_read_by_protobuf():
    payload = pb.Frame(payload=b"abc").SerializeToString() + pb.Frame(index=4, crc32c=9).SerializeToString()
    message = b"\x12" + bytes([len(payload)]) + payload
    found = frame_messages.push_request(message)
    assert isinstance(found, pb.PushRequest)
    [frame] = frame_messages.frames_in(found)
    assert (frame.index, frame.crc32c, frame.payload) == (4, 9, b"abc")


@pytest.mark.parametrize("count", range(1, frame_messages.FRAMES_PER_MESSAGE + 1))
def test_concatenated_frames_are_a_message(count):
    made = [pb.Frame(index=n, crc32c=7 + n, payload=bytes([n]) * n) for n in range(1, count + 1)]
    message = b"".join(frame_messages.encode(frame.index, frame.crc32c, frame.payload) for frame in made)
    assert message == pb.PushRequest(frames=made).SerializeToString()
    found = frame_messages.push_request(message)
    assert isinstance(found, list)
    told = [(frame.index, frame.crc32c, bytes(frame.payload)) for frame in frame_messages.frames_in(found)]
    assert told == [(frame.index, frame.crc32c, frame.payload) for frame in made]


def test_headers_are_protobuf_messages():
    header = pb.PushRequest(header=pb.PushHeader(fragment=3))
    assert frame_messages.push_request(frame_messages.serialise(header)) == header
