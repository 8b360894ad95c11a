"""A model that no process holds: it starts from a folder of files, trains beside a single process, and is exported.

Two ranks build it on the meta device and shard it with mixed precision, into unequal parts. They evaluate it often.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atoll.model.parameters import Parameters
from atoll_server.cli.operator_client import OperatorTarget, export_checkpoint
from atoll_wire.codec import frame_codec
from atoll_wire.layout.layout import plan
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.end_to_end.island_rank import checked
from tests.end_to_end.sharded_rank import BATCH, STEPS, layers
from tests.end_to_end.test_islands import assert_same, versions
from tests.end_to_end.world import Trainee, core, eventually

pytestmark = [pytest.mark.ci, pytest.mark.timeout(300)]  # starts several processes

FRAGMENTS, RANKS = 2, 2
CLOSE = 0.05  # a few roundings of an output to bfloat16
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Ended:
    """The run after both learners have left. ranks: what the ranks wrote. anchors: the single process's checksums."""

    given: dict[str, torch.Tensor]
    ranks: list[dict[str, Any]]
    anchors: dict[str, int]
    folder: Path
    tokens: dict[str, int]


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Ended:
    place = tmp_path_factory.mktemp("sharded")
    torch.manual_seed(0)
    given, anchors, stop = layers().state_dict(), dict[str, int](), list[bool]()
    saved_in_files(given, place / "given")

    def note(trainee: Trainee) -> bool:
        boundary = trainee.learner._boundary
        for number, track in enumerate(boundary.local.tracks if boundary is not None else ()):
            anchors.setdefault(f"{number}/{track.version}", checked(track)[0])
        return bool(stop)

    options = ("--init", str(place / "given"), "--fragments", str(FRAGMENTS), "--inner-steps", "8")
    with core(place, *options) as running:
        other = Trainee(running.address, "one", note, model=layers(), pace_s=0.05)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command = [*launch, "-m", "tests.end_to_end.sharded_rank", running.address, str(place)]
        island = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            reached(island, lambda: len(list(place.glob("joined-*"))) == RANKS)
            other.start()
            reached(island, lambda: len(running.status().learners) == 2)
            (place / "go").touch()
            reached(island, lambda: running.status().contributions.merged > 6)
            export_checkpoint(OperatorTarget(running.address), place / "out", initial=False, max_file_bytes=3000)
            _, said = island.communicate(timeout=200)
        finally:
            island.kill()
            stop.append(True)
            if other.is_alive():
                other.done()
        assert island.returncode == 0, said[-6000:]
        tokens = {each.learner: each.tokens for each in running.status().learners}
    ranks = [torch.load(place / f"rank-{rank}.pt", weights_only=True) for rank in range(RANKS)]
    return Ended(given, ranks, anchors, place / "out", tokens)


def reached(island: subprocess.Popen[str], found: Callable[[], bool]) -> None:
    """Waits for a condition, or fails with the ranks' output if they have ended."""
    eventually(lambda: island.poll() is not None or found(), 60)
    assert island.poll() is None, island.communicate()[1][-6000:]


def saved_in_files(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes each tensor to its own file, and the index of all files."""
    folder.mkdir()
    weight_map = {name: f"{number}.safetensors" for number, name in enumerate(tensors)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, folder / weight_map[name])
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_ranks_without_usable_values_begin_with_the_folders(ended):
    for rank in ended.ranks:
        assert rank["begun"].keys() == ended.given.keys()
        assert all(torch.equal(rank["begun"][name], value) for name, value in ended.given.items())


def test_shards_are_unequal_and_stay_float32(ended):
    first, second = (rank["sizes"] for rank in ended.ranks)
    assert any(second), "both ranks must hold values"
    assert 0 in second, "a rank must hold nothing of a tensor"
    assert any(a != b for a, b in zip(first, second, strict=True) if b)
    assert {dtype for rank in ended.ranks for dtype in rank["types"]} == {"torch.float32"}


def test_the_next_forward_pass_has_every_adoption(ended):
    for rank in ended.ranks:
        adopted = [moved for moved in rank["moved"] if moved]
        assert len(adopted) > 4
        assert max(adopted) > 3 * CLOSE, "an adoption must change the outputs visibly"
        assert len(rank["stale"]) == STEPS
        assert max(rank["stale"]) < CLOSE


def test_ranks_and_a_single_process_have_the_same_anchors_and_train(ended):
    assert ended.ranks[0]["anchors"].keys() == ended.ranks[1]["anchors"].keys()
    assert_same(versions(ended.ranks), ended.anchors, 5)
    assert ended.tokens["island"] == RANKS * BATCH * STEPS
    assert ended.ranks[0]["merged"] > 2
    for rank in ended.ranks:
        assert sum(rank["losses"][-10:]) < 0.7 * sum(rank["losses"][:10])


def test_the_export_is_a_folder_with_the_anchors_of_the_ranks(ended):
    weight_map = json.loads((ended.folder / INDEX).read_text())["weight_map"]
    assert len({*weight_map.values()}) > 1
    whole = {name: load_file(ended.folder / file)[name] for name, file in weight_map.items()}
    assert whole.keys() == ended.given.keys()
    layers().load_state_dict(whole)
    with safe_open(ended.folder / weight_map["0.weight"], "pt") as file:
        exported = file.metadata()["atoll.versions"].split(",")
    model, found = layers(), {}
    layout = plan(Parameters(model, torch.optim.AdamW(model.parameters())).tensors, FRAGMENTS)
    for fragment, version in zip(layout.fragments, exported, strict=True):
        flat = [whole[layout.tensors[piece.tensor].name].numpy().ravel() for piece in fragment.pieces]
        pieces = [values[p.start : p.start + p.length] for values, p in zip(flat, fragment.pieces, strict=True)]
        found[f"{fragment.index}/{version}"] = frame_codec.vector_crc32c(np.concatenate(pieces))
    assert_same(versions(ended.ranks), found, 1)
    assert_same(ended.anchors, found, 1)
