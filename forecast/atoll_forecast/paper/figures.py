"""Figures of the paper and its announcement (arXiv 2604.21428; 23 April 2026), for comparison."""

from __future__ import annotations

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)

# Table 1: goodput in percent, with one failure per chip per year. dp: data-parallel, not elastic. Numeric keys: number
# of learners.
GOODPUT: dict[str, tuple[int, ...]] = {
    "dp": (72, 57, 38, 27, 18),
    "elastic": (88, 80, 69, 58, 40),
    "2": (94, 88, 80, 70, 54),
    "4": (96, 93, 89, 82, 73),
    "8": (98, 96, 94, 88, 80),
    "16": (99, 98, 96, 93, 86),
}

# Share of extra compute for half of the training -> training time relative to no extra compute.
SCAVENGING = {0.25: 0.90, 0.5: 0.83, 1.0: 0.75, 3.0: 0.62}
SCAVENGING_DATA_PARALLEL = {0.25: 1.07, 0.5: 1.09, 1.0: 1.02, 3.0: 0.80}

# Goodput of eight learners in percent: one is 18 % slower, and step times have 10 % jitter.
HARDWARE = {"K = 8": 84, "K = 1, no grace": 100, "K = 1": 100}

# Link rates in Gbit/s.
BANDWIDTH = {
    "data-parallel, two data centres": 104.0,
    "data-parallel, eight data centres": 198.0,
    "Decoupled, bf16": 1.7,
    "Decoupled, int4": 0.43,
    "Decoupled, int4, eight data centres": 0.84,
}
