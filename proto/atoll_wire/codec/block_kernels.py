"""Loops over one block of values that share a scale, and views of memory at an address. Other kernels call them.

A code has at most 7 bits and a sign, and a scale has 8 significant bits, so scale x code is exact in float32. Adding
the product to an anchor rounds once on every machine, with or without a fused multiply-add. All learners therefore
compute bit-identical anchors.

`levels` is the largest code: 7 (two codes per byte) or 127 (one code per byte). 0 stands for float32 values without
codes. With two codes per byte, the low half of byte i in a block of n values contains the code of value i. The high
half contains the code of value i + (n + 1) // 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from atoll_wire.layout.frame_spans import BLOCK

P = ParamSpec("P")
R = TypeVar("R")

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
U8: TypeAlias = NDArray[np.uint8]

AHEAD, LINE = 2 * BLOCK, 16  # prefetch distance and cache line length, both in values
LANES = 64  # number of parallel sums: with a single sum, each addition would wait for the previous addition
INFINITY_BITS = np.uint32(0x7F800000)
SMALLEST_NORMAL_BITS = np.uint32(0x00800000)
LARGEST = np.float32(np.finfo(np.float32).max)


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that numba compiles on first use and caches on disk. The function releases the GIL.

    The function does not use fastmath. Functions named `warm_up` compile kernels in advance.
    """
    return cast("Callable[P, R]", numba.njit(nogil=True, cache=True, error_model="numpy")(function))


# ------------------------------------------------------------------------------------------------- bits and addresses


def _float_of(_typing: Any, _bits: Any) -> Any:  # noqa: ANN401 - numba's own protocol
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _bits_of(_typing: Any, _value: Any) -> Any:  # noqa: ANN401 - numba's own protocol
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def _as_pointer(_typing: Any, _address: Any) -> Any:  # noqa: ANN401 - numba's own protocol
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def _prefetch(_typing: Any, array: Any, _index: Any) -> Any:  # noqa: ANN401 - numba's own protocol
    declare: Any = cgutils.get_or_insert_function

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        at = builder.gep(context.make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]])
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = declare(builder.module, kind, "llvm.prefetch.p0i8")
        access, locality, cache = number(0), number(3), number(1)  # for reading; kept in all caches; data cache
        builder.call(function, [builder.bitcast(at, byte), access, locality, cache])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


float_of: Any = intrinsic(_float_of)  # uint32 -> the float32 with these bits
bits_of: Any = intrinsic(_bits_of)  # float32 -> its bits
_pointer: Any = intrinsic(_as_pointer)
_prefetch_one: Any = intrinsic(_prefetch)
_carray: Any = numba.carray  # type: ignore[attr-defined]


@kernel
def fetch_ahead(values: F32, at: int) -> None:
    """Prefetches the block after the next one while a kernel works on the current block.

    at: index of the current block's first value. A prefetch beyond the end of `values` is harmless.
    """
    for line in range(at + AHEAD, at + AHEAD + BLOCK, LINE):
        _prefetch_one(values, line)


@kernel
def floats_at(address: int, length: int) -> Any:  # noqa: ANN401 - an array of numba's
    """Returns a view of `length` float32 values at an address. The caller must keep the memory alive."""
    return _carray(_pointer(np.int64(address)), (length,), dtype=np.float32)


@kernel
def bytes_at(address: int, length: int) -> Any:  # noqa: ANN401 - an array of numba's
    """Returns a view of `length` bytes at an address (see `floats_at`)."""
    return _carray(_pointer(np.int64(address)), (length,), dtype=np.uint8)


@kernel
def scales_at(address: int, length: int) -> Any:  # noqa: ANN401 - an array of numba's
    """Returns a view of `length` scales at an address, as the bits of bfloat16 (see `floats_at`)."""
    return _carray(_pointer(np.int64(address)), (length,), dtype=np.uint16)


@kernel
def scale_of(bits: np.uint16) -> Any:  # noqa: ANN401 - a float32 of numba's
    """Returns a scale as float32. bits: the scale's bits as bfloat16."""
    return float_of(np.uint32(bits) << np.uint32(16))


@kernel
def coded_bytes(length: int, levels: int) -> int:
    """Returns the size of the codes in bytes.

    length: number of values in a block, or in a segment in which only the last block may have an odd length.
    """
    if levels == 7:
        return (length + 1) // 2
    return length if levels == 127 else 4 * length


