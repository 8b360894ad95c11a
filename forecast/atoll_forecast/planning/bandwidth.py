"""PURE: computes the rate that a link must carry, by the paper's accounting, for the paper's or Atoll's codec.

A step of T seconds consists of a forward pass of T/3 and a backward pass of 2T/3. Data-parallel training sends
gradients in 128 buckets, evenly during the backward pass, over one first-in first-out link. Between M data centres,
each link carries 2 (1 - 1/M) times the payload. The step ends with the last bucket. The wait for that bucket is a
stall.
"""

from __future__ import annotations

from dataclasses import dataclass

BUCKETS = 128
FORWARD = 1 / 3  # share of a step
BF16_BITS = 16.0
INT4_BITS = 4.125  # with a 16-bit scale per 128 values: the paper's 0.43 Gbit/s instead of 1.7
CODED_BITS = 3.15  # bits per parameter of Atoll's int4 after zstd, with headers (records/quality, records/demo)


@dataclass(frozen=True, slots=True)
class Model:
    """A model and its compute. step_s: duration of one step's compute in seconds."""

    parameters: float = 5e9
    step_s: float = 1.0


def exchange_factor(sites: int) -> float:
    """Returns the bytes that an all-reduce sends over each site's link, each way, as a multiple of the payload."""
    return 2 * (1 - 1 / sites)


def data_parallel_step_s(
    model: Model, bits_s: float, sites: int, bits: float = BF16_BITS, round_trip_s: float = 0.0
) -> float:
    """Returns the duration of a step with its stall, in seconds.

    bits: bits per parameter. round_trip_s: latency of the last bucket's exchange.
    """
    bucket_s = exchange_factor(sites) * model.parameters * bits / BUCKETS / bits_s
    free_at = 0.0
    for bucket in range(1, BUCKETS + 1):
        released = model.step_s * (FORWARD + (1 - FORWARD) * bucket / BUCKETS)
        free_at = max(free_at, released) + bucket_s
    return free_at + round_trip_s


def data_parallel_bits_s(model: Model, sites: int, utilisation: float, bits: float = BF16_BITS) -> float:
    """Returns the link rate, in bits per second, that allows this utilisation. bits: bits per parameter."""
    first_s = model.step_s * (FORWARD + (1 - FORWARD) / BUCKETS)
    return exchange_factor(sites) * model.parameters * bits / (model.step_s / utilisation - first_s)


def decoupled_bits_s(model: Model, inner_steps: float, bits: float, spread: float = 1.0) -> float:
    """Returns the rate of a learner's link, in bits per second each way.

    Every parameter is sent once per `inner_steps`. bits: bits per parameter. spread: steps that a fragment's transfer
    may take. If `spread` is above 1, transfers overlap, and the result is the rate of one transfer, not the mean rate.
    """
    return bits * model.parameters / (inner_steps * model.step_s) / spread
