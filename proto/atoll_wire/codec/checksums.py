"""The checksum of frames and vectors: CRC-32C."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import crc32c as library

POLYNOMIAL = 0x82F63B78  # the polynomial of CRC-32C; bit 31 is the coefficient of 1, bit 30 that of x
ONE, X = 1 << 31, 1 << 30

Payload: TypeAlias = bytes | bytearray | memoryview


def crc32c(data: Payload, before: int = 0) -> int:
    """Returns the CRC-32C of bytes. before: the CRC-32C of the bytes that precede them."""
    return int(library.crc32c(data, before))


def crc32c_of(pieces: Iterable[Payload]) -> int:
    """Returns the CRC-32C of bytes in several pieces."""
    checksum = 0
    for piece in pieces:
        checksum = crc32c(piece, checksum)
    return checksum


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """Returns the CRC-32C of concatenated byte strings. parts: CRC-32C and length in bytes of each string."""
    whole = 0
    for checksum, size_bytes in parts:
        whole = _product(whole, _power_of_x(8 * size_bytes)) ^ checksum
    return whole


def _power_of_x(exponent: int) -> int:
    """Returns x**exponent modulo the CRC's polynomial. Appending `exponent` bits multiplies a CRC by this power."""
    power, square = ONE, X
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power


def _product(one: int, other: int) -> int:
    """Returns the product of two polynomials over GF(2), modulo the CRC's polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (POLYNOMIAL if other & 1 else 0)
    return product
