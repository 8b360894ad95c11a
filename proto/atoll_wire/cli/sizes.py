"""PURE: sizes and counts as users write them, such as 64GiB and 12B."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
DECIMAL_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Returns a size in bytes, such as 1.5GiB or 500MB. Raises ValueError."""
    wrong = "not a size: give bytes, or KiB, MiB, GiB, TiB, kB, MB, GB or TB, such as 64GiB"
    return _parsed(text, UNITS | DECIMAL_UNITS, wrong)


def parse_count(text: str) -> int:
    """Returns a count, such as 12B (12 billion) or 5e9. Raises ValueError."""
    return _parsed(text, COUNT_UNITS, "not a count: give a number, or K, M, B or T for a power of 1,000, such as 12B")


def _parsed(text: str, units: Mapping[str, int], wrong: str) -> int:
    found = NUMBER.fullmatch(text)
    if found is None or found[2] not in units:
        raise ValueError(wrong)
    return int(Fraction(found[1]) * units[found[2]])


def shortest(value: int, units: Mapping[str, int]) -> str:
    """Returns a value in the largest unit in which it is a whole number. units: sizes by name, smallest first."""
    name = next(
        name for name, size in reversed(list(units.items())) if not name or (value >= size and value % size == 0)
    )
    return f"{value // units[name]}{name}"
