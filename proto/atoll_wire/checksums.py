"""The checksum of frames and vectors."""

from __future__ import annotations

from typing import TypeAlias

import crc32c as library

Payload: TypeAlias = bytes | bytearray | memoryview


def crc32c(data: Payload, before: int = 0) -> int:
    """CRC-32C of bytes that follow others with the CRC `before`."""
    return int(library.crc32c(data, before))
