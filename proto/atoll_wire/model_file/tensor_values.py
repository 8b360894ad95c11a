"""The values of tensors in safetensors files: their types, and conversions to and from float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll_wire.layout.tensor_header import Sink

FORMAT_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # trainable tensors have one of these types


def write_data(file: Sink, array: NDArray[Any]) -> None:
    """Appends one tensor's data in C order, in the array's own type."""
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def cast_float32(vector: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Converts a float32 vector to another type in FORMAT_NAME. Rounds to nearest even for bfloat16, as torch does."""
    if dtype == "F32":
        return vector.astype("<f4", copy=False)
    if dtype == "F16":
        with np.errstate(over="ignore"):  # values beyond the range of float16 become infinite, as in torch
            return vector.astype("<f2")
    assert dtype == "BF16", f"no trainable tensor has type {dtype}"
    bits = vector.view(np.uint32)
    rounded: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    rounded[np.isnan(vector)] = 0x7FC0
    return rounded
