"""The stream of a file becomes a folder that the safetensors library reads, or leaves no files."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from atoll_server.cli import export_target as export_targets
from atoll_server.cli.export_target import ExportError, export_target
from atoll_wire.layout.tensor_header import TensorFileError, header_bytes
from safetensors import safe_open
from safetensors.torch import load_file, save_file

SHAPES = [(40, 16), (7,), (), (0, 3), (300, 3), (5, 5, 5), (2,), (64,), (64,)]  # (300, 3) is larger than most limits
METADATA = {"format": "pt", "atoll.versions": "3,4", "atoll.initial": '["t1"]'}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Returns a file with all kinds of tensors."""
    torch.manual_seed(0)
    types = (torch.float32, torch.bfloat16, torch.float16)
    tensors = {f"t{i}": torch.randn(shape).to(types[i % 3]) for i, shape in enumerate(SHAPES)} | {"n": torch.arange(9)}
    save_file(tensors, tmp_path / "whole.safetensors", METADATA)
    return tmp_path / "whole.safetensors"


def pieces(content: bytes, seed: int) -> Iterator[bytes]:
    rng, at = random.Random(seed), 0
    while at < len(content):
        step = rng.choice((1, 3, 8, 100, 1 << 20))
        yield content[at : at + step]
        at += step


def split(content: bytes, out: Path, limit: int, seed: int = 0) -> None:
    with export_target(out, limit) as target:
        for piece in pieces(content, seed):
            target.write(piece)


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Loads a folder like transformers: each file in the index, then each tensor from its file."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    assert sum(len(tensors) for tensors in files.values()) == len(index["weight_map"])
    tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(each.numel() * each.element_size() for each in tensors.values())
    return tensors


@pytest.mark.parametrize("limit", [1, 700, 1500, 3000, 1 << 20])
def test_a_folder_has_the_same_tensors_in_files_within_the_limit(tmp_path, whole, limit):
    split(whole.read_bytes(), tmp_path / "folder", limit, seed=limit)
    wanted, found = load_file(whole), load_folder(tmp_path / "folder")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor), name
    files = sorted((tmp_path / "folder").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == METADATA
            assert file.stat().st_size <= limit or len(opened.keys()) == 1
    assert len(files) == {1: len(wanted), 1 << 20: 1}.get(limit, len(files))
    assert not (tmp_path / "folder.part").exists()


def stream(heads: list[tuple[str, str, tuple[int, ...]]], data: bytes, old: bytes = b"", new: bytes = b"") -> bytes:
    text = header_bytes(heads)[0][8:]
    assert old in text
    text = text.replace(old, new, 1) if old else text
    return struct.pack("<Q", len(text)) + text + data


TWO = [("a", "F32", (2,)), ("b", "F32", (2,))]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it ends too early"),
        (b"short", "it ends too early"),
        (struct.pack("<Q", 1 << 60) + b"{}", "its header has the invalid length"),
        (struct.pack("<Q", 50) + b"{}", "it ends too early"),
        (struct.pack("<Q", 4) + b"[[[[", "Expecting value"),
        (stream(TWO, bytes(15)), "it ends too early"),
        (stream(TWO, bytes(17)), "it continues after the last tensor"),
        (stream([], b"x"), "it continues after the last tensor"),
        (stream(TWO, bytes(24), b"[8,16]", b"[9,17]"), "overlap or have gaps"),
        (stream(TWO, bytes(16), b"[8,16]", b"[0,8]"), "overlap or have gaps"),
        (stream(TWO, bytes(16), b"[0,8]", b"[1,8]"), "cannot have the offsets"),
        (struct.pack("<Q", 23) + b'{"__metadata__":{"a":1}}'[:23], "delimiter"),
        (struct.pack("<Q", 24) + b'{"__metadata__":{"a":1}}', "metadata is not text"),
        (struct.pack("<Q", 18) + b'{"__metadata__":7}', "metadata is not text"),
    ],
    ids=range(14),
)
def test_an_invalid_stream_is_refused_and_leaves_no_files(tmp_path, content, said):
    with pytest.raises(TensorFileError, match="the core sent an invalid safetensors file") as caught:
        split(content, tmp_path / "folder", 100)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_appears_complete_and_its_index_is_written_last(tmp_path, whole):
    content, part = whole.read_bytes(), tmp_path / "folder.part"
    with export_target(tmp_path / "folder", 700) as target:
        target.write(content[:-1])
        assert any(part.iterdir())
        target.write(content[-1:])
        assert not list(part.glob("*.json"))
        assert not (tmp_path / "folder").exists()
    assert load_folder(tmp_path / "folder")


def test_an_export_replaces_an_earlier_one_but_no_other_folder(tmp_path, whole):
    content, folder = whole.read_bytes(), tmp_path / "folder"
    split(content, folder, 700)
    many = len(list(folder.iterdir()))
    with pytest.raises(TensorFileError):
        split(content[:-1], folder, 1 << 20)
    assert len(load_folder(folder)) == len(SHAPES) + 1
    assert len(list(folder.iterdir())) == many
    split(content, folder, 1 << 20)
    assert len(list(folder.iterdir())) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "whole.safetensors"]

    (folder / "config.json").write_text("{}")
    with pytest.raises(
        ExportError, match=r"contains files that are not part of an export, such as 'config.json': give another path"
    ):
        split(content, folder, 700)
    assert len(list(folder.iterdir())) == 3
    with pytest.raises(ExportError, match="exists and is not a folder"):
        split(content, whole, 700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ExportError, match="exists and is not a folder"):
        split(content, tmp_path / "link", 700)
    with pytest.raises(ExportError, match="No such file or directory"):
        split(content, tmp_path / "no" / "folder", 700)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "link", "whole.safetensors"]


def test_the_current_folder_can_be_replaced(tmp_path, whole, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    split(whole.read_bytes(), Path(), 700)
    assert load_folder(tmp_path / "empty")


def test_an_interrupted_export_loses_no_folder(tmp_path, whole, monkeypatch):
    """The export ends between its two renames, once with an error and once without any cleanup."""
    content, folder = whole.read_bytes(), tmp_path / "folder"
    split(content, folder, 700)
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name == "folder.part":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        with pytest.raises(ExportError, match="Input/output error"):
            split(content, folder, 1 << 20)
    assert len(load_folder(folder)) == len(SHAPES) + 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "whole.safetensors"]

    folder.rename(tmp_path / "folder.old")
    (tmp_path / "folder.part").mkdir()
    (tmp_path / "folder.part" / "model-00001-of-00009.safetensors").write_bytes(b"x")
    with pytest.raises(TensorFileError):
        split(content[:-1], folder, 1 << 20)
    assert len(load_folder(folder)) == len(SHAPES) + 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "whole.safetensors"]


def test_files_and_names_are_durable_before_the_folder_appears(tmp_path, whole, monkeypatch):
    synced, real = [], export_targets.os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        synced.append((path.relative_to(tmp_path).as_posix(), (tmp_path / "folder").exists()))
        real(descriptor)

    monkeypatch.setattr(export_targets.os, "fsync", fsync)
    split(whole.read_bytes(), tmp_path / "folder", 1500)
    names = sorted(f"folder.part/{each.name}" for each in (tmp_path / "folder").iterdir())
    assert synced == [*((name, False) for name in names), ("folder.part", False), (".", True)]
