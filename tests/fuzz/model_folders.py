"""Fuzzes folders as initial parameters, and the stream of an export that a client splits into a folder."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from atoll_server.checkpoints.parameter_source import open_source
from atoll_server.cli.export_target import export_target
from atoll_wire.layout.tensor_header import INDEX, TensorFileError

from tests.fuzz.decoders import SPECS
from tests.fuzz.mutate import TEXT, WHOLE, mutate_bytes
from tests.fuzz.watch import in_room, place

MAX_BYTES = 1 << 22
STRANGE: tuple[Any, ...] = (None, True, 7, "a.safetensors", *TEXT, [], {}, "\ud800.safetensors", [["a"]])


class ModelFolders:
    """Changed files with a changed index, and a changed file as a stream of pieces."""

    row = 1

    def __init__(self) -> None:
        self._place = place()
        self._base = Path(self._place.name)
        self._folder = self._base / "model"
        self._folder.mkdir()
        tensors = {spec.name: np.ones(spec.shape, np.float32) for spec in SPECS} | {"a buffer": np.arange(5)}
        self._stream = safetensors.numpy.save(tensors, {"format": "pt", "atoll.versions": "1,2"})
        with export_target(self._folder, 6000) as target:
            target.write(self._stream)
        self._sound = {path.name: path.read_bytes() for path in self._folder.iterdir()}

    def one(self, rng: random.Random) -> bool:
        """Reads one folder, or splits one stream."""
        return self._split(rng) if rng.random() < 0.5 else self._read(rng)

    def _read(self, rng: random.Random) -> bool:
        changed = dict(self._sound)
        for _ in range(rng.choice((0, 1, 1, 2))):
            name = rng.choice(sorted(changed))
            if name != INDEX and rng.random() < 0.3:
                del changed[name]
            elif name == INDEX and rng.random() < 0.8:
                changed[name] = json.dumps(_strange(rng, json.loads(self._sound[INDEX]))).encode()
            elif rng.random() < 0.2:
                changed["model.safetensors"] = changed[name]
            else:
                changed[name] = _changed(rng, changed[name])
        for path in self._folder.iterdir():
            path.unlink()
        for name, content in changed.items():
            (self._folder / name).write_bytes(content)
        with in_room(MAX_BYTES):
            try:
                source = open_source(self._folder)
                content = b"".join(source.chunks())
            except TensorFileError as error:
                assert "\n" not in str(error)
                str(error).encode()
                return False
        assert len(content) == source.size_bytes <= 2 * sum(map(len, changed.values()))
        return True

    def _split(self, rng: random.Random) -> bool:
        content = _changed(rng, self._stream) if rng.random() < 0.9 else self._stream
        step, out = rng.choice((1 << 20, 997, 8, 3)), self._base / "out"
        try:
            with in_room(MAX_BYTES), export_target(out, rng.choice((1, 3000, 1 << 20))) as target:
                for at in range(0, len(content), step):
                    target.write(content[at : at + step])
        except TensorFileError as error:
            str(error).encode()
            assert not out.exists()
            return False
        finally:
            assert not (self._base / "out.part").exists()
        files = sorted(out.iterdir())
        again = b"".join(open_source(out).chunks())
        assert again[-8:] == content[-8:]
        for path in files:
            path.unlink()
        out.rmdir()
        return True

    def close(self) -> None:
        """Removes all files."""
        self._place.cleanup()


def _changed(rng: random.Random, content: bytes) -> bytes:
    """Returns a file with a changed length, header or data."""
    length = int.from_bytes(content[:8], "little")
    head, data = content[8 : 8 + length], content[8 + length :]
    match rng.randrange(5):
        case 0:
            return mutate_bytes(rng, content)
        case 1:
            return rng.choice(WHOLE).to_bytes(8, "little") + head + data
        case 2:
            head = mutate_bytes(rng, head)
        case 3:
            head = head.replace(b"0", str(rng.choice(WHOLE)).encode(), rng.randrange(1, 4))
        case _:
            data = mutate_bytes(rng, data)
    return struct.pack("<Q", len(head)) + head + data


def _strange(rng: random.Random, index: dict[str, Any]) -> dict[str, Any]:
    """Returns an index with a changed part."""
    files = index["weight_map"]
    name = rng.choice(sorted(files))
    match rng.randrange(5):
        case 0:
            files[name] = rng.choice(STRANGE)
        case 1:
            files[name] = rng.choice(sorted(files.values()))
        case 2:
            files[rng.choice(TEXT)] = files.pop(name)
        case 3:
            index["weight_map"] = rng.choice(STRANGE)
        case _:
            index.pop(rng.choice(sorted(index)))
    return index
