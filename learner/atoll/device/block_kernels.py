"""Quantises and decodes rows of blocks with torch operations, bit-identical to the kernels of `atoll_wire.codec`.

Each row holds one block of 512 values. A shorter block is followed by zeros when it is quantised and by undefined
values when it is decoded. `levels` is the largest code, as in `atoll_wire.codec.block_kernels`.

Bit-identity needs operations that round as on a CPU. In eager mode, each call below is a kernel of its own, so no
product is fused with a sum. Float32 division and square roots are correctly rounded, and subnormal numbers are kept,
because torch is built without fast math. Two rules follow:

- No tensor is divided by a Python number, and no Python number by a tensor. On a GPU, torch multiplies by a reciprocal
  instead, which rounds twice. Constants in divisions are therefore tensors on the device.
- Only integers are summed, because the order of summation differs between devices.

Learners compute anchors and their checksums on the host. A device that rounds differently could therefore change the
codes of its own contributions, but not an anchor.
"""

from __future__ import annotations

import numpy as np
import torch
from atoll_wire.codec.block_kernels import INFINITY_BITS, LARGEST, SMALLEST_NORMAL_BITS
from atoll_wire.codec.quantising import EDGE, FINENESS, HALF, KEPT, SMALLER, SMALLEST, STEP
from atoll_wire.layout.frame_spans import BLOCK

MIDDLE = BLOCK // 2
ONE_BITS = 0x3F800000  # the bits of 1.0 as float32


def quantise(
    blocks: torch.Tensor, lengths: torch.Tensor | None, levels: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the codes, the scales, and whether all values are finite.

    blocks: float32 (blocks, 512), with zeros after the block's values. lengths: int64 (blocks,), number of values; None
    if all blocks are whole, which takes less work. The codes are uint8 (blocks, bytes of a whole block). The scales are
    int16 (blocks,), the bits of bfloat16. If a value is not finite, codes and scales are undefined.
    """
    bits = blocks.view(torch.int32).bitwise_and(0x7FFFFFFF).amax(1)  # the largest magnitude; NaN is above infinity
    finite = (bits < int(INFINITY_BITS)).all()
    if levels == 0:
        return blocks.view(torch.uint8), torch.zeros_like(bits, dtype=torch.int16), finite
    largest = bits.view(torch.float32)
    scale = _up(largest / _constant(127.0, blocks)) if levels == 127 else _near(_step(blocks, largest, lengths))
    coded = scale >= int(SMALLEST_NORMAL_BITS)
    divisor = torch.where(coded, scale, ONE_BITS).view(torch.float32)
    factor = torch.where(coded, _constant(1.0 if levels == 127 else SMALLER, blocks) / divisor, 0.0)
    # `round` takes the nearest integer, half to even, as the CPU kernels do.
    codes = (blocks * factor[:, None]).clamp_(-levels, levels).round_().to(torch.int8)
    packed = codes.view(torch.uint8)
    scales = (torch.where(coded, scale, 0) >> 16).to(torch.int16)
    return packed if levels == 127 else _pairs(packed, lengths), scales, finite


def decode(codes: torch.Tensor, scales: torch.Tensor, lengths: torch.Tensor | None, levels: int) -> torch.Tensor:
    """Returns scale x code, float32 (blocks, 512). The arguments are those that `quantise` returns and takes."""
    if levels == 0:
        return codes.view(torch.float32)
    signed = codes.view(torch.int8) if levels == 127 else _unpaired(codes, lengths)
    return scales.view(torch.bfloat16).float()[:, None] * signed.float()


def _constant(number: float | np.float32, like: torch.Tensor) -> torch.Tensor:
    """Returns a float32 tensor of shape (1,) on the device of `like`, for divisions."""
    return torch.full((1,), float(number), dtype=torch.float32, device=like.device)


def _step(blocks: torch.Tensor, largest: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Returns the unrounded scales of int4 blocks, float32 (blocks,)."""
    coded = largest >= float(SMALLEST)
    largest = torch.where(coded, largest, 1.0)
    fineness = _constant(FINENESS, blocks)
    fine = (blocks * (fineness / largest)[:, None]).to(torch.int32)
    square = fine.mul_(fine).sum(1, dtype=torch.int32)
    count = _constant(float(BLOCK), blocks) if lengths is None else lengths.float()
    rms = (square.float() / count).sqrt_() / fineness
    return torch.where(coded, largest * (rms * float(STEP)).clamp_(min=float(EDGE)), 0.0)


def _up(scale: torch.Tensor) -> torch.Tensor:
    """Returns the bits of scales rounded up to bfloat16: see `quantising`."""
    bits, kept = scale.view(torch.int32), -0x10000
    above = (bits + 0xFFFF) & kept
    return torch.where(above.view(torch.float32) > float(LARGEST / np.float32(127.0)), bits & kept, above)


def _near(scale: torch.Tensor) -> torch.Tensor:
    """Returns the bits of scales rounded to 5 significant bits: see `quantising`."""
    most, kept = float(LARGEST / np.float32(7.0)), int(KEPT) - (1 << 32)
    bits = scale.clamp(max=most).view(torch.int32)
    near = (bits + int(HALF)) & kept
    return torch.where(near.view(torch.float32) > most, bits & kept, near)


def _pairs(codes: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Returns int4 codes, with two per byte, uint8 (blocks, 256). codes: uint8 (blocks, 512), the bytes of int8
    codes."""
    if lengths is None:
        return codes[:, :MIDDLE] & 0xF | codes[:, MIDDLE:] << 4
    places = torch.arange(MIDDLE, device=codes.device) + ((lengths + 1) // 2)[:, None]
    high = codes.gather(1, places.clamp_(max=BLOCK - 1))
    return codes[:, :MIDDLE] & 0xF | high << 4


def _unpaired(pairs: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Returns the codes that `_pairs` packed, int8 (blocks, 512)."""
    nibbles = torch.cat([pairs & 0xF, pairs >> 4], 1)
    if lengths is not None:
        places, half = torch.arange(BLOCK, device=pairs.device), ((lengths + 1) // 2)[:, None]
        places = torch.where(places < half, places, places + MIDDLE - half).clamp_(max=BLOCK - 1)
        nibbles = nibbles.gather(1, places)
    return (nibbles ^ 8).view(torch.int8) - 8
