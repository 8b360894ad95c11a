"""One rank of learners that code on a device, for `test_device_ranks`.

python -m tests.learner.device_rank KIND[,KIND...] RANK SIZE FOLDER

For each kind, the rank trains two equal models: one in host memory, one on a device (here, CPU tensors). It writes
digests of the sent and held values to FOLDER/RANK.json.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from atoll.boundary.local_parameters import LocalParameters
from atoll.device.device_coder import DeviceCoder
from atoll.fragments import segments
from atoll.fragments.adoption import Change, Fate, PreparedAnchor
from atoll.fragments.segments import Coder
from atoll.model.parameters import Parameters
from atoll.ranks.division import divide
from atoll.ranks.entering import gathered_parts
from atoll.ranks.placements import local_tensor
from atoll.ranks.rank_group import RankGroup, rank_group
from atoll.ranks.tensor_part import TensorPart
from atoll_wire.layout import layout
from atoll_wire.layout.frame_spans import Codec

from tests.end_to_end.island_rank import model_of

CPU = torch.device("cpu")
FRAGMENTS, FRAME = 3, 1 << 18  # so that, with four ranks, some own no frames of a fragment
STEPS, LEAVING, RESTORED = 12, 10, 6  # numbers of steps: the last, the first that leaves, one with a restore
TYPES = {"": torch.float32, "bf16": torch.bfloat16}


class Twin:
    """A model on this rank, whose steps depend only on the kind. coder: None for values in host memory."""

    def __init__(self, kind: str, ranks: RankGroup, coder: DeviceCoder | None) -> None:
        kind, _, dtype = kind.partition("/")
        torch.set_default_dtype(TYPES[dtype])
        self.model = model_of(kind)[0]
        self.parameters = Parameters(self.model, torch.optim.SGD(self.model.parameters(), 0.1))
        self.directions = [_directions(part) for part in self.parameters.parts]
        parts = gathered_parts(self.parameters.tensors, self.parameters.parts, ranks)
        with mock.patch.object(layout, "FRAME_PARAMETERS", FRAME):
            fragments = layout.plan(self.parameters.tensors, FRAGMENTS).fragments
        divisions = [divide(fragment, parts, ranks.rank) for fragment in fragments]
        self.coder: Coder = coder or segments
        self.random = np.random.default_rng(ranks.rank)
        first = [PreparedAnchor(n, 1, self._noise(d.run.length), Fate()) for n, d in enumerate(divisions)]
        self.local = LocalParameters(
            self.parameters.values, divisions, Codec.INT4, first, keep=True, ranks=ranks, coder=coder
        )

    def step(self, number: int) -> str:
        """Trains, takes a fragment's work, trains again, and adopts an update. Returns a digest of all results."""
        fragment, local = number % FRAGMENTS, self.local
        self._train(number)
        taken = local.take(fragment, 8 * number, number).coded
        self._train(number + STEPS)
        newer = self._newer(fragment, Fate(taken if number % 4 else None, drop=number % 7 == 0), known=number % 5 != 0)
        if not number % 4:
            local.tracks[fragment].refused()
        if number >= LEAVING:
            local.adopt_apart(newer, 8 * number, number)
        else:
            local.begin(newer)
            self._train(number + 2 * STEPS)
            local.finish(fragment, 8 * number, number)
        if number == RESTORED:
            local.restore((fragment + 1) % FRAGMENTS, 8 * number, number)
        held = [local_tensor(value).contiguous().view(-1).view(torch.uint8) for value in self.parameters.values]
        found = [*taken.contents, *(value.numpy() for value in held), *(track.anchor for track in local.tracks)]
        return hashlib.sha256(b"".join(each.tobytes() for each in found)).hexdigest()

    def _noise(self, length: int) -> np.ndarray:
        return 0.1 * self.random.standard_normal(length, np.float32)

    def _train(self, seed: int) -> None:
        """Changes the parameters, equally on all ranks that hold the same values."""
        weights = 0.01 * np.random.default_rng(seed).standard_normal(2, np.float32)
        for value, mine in zip(self.parameters.values, self.directions, strict=True):
            local_tensor(value).add_(torch.from_numpy(weights[0] * mine[0] + weights[1] * mine[1]))

    def _newer(self, fragment: int, fate: Fate, *, known: bool) -> PreparedAnchor:
        """Returns the next anchor. known: whether to compute the change from the update in advance."""
        track = self.local.tracks[fragment]
        update = segments.code(track.anchor, track.anchor + self._noise(track.shape.length), track.shape)
        new = track.anchor + segments.change(track.anchor, track.anchor, update, None, track.shape)
        values = self.coder.change(track.anchor, new, update, fate.q, track.shape)
        ahead = Change(track.anchor, fate.q, values) if known else None
        return PreparedAnchor(fragment, track.version + 1, new, fate, ahead)


def _directions(part: TensorPart) -> tuple[np.ndarray, np.ndarray]:
    """Returns this rank's part of two random tensors."""
    random, places = np.random.default_rng(0), np.ix_(*([i for r in each for i in range(*r)] for each in part.ranges))
    first, second = (random.standard_normal(part.shape, np.float32)[places] for _ in range(2))
    return first, second


def digests(kind: str) -> dict[str, Any]:
    """Returns the digests of both twins after each step."""
    ranks = rank_group()
    assert ranks.connect(CPU)
    found = {}
    for place, coder in (("host", None), ("device", DeviceCoder(CPU))):
        twin = Twin(kind, ranks, coder)
        found[place] = [twin.step(number) for number in range(1, STEPS + 1)]
    ranks.leave()
    return found


def connections(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """Returns, by the default group's backend, whether the ranks connect devices."""
    found = {}
    for number, backend in enumerate(("cuda:gloo", "gloo")):
        start(folder / f"store-{number}", rank, size, backend)
        ranks = rank_group()
        found[backend] = [
            ranks.connect(CPU),
            ranks.connect(CPU if rank else None),
            ranks.connect(None),
            ranks.exchange(np.full(size, rank, np.float32), [1] * size, [1] * size)().tolist(),
        ]
        ranks.leave()
        dist.destroy_process_group()
    return found


def start(store: Path, rank: int, size: int, backend: str) -> None:
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)


def main() -> None:
    kinds, rank, size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    start(folder / "store", rank, size, "gloo")
    found = {kind: digests(kind) for kind in kinds.split(",")}
    dist.destroy_process_group()
    found["connections"] = connections(folder, rank, size)
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
