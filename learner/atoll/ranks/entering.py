"""Joins all ranks to a run together: compares their models, and waits until every rank has its first anchors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum

from atoll_wire.layout.layout import TensorSpec

from atoll.errors import LearnerError
from atoll.fragments.adoption import Adopting
from atoll.ranks.rank_group import RankGroup
from atoll.ranks.tensor_part import TensorPart


class Stage(Enum):
    """The next action of all ranks while they join a run."""

    WAIT = "wait for the other ranks"
    FILE = "write the initial parameters together"
    READY = "begin to train"


def gathered_parts(
    tensors: Sequence[TensorSpec], mine: Sequence[TensorPart], ranks: RankGroup
) -> list[list[TensorPart]]:
    """Returns every rank's part of each tensor, by rank and tensor. All ranks call this together.

    Raises LearnerError if the ranks' models differ, or if the ranks together do not hold every value.
    """
    names = hashlib.sha256(json.dumps([asdict(tensor) for tensor in tensors]).encode()).hexdigest()
    said = [json.loads(each) for each in ranks.gathered(json.dumps([names, [p.ranges for p in mine]]).encode())]
    different = [rank for rank, (other, _) in enumerate(said) if other != said[0][0]]
    if different:
        raise LearnerError(
            f"the trainable tensors of rank {different[0]} differ from those of rank 0 (pipeline parallelism is not "
            "supported): build the same model on all ranks"
        )
    found = [
        [TensorPart(tensor.shape, _tuples(ranges)) for tensor, ranges in zip(tensors, parts, strict=True)]
        for _, parts in said
    ]
    for number, tensor in enumerate(tensors):
        held = sum(part.size for part in {parts[number] for parts in found})
        if held != tensor.size:
            raise LearnerError(
                f'all ranks together hold {held} of the {tensor.size} values of "{tensor.name}": '
                "build the model on a mesh that contains all ranks"
            )
    return found


def _tuples(ranges: Sequence[Sequence[Sequence[int]]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(tuple((start, stop) for start, stop in each) for each in ranges)


def next_stage(ranks: RankGroup, state: bool | LearnerError, *, file: bool) -> Stage:
    """Returns the next action, which is the same on all ranks. All ranks call this together.

    state: whether this rank has its first anchors, or the error that prevents this rank from joining.
    file: whether this rank's agent needs the file of initial parameters.
    Raises LearnerError if a rank cannot join.
    """
    mine = {"ready": state is True, "error": str(state) if isinstance(state, LearnerError) else "", "file": file}
    said = [json.loads(each) for each in ranks.gathered(json.dumps(mine).encode())]
    if isinstance(state, LearnerError):
        raise state
    for rank, other in enumerate(said):
        if other["error"]:
            raise LearnerError(f"rank {rank} could not join the run: {other['error']}")
    if any(other["file"] for other in said):
        return Stage.FILE
    return Stage.READY if all(other["ready"] for other in said) else Stage.WAIT


def of_leader(ranks: RankGroup, anchors: Sequence[Adopting]) -> list[Adopting]:
    """Returns rank 0's list of first anchors. All ranks call this together. anchors: this rank's list."""
    first = json.loads(ranks.gathered(json.dumps([asdict(each) for each in anchors]).encode())[0])
    return [Adopting(**each) for each in first]
