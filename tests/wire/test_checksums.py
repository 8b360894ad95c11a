"""The checksum of bytes that are stored in parts."""

from __future__ import annotations

import itertools

from atoll_wire.codec.checksums import crc32c, joined
from hypothesis import given
from hypothesis import strategies as st


def test_the_polynomial_is_that_of_crc_32c():
    assert crc32c(b"123456789") == 0xE3069283
    assert joined([(crc32c(b"1234"), 4), (crc32c(b"56789"), 5)]) == 0xE3069283


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=6))
def test_checksums_of_parts_give_that_of_the_whole(content, cuts):
    edges = sorted({0, len(content), *(min(cut, len(content)) for cut in cuts)})
    parts = [content[start:stop] for start, stop in itertools.pairwise(edges)] or [content]
    assert joined((crc32c(part), len(part)) for part in [*parts, b""]) == crc32c(content)


def test_lengths_of_whole_models_are_no_problem():
    zeros = bytes(1 << 20)
    before = crc32c(b"model")
    assert joined([(before, 5), (crc32c(zeros), len(zeros))]) == crc32c(zeros, before)
    assert joined([(before, 5), *[(crc32c(zeros), len(zeros))] * 4]) == crc32c(bytes(4 << 20), before)
