"""PURE: what a link must carry, by the paper's own accounting, and with the bits that Atoll puts on the wire.

A step of T seconds is T/3 forward and 2T/3 backward. Data-parallel training hands its gradients to one first-in
first-out link in 128 buckets, evenly through the backward pass; between M data centres each carries 2 (1 - 1/M) times
the payload. The step lasts until the last bucket is through: what it waits is a stall.
"""

from __future__ import annotations

from dataclasses import dataclass

BUCKETS = 128
FORWARD = 1 / 3  # of a step
BF16_BITS = 16.0
INT4_BITS = 4.125  # a scale of 16 bits for 128 values: the paper's 0.43 of 1.7 Gbit/s
CODED_BITS = 3.15  # Atoll's int4 after zstd, scales and headers included (records/quality, records/demo)


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained. step_s: of compute alone."""

    parameters: float = 5e9
    step_s: float = 1.0


def exchange_factor(sites: int) -> float:
    """Payloads that an all-reduce of so many sites puts on each site's link, each way."""
    return 2 * (1 - 1 / sites)


def data_parallel_step_s(
    model: Model, bits_s: float, sites: int, bits: float = BF16_BITS, round_trip_s: float = 0.0
) -> float:
    """A step with its stall. round_trip_s: what the last bucket's exchange waits for signals to travel."""
    bucket_s = exchange_factor(sites) * model.parameters * bits / BUCKETS / bits_s
    free_at = 0.0
    for bucket in range(1, BUCKETS + 1):
        released = model.step_s * (FORWARD + (1 - FORWARD) * bucket / BUCKETS)
        free_at = max(free_at, released) + bucket_s
    return free_at + round_trip_s


def data_parallel_bits_s(model: Model, sites: int, utilisation: float, bits: float = BF16_BITS) -> float:
    """The link that leaves compute so much of the time."""
    first_s = model.step_s * (FORWARD + (1 - FORWARD) / BUCKETS)
    return exchange_factor(sites) * model.parameters * bits / (model.step_s / utilisation - first_s)


def decoupled_bits_s(model: Model, inner_steps: float, bits: float, spread: float = 1.0) -> float:
    """Each way of a learner's link: every parameter once in `inner_steps`.

    spread: steps that a fragment may take; above 1 the figure is that of one transfer, not of the link's mean.
    """
    return bits * model.parameters / (inner_steps * model.step_s) / spread
