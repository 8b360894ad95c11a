"""Streamed safetensors files match the library's. Malformed files are refused."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
from atoll_server.checkpoints.tensor_file import open_tensors
from atoll_wire.layout.tensor_header import TensorFileError, write_header
from atoll_wire.model_file.tensor_values import cast_float32, write_data
from safetensors.torch import load_file, save_file

TENSORS = {
    "a": torch.randn(3, 4),
    "b": torch.randn(7).to(torch.bfloat16),
    "c": torch.randn(2, 2).to(torch.float16),
    "d": torch.arange(5),
    "e": torch.tensor(True),
    "f": torch.empty(0, 3),
}


def test_the_library_can_read_written_files(tmp_path):
    path = tmp_path / "ours.safetensors"
    heads = [("x", "F32", (2, 3)), ("y", "BF16", (4,)), ("z", "F32", ())]
    values = np.random.default_rng(0).standard_normal(11).astype(np.float32)
    with path.open("wb") as file:
        size = write_header(file, heads, {"format": "pt"})
        for (_, dtype, _), part in zip(heads, (values[:6], values[6:10], values[10:]), strict=True):
            write_data(file, cast_float32(part, dtype))
    assert path.stat().st_size == size
    loaded = load_file(path)
    assert torch.equal(loaded["x"], torch.from_numpy(values[:6]).view(2, 3))
    assert torch.equal(loaded["y"], torch.from_numpy(values[6:10]).to(torch.bfloat16))
    assert loaded["z"].shape == ()


def test_files_of_the_library_can_be_read(tmp_path):
    save_file(TENSORS, tmp_path / "theirs.safetensors", {"note": "hello"})
    found = open_tensors(tmp_path / "theirs.safetensors")
    assert found.metadata == {"note": "hello"}
    assert {name: entry.shape for name, entry in found.entries.items()} == {
        n: tuple(t.shape) for n, t in TENSORS.items()
    }
    for name in "abc":
        assert np.array_equal(found.float32(name), TENSORS[name].float().flatten().numpy())
    assert found.raw("d").tobytes() == TENSORS["d"].numpy().tobytes()
    with pytest.raises(TensorFileError, match='"d" has type I64'):
        found.float32("d")


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_narrow_types_round_as_torch_does(dtype):
    values = torch.cat((torch.randn(10_000), torch.tensor([0.0, -0.0, 1e-40, 3.4e38, torch.inf, -torch.inf])))
    wanted = values.to({"BF16": torch.bfloat16, "F16": torch.float16}[dtype])
    assert cast_float32(values.numpy(), dtype).tobytes() == wanted.view(torch.int16).numpy().tobytes()


def _file(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 60) + b"{}",
        _file(b"not json"),
        _file([1, 2]),
        _file({"a": 5}),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}),  # the data is missing
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
        _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, bytes(4)),
        _file({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, bytes(4)),
        _file(b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}', bytes(4)),
        _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}, bytes(4)),
        _file({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        _file(b'{"a": ' + b"[" * 200_000),  # deeper than the parser's stack
        _file(b'{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 0]}}' % b",".join([b"9" * 4000] * 1000)),
        _file(b'{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 0]}}' % b",".join([b"-" + b"9" * 4000] * 99)),
        _file({"a": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}}, bytes(4)),
        _file({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, bytes(4)),  # they overlap
    ],
    ids=range(18),
)
def test_an_invalid_file_is_refused(tmp_path, content):
    (tmp_path / "odd").write_bytes(content)
    with pytest.raises(TensorFileError, match="is not a safetensors file"):
        open_tensors(tmp_path / "odd")
