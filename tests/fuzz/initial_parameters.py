"""Fuzzes the upload of a run's initial parameters, and their file, up to a first export."""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from atoll_server.access.refusals import Refused
from atoll_server.checkpoints.restore import initial_states
from atoll_server.run.initial_parameters import STAGING, StagedFile, check_room
from atoll_server.settings import CoreSettings
from atoll_wire import outer_pb2 as pb
from atoll_wire.layout.layout import plan
from atoll_wire.layout.tensor_header import TensorFileError
from atoll_wire.model_file.model_file import RunId, write_model

from tests.fuzz.decoders import LIMITS, SPECS
from tests.fuzz.mutate import TEXT, WHOLE, mutate_bytes
from tests.fuzz.watch import in_room, place

MAX_BYTES = 1 << 22  # limit on memory; a file has 15 kB, and some hostile headers have 1 MB
# Values that JSON allows, but a tensor file does not.
STRANGE: tuple[Any, ...] = (
    None, True, 1.5, -1, 10**30, 1 << 63, "F32", "BF16", "F16", "I64", "F8_E4M3", "BOOL", "\ud800", [], [0], [0, 0], {},
    [[0, 4]], float("nan"), float("inf"), [1] * 1000, [0, 1 << 62], [-4, 0], [60, 50, 1],
)  # fmt: skip


class InitialParameters:
    """Uploads of a file with the correct checksum, so that the core examines its contents."""

    row = 1

    def __init__(self) -> None:
        self._place = place()
        self._directory = Path(self._place.name)
        (self._directory / STAGING).mkdir()
        self._layout = plan(SPECS, 2)
        tensors = {spec.name: np.ones(spec.shape, np.float32) for spec in SPECS}
        tensors["a buffer"] = np.arange(5)
        self._sound = safetensors.numpy.save(tensors, {"format": "pt"})
        self._head = int.from_bytes(self._sound[:8], "little")

    def one(self, rng: random.Random) -> bool:
        """Stages, checks, reads and exports one file."""
        content = self._content(rng)
        header = pb.InitialiseHeader(size_bytes=len(content), sha256=hashlib.sha256(content).digest())
        if rng.random() < 0.1:
            header.size_bytes = rng.choice((*WHOLE, len(content) + 1, max(0, len(content) - 1)))
        if rng.random() < 0.05:
            header.sha256 = mutate_bytes(rng, header.sha256)
        step = rng.choice((len(content) + 1, 5000, 997))
        chunks = [content[at : at + step] for at in range(0, len(content), step)]
        if rng.random() < 0.1:
            chunks.insert(rng.randrange(len(chunks) + 1), rng.choice((b"", b"", b"more")))
        with in_room(MAX_BYTES + 40 * len(content)):
            return self._feed(header, chunks)

    def _feed(self, header: pb.InitialiseHeader, chunks: list[bytes]) -> bool:
        staging = None
        try:
            settings = CoreSettings(listen=(), directory=self._directory, limits=LIMITS)
            check_room(settings, header.size_bytes, self._layout.parameters)
            staging = StagedFile(self._directory, header.size_bytes, header.sha256)
            staging.begin()
            for chunk in chunks:
                staging.take(chunk)
            file = staging.check(self._layout.tensors)
            states = initial_states(self._layout, file)
        except (Refused, TensorFileError) as error:
            str(error).encode()  # as gRPC encodes it
            return False
        finally:
            if staging is not None:
                staging.close()
            assert not list((self._directory / STAGING).iterdir()), "staging must leave no files"
        assert all(np.isfinite(state.theta).all() for state in states.values())
        out = io.BytesIO()
        size = write_model(out, self._layout, file, states, RunId("run", 1))
        assert size == len(out.getvalue()) <= 2 * header.size_bytes + 4 * self._layout.parameters + 4096
        return True

    def _content(self, rng: random.Random) -> bytes:
        head, data = self._sound[8 : 8 + self._head], self._sound[8 + self._head :]
        match rng.randrange(8):
            case 0:
                return mutate_bytes(rng, self._sound)
            case 1:
                return rng.choice(WHOLE).to_bytes(8, "little") + head + data
            case 2:
                head = head.replace(b"0", str(rng.choice(WHOLE)).encode(), rng.randrange(1, 4))
            case 3:
                head = mutate_bytes(rng, head)
            case 4:
                if rng.random() < 0.1:
                    head = _endless(rng, head)
            case 5:
                data = self._values(rng, data)
            case _:
                head = json.dumps(_strange(rng, json.loads(head))).encode()
        return struct.pack("<Q", len(head)) + head + (mutate_bytes(rng, data) if rng.random() < 0.2 else data)

    def _values(self, rng: random.Random, data: bytes) -> bytes:
        values = np.frombuffer(data, "<f4").copy()
        for _ in range(rng.randrange(3)):
            values[rng.randrange(len(values))] = rng.choice((np.nan, np.inf, -np.inf, 3e38, 1e-45, -0.0))
        return values.tobytes()

    def close(self) -> None:
        """Removes all files."""
        self._place.cleanup()


def _strange(rng: random.Random, head: dict[str, Any]) -> dict[str, Any]:
    """Returns a header with one to three changed parts, most of them invalid."""
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(list(head) or [""])
        entry = head.get(name)
        match rng.randrange(6):
            case 0 if head:
                head[rng.choice(TEXT)] = head.pop(name)
            case 1:
                head[name] = deepcopy(rng.choice(STRANGE))  # a later change must not change STRANGE
            case 2 if isinstance(entry, dict):
                entry[rng.choice(("dtype", "shape", "data_offsets"))] = deepcopy(rng.choice(STRANGE))
            case 3 if isinstance(entry, dict) and entry:
                del entry[rng.choice(list(entry))]
            case 4:  # the same bytes under several names
                head |= {f"{name} {number}": entry for number in range(rng.choice((1, 3, 60)))}
            case _ if isinstance(entry, dict) and isinstance(entry.get("shape"), list):
                entry["shape"] = [*entry["shape"], rng.choice((0, 1, -1, 1 << 62, 10**40))]
            case _:
                head.pop(name, None)
    return head


def _endless(rng: random.Random, head: bytes) -> bytes:
    """Returns a header that is cheap to send and expensive to parse."""
    match rng.randrange(3):
        case 0:  # nested more deeply than a parser's stack
            return b'{"a":' + rng.choice((b"[", b'{"a":')) * rng.choice((900, 50_000))
        case 1:  # numbers whose product has a million digits
            shape = b",".join([b"9" * rng.choice((4000, 4300, 5000))] * 200)
            return b'{"a":{"dtype":"F32","shape":[' + shape + b'],"data_offsets":[0,0]}}'
        case _:
            return head[:-1] + b"".join(b',"%d":[]' % number for number in range(3000)) + b"}"
