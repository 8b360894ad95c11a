"""Writes a safetensors file one tensor at a time. The safetensors library needs all tensors in memory at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from atoll_wire.layout.tensor_header import write_header

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


def write(
    path: Path, tensors: Mapping[str, torch.Tensor], values: Iterable[torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file. Raises OSError if this fails.

    tensors: the tensors by name, of which only shape and dtype are used. values: their contiguous values in host
    memory, in the same order. metadata: entries of the file's header.
    """
    heads = [(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    with path.open("wb") as file:
        write_header(file, heads, metadata)
        for value in values:
            file.write(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
