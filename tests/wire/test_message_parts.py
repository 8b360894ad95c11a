"""Messages in pieces are joined without change, with limited buffered bytes."""

from __future__ import annotations

import pytest
from atoll_wire import outer_pb2 as pb
from atoll_wire.messages.message_parts import MESSAGE_BYTES, PART_BYTES, MessageAssembler, split
from google.protobuf.message import DecodeError


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES, 3 * PART_BYTES + 77])
def test_a_message_is_joined_unchanged(size):
    message, pieces = bytes(range(256)) * (size // 256) + bytes(size % 256), MessageAssembler(4 * PART_BYTES)
    came = [pieces.take(sent) for sent in split(message)]
    assert came == [None] * (len(came) - 1) + [message]
    assert not pieces.waits
    assert pieces.take(b"next") == b"next", "the next message must follow"


def test_no_piece_exceeds_a_servers_limit():
    assert max(map(len, split(bytes(5 * PART_BYTES)))) <= MESSAGE_BYTES


@pytest.mark.parametrize("kind", [pb.JoinRequest, pb.PushRequest, pb.FetchReply])
def test_a_piece_matches_the_contract(kind):
    whole = bytes(2 * PART_BYTES + 9)
    said = [kind.FromString(piece) for piece in split(whole)]
    assert b"".join(each.part for each in said) == whole
    assert [each.more for each in said] == [True, True, False]
    assert all(len(each.ListFields()) == (2 if each.more else 1) for each in said)


def test_pieces_above_the_limit_are_refused_on_arrival():
    pieces, sent = MessageAssembler(2 * PART_BYTES), list(split(bytes(3 * PART_BYTES)))
    assert pieces.take(sent[0]) is None
    assert pieces.take(sent[1]) is None
    with pytest.raises(DecodeError, match="in total"):
        pieces.take(sent[2])


@pytest.mark.parametrize(
    "spoilt", [b"\x78\x01", b"\x78\x01\x72", b"\x78\x01\x72\x05abc", b"\x72\x00", b"\x72\x80\x80\x80\x80"]
)
def test_a_piece_in_another_form_is_refused(spoilt):
    with pytest.raises(DecodeError):
        MessageAssembler(PART_BYTES).take(spoilt)


def test_a_message_between_two_pieces_is_refused():
    pieces = MessageAssembler(3 * PART_BYTES)
    pieces.take(next(split(bytes(2 * PART_BYTES))))
    with pytest.raises(DecodeError, match="is missing"):
        pieces.take(b"\x0a\x00")
