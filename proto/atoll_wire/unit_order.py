"""PURE: the order in which a dataset's units are trained. Each process can compute it, and no process stores it.

The order of each epoch is a permutation of the units. A Feistel network over a power of four, keyed by
the seed and the epoch, computes it. A result that is not a unit goes through the network again, until it is one.
"""

from __future__ import annotations

import hashlib

ROUNDS = 6
MAX_UNITS = 1 << 40  # limit on the units of a dataset


def unit_at(position: int, units: int, seed: int, epoch: int) -> int:
    """Returns the unit at a position of an epoch's order.

    position: 0 to units - 1. Different positions have different units.

    >>> sorted(unit_at(position, 5, seed=1, epoch=0) for position in range(5))
    [0, 1, 2, 3, 4]
    """
    assert 0 <= position < units <= MAX_UNITS, f"position {position} of {units} units"
    half_bits = max(1, ((units - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    found = position
    while True:
        left, right = found >> half_bits, found & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mixed(right, number, seed, epoch) & mask)
        found = left << half_bits | right
        if found < units:
            return found


def _mixed(value: int, number: int, seed: int, epoch: int) -> int:
    data = b"".join(each.to_bytes(8, "little") for each in (value, number, seed, epoch))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
