"""PURE: sizes as users write them, such as 64GiB."""

from __future__ import annotations

import re

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_size(text: str) -> int:
    """Returns a size in bytes. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+)\s*([KMGT]iB|)\s*", text)
    if found is None:
        raise ValueError("not a size: give a whole number of bytes, KiB, MiB, GiB or TiB, such as 64GiB")
    return int(found[1]) * UNITS[found[2]]
