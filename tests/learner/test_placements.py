"""Which ranks' tokens count, and which placements are refused. No rank runs: the process group is torch's fake one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from atoll.errors import LearnerError
from atoll.model.parameters import Parameters
from atoll.ranks.entering import gathered_parts
from atoll.ranks.rank_group import SingleRank
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 4
MESH = ("dp", "tp")


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Context manager whose block runs as one of RANKS ranks. Collective calls return without values of the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def rank_0() -> Iterator[None]:
    with as_rank(0):
        yield


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))


def mesh(*sizes: int, names: tuple[str, ...] = MESH) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names[-len(sizes) :])


def split(model: nn.Module, over: DeviceMesh) -> nn.Module:
    return parallelize_module(model, over, {"1": ColwiseParallel(), "3": RowwiseParallel()})


def parameters(model: nn.Module) -> Parameters:
    return Parameters(model, torch.optim.SGD(model.parameters(), 0.1))


def sharded() -> tuple[nn.Module, None]:
    return fully_shard(layers()), None


def hybrid() -> tuple[nn.Module, None]:
    return fully_shard(layers(), mesh=mesh(2, 2)), None


def replicated() -> tuple[nn.Module, None]:
    return nn.parallel.DistributedDataParallel(layers()), None


def loaded() -> tuple[nn.Module, None]:
    model = fully_shard(layers())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model, None


def tensor_parallel() -> tuple[nn.Module, DeviceMesh]:
    return split(layers(), mesh(RANKS)), mesh(RANKS)


def sharded_and_tensor_parallel() -> tuple[nn.Module, DeviceMesh]:
    both = mesh(2, 2)
    return fully_shard(split(layers(), both["tp"]), mesh=both["dp"]), both["tp"]


def sharded_beside_tensor_parallel() -> tuple[nn.Module, DeviceMesh]:
    """Only the embedding is sharded. The other layers are on a mesh with as many dimensions."""
    both, model = mesh(2, 2), layers()
    fully_shard(model[0], mesh=both["dp"])
    return split(model, both["tp"]), both["tp"]


def hybrid_beside_tensor_parallel() -> tuple[nn.Module, DeviceMesh]:
    """fully_shard manages both dimensions of the embedding's mesh, but only one of the other layers' mesh."""
    both, model = mesh(2, 2), layers()
    fully_shard(model[0], mesh=both)
    split(model, both["tp"])
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=both["dp"])
    return model, both["tp"]


Built = Callable[[], tuple[nn.Module, DeviceMesh | None]]
OWN_BATCHES: list[Built] = [sharded, hybrid, replicated, loaded]
SAME_BATCHES: list[tuple[Built, list[bool]]] = [
    (tensor_parallel, [True, False, False, False]),
    (sharded_and_tensor_parallel, [True, False, True, False]),
    (sharded_beside_tensor_parallel, [True, False, True, False]),
    (hybrid_beside_tensor_parallel, [True, False, True, False]),
]


@pytest.mark.parametrize("built", OWN_BATCHES)
def test_ranks_of_fully_shard_and_ddp_all_count_their_tokens(built):
    for rank in range(RANKS):
        with as_rank(rank):
            assert parameters(built()[0]).counts_tokens(None)


@pytest.mark.parametrize(("built", "counts"), SAME_BATCHES)
def test_one_of_the_ranks_that_train_on_the_same_batch_counts_its_tokens(built, counts):
    found = []
    for rank in range(RANKS):
        with as_rank(rank):
            model, same_batch = built()
            found.append(parameters(model).counts_tokens(same_batch))
    assert found == counts


@pytest.mark.usefixtures("rank_0")
@pytest.mark.parametrize("built", [built for built, _ in SAME_BATCHES])
def test_a_mesh_dimension_that_nobody_manages_is_refused_in_one_line_with_the_fix(built):
    model, _ = built()
    with pytest.raises(LearnerError) as caught:
        parameters(model).counts_tokens(None)
    said = str(caught.value)
    assert said.startswith('"1.weight" is a DTensor on a ')
    assert said.endswith('pass the mesh of these ranks as same_batch=, such as mesh["tp"]')
    assert "\n" not in said


@pytest.mark.usefixtures("rank_0")
def test_fsdp1_is_refused_in_one_line_with_the_fix():
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
    with pytest.raises(LearnerError, match=r'^"0" is sharded with .*\(FSDP1\), .*: use fully_shard \(FSDP2\)$'):
        parameters(model)


@pytest.mark.usefixtures("rank_0")
@pytest.mark.parametrize(
    ("ranks", "placement", "said"),
    [
        (range(RANKS), Partial(), r'^"weight" holds partial sums \(.*\): shard or replicate this parameter instead$'),
        ([1, 2], Replicate(), r'^"weight" is on a mesh without this rank: build the model on a mesh of all ranks$'),
    ],
)
def test_a_placement_without_usable_values_is_refused_in_one_line_with_the_fix(ranks, placement, said):
    model = nn.Linear(4, 4, bias=False)
    own = DTensor.from_local(torch.zeros(4, 4), DeviceMesh("cpu", list(ranks)), [placement], run_check=False)
    model.weight = nn.Parameter(own)
    with pytest.raises(LearnerError, match=said):
        parameters(model)


class Saying(SingleRank):
    """A rank of two. The other one says what `change` makes of this rank's message."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        self._change = change

    def gathered(self, mine: bytes) -> list[bytes]:
        return [mine, self._change(mine)]


def test_ranks_with_other_tensors_are_refused_in_one_line_with_the_fix():
    mine, other = parameters(layers()), parameters(layers()[:2])
    theirs = list[bytes]()
    gathered_parts(other.tensors, other.parts, Saying(lambda said: theirs.append(said) or said))
    said = r"^the trainable tensors of rank 1 differ from those of rank 0 \(pipeline parallelism is not supported\): .*"
    with pytest.raises(LearnerError, match=said):
        gathered_parts(mine.tensors, mine.parts, Saying(lambda _: theirs[0]))


@pytest.mark.usefixtures("rank_0")
def test_ranks_that_together_lack_values_are_refused_in_one_line_with_the_fix():
    mine = parameters(fully_shard(layers()))
    with pytest.raises(LearnerError, match=r'^all ranks together hold 8 of the 32 values of "0.weight": build .*$'):
        gathered_parts(mine.tensors, mine.parts, Saying(lambda said: said))