# ------------------------------------------------------------------------------------------------- codes to values


# The compiler vectorises these loops only if codes are narrowed to 32 bits and slices have a known length.


@kernel
def _low(pair: np.uint8) -> Any:  # noqa: ANN401 - a float32 of numba's
    return np.float32(np.int32((np.int32(pair & 0xF) ^ 8) - 8))


@kernel
def _high(pair: np.uint8) -> Any:  # noqa: ANN401 - a float32 of numba's
    return np.float32(np.int32((np.int32(pair >> 4) ^ 8) - 8))


@kernel
def add_block(codes: U8, scale: np.float32, levels: int, out: F32) -> None:
    """out += scale x code, in place. out: float32, one value per code."""
    if levels == 127:
        for i in range(len(codes)):
            out[i] += scale * np.float32(np.int32(np.int8(codes[i])))
    else:
        low, high = out[: len(codes)], out[len(codes) :]
        for i in range(len(low)):
            low[i] += scale * _low(codes[i])
        for i in range(len(high)):
            high[i] += scale * _high(codes[i])


@kernel
def advance_block(base: F32, codes: U8, scale: np.float32, levels: int, out: F32) -> None:
    """out = base + scale x code. Each sum has a single rounding."""
    if levels == 127:
        for i in range(len(codes)):
            out[i] = base[i] + scale * np.float32(np.int32(np.int8(codes[i])))
    else:
        low = out[: len(codes)]
        high = out[len(codes) :]
        base_high = base[len(codes) :]
        for i in range(len(low)):
            low[i] = base[i] + scale * _low(codes[i])
        for i in range(len(high)):
            high[i] = base_high[i] + scale * _high(codes[i])


@kernel
def rebase_block(old: F32, new: F32, codes: U8, scale: np.float32, levels: int, local: F32) -> None:
    """local = new - (old - local - scale x code), in place. old, new: anchors."""
    if levels == 127:
        for i in range(len(codes)):
            local[i] = new[i] - (old[i] - local[i] - scale * np.float32(np.int32(np.int8(codes[i]))))
    else:
        half = len(codes)
        a = old[:half]
        b = new[:half]
        c = local[:half]
        for i in range(len(c)):
            c[i] = b[i] - (a[i] - c[i] - scale * _low(codes[i]))
        a = old[half:]
        b = new[half:]
        c = local[half:]
        for i in range(len(c)):
            c[i] = b[i] - (a[i] - c[i] - scale * _high(codes[i]))


# ------------------------------------------------------------------------------------------------- sums of squares


@kernel
def square_of_codes(codes: U8, levels: int, length: int) -> int:
    """Returns the sum of squares of a block's codes, or -1 if a code is out of range or padding is not zero.

    levels: 7 or 127.
    """
    return _square_of_bytes(codes) if levels == 127 else _square_of_pairs(codes, length)


@kernel
def _square_of_bytes(block: U8) -> int:
    square, lowest = np.int32(0), np.int32(0)
    for i in range(len(block)):
        code = np.int32(np.int8(block[i]))
        lowest = min(lowest, code)
        square += np.int32(code * code)
    return -1 if lowest == -128 else int(square)


@kernel
def _square_of_pairs(block: U8, length: int) -> int:
    square, lowest = np.int32(0), np.int32(0)
    for i in range(len(block)):
        low = np.int32((np.int32(block[i] & 0xF) ^ 8) - 8)
        high = np.int32((np.int32(block[i] >> 4) ^ 8) - 8)
        lowest = min(lowest, low, high)
        square += np.int32(low * low + high * high)
    padded = length % 2 == 1 and block[len(block) - 1] >> 4 != 0
    return -1 if lowest == -8 or padded else int(square)


@kernel
def add_squares(values: F32, sums: F64) -> None:
    """Adds the square of value i to sum i modulo LANES, in float64.

    sums: float64 (LANES,), changed in place.
    """
    whole = len(values) // LANES * LANES
    for start in range(0, whole, LANES):
        part = values[start : start + LANES]
        for i in range(LANES):
            sums[i] += np.float64(part[i]) * np.float64(part[i])
    for i in range(whole, len(values)):
        sums[i - whole] += np.float64(values[i]) * np.float64(values[i])


@kernel
def total(sums: F64) -> float:
    """Returns the total of LANES sums, added in order."""
    found = 0.0
    for i in range(LANES):
        found += sums[i]
    return found
