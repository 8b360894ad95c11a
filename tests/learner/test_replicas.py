"""Ranks that hold the same parameters notice when their values differ, and make them equal without losing work."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
import torch
from atoll.boundary.replicas import DRIFTED, ReplicaCheck
from atoll.ranks.division import divide
from atoll.ranks.tensor_part import TensorPart, chunk
from atoll_wire.layout.layout import MergeKind, TensorSpec, plan

from tests.learner.fake_core import fake_core
from tests.learner.loops import until

LAYOUT = plan(
    [
        TensorSpec("norm", (64,), "float32", MergeKind.DIRECTION),
        TensorSpec("weight", (64, 8), "float32", MergeKind.DIRECTION),
    ],
    1,
)

RANK = """
import json, sys, threading, torch, torch.distributed as dist, atoll
from atoll import learner as public
torch.set_num_threads(1)
if sys.argv[3] == "device": # CPU tensors replace the device's tensors
    public.coding_device = lambda _: torch.device("cpu")
dist.init_process_group("gloo")
rank, breath = dist.get_rank(), threading.Event()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(getattr(torch, sys.argv[4])))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
seen = []
with atoll.Learner(model, optimizer, sys.argv[1], "island", connect_timeout_s=30, drain_s=5) as learner:
    for step in range(60):
        model(torch.randn(4, 8, dtype=next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5 and rank == 1: # as a program does that writes parameters on one rank only
            with torch.no_grad():
                model.module.weight.mul_(1.125)
        breath.wait(0.01)
        learner.step(tokens=10)
        whole = torch.cat([p.detach().flatten().float() for p in model.parameters()])
        both = [torch.empty_like(whole) for _ in range(2)]
        dist.all_gather(both, whole)
        seen.append(bool(torch.equal(*both)))
json.dump([seen, learner.stats().abandoned_tokens], open(f"{sys.argv[2]}/rank{rank}", "w"))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("host", "float32"),
        pytest.param("host", "bfloat16", marks=pytest.mark.ci),
        pytest.param("device", "float32", marks=pytest.mark.ci),
    ],
)
def test_ranks_whose_parameters_drifted_apart_hold_the_same_values_after_a_round(tmp_path, place, kind):
    (tmp_path / "rank.py").write_text(RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with fake_core() as core:
        done = []
        command = [*launch, str(tmp_path / "rank.py"), core.address, str(tmp_path), place, kind]
        running = threading.Thread(
            target=lambda: done.append(subprocess.run(command, capture_output=True, text=True, timeout=100))
        )
        running.start()
        until(lambda: core.progress and core.progress[-1].steps > 10, 60.0)
        for fragment in range(len(core.layout.fragments)):
            core.open(fragment)
            until(lambda fragment=fragment: core.pending(fragment))
        running.join(100)
    assert done[0].returncode == 0, done[0].stderr[-3000:]
    seen, lost = json.loads((tmp_path / "rank0").read_text())
    assert seen[:5] == [True] * 5, "the same model at first"
    assert not any(seen[5:9]), "the drift is the program's"
    assert seen[-1], "equal again"
    assert not lost, "no work was dropped"
    assert DRIFTED in done[0].stdout + done[0].stderr


def checks(parts: list[list[TensorPart]], values: list[list[torch.Tensor]]) -> list[ReplicaCheck]:
    """Returns the check of each rank. values: each rank's parts of the tensors."""
    return [
        ReplicaCheck(
            [torch.nn.Parameter(value) for value in mine],
            [divide(fragment, parts, rank) for fragment in LAYOUT.fragments],
            parts,
            rank,
        )
        for rank, mine in enumerate(values)
    ]


def sharded(rank: int, ranks: int) -> list[TensorPart]:
    """Returns the parts of a rank that holds every norm and a part of every weight, as with tensor parallelism."""
    return [TensorPart.whole((64,)), TensorPart((64, 8), (chunk(((0, 64),), rank, ranks), ((0, 8),)))]


def test_only_parts_that_several_ranks_hold_are_compared():
    parts = [sharded(rank, 2) for rank in range(2)]
    norm, weights = torch.ones(64), torch.randn(2, 32, 8)
    each = checks(parts, [[norm.clone(), weights[0]], [norm.clone(), weights[1]]])
    for check in each:
        check.read(0)
    reports = [check.report() for check in each]
    assert reports[0] == reports[1] != 0
    assert [check.drifted(reports) for check in each] == [None, None]
    assert [check.report() for check in each] == [0, 0], "compared"


def test_comparisons_that_fall_behind_do_not_pile_up():
    """A slow learner may have several due rounds at each agreement, which compares one fragment."""
    parts = [sharded(rank, 2) for rank in range(2)]
    check = checks(parts, [[torch.ones(64), torch.ones(32, 8)]] * 2)[0]
    for _ in range(10):
        check.read(0)
    assert len(check._waiting) == 1


def test_all_ranks_find_a_difference_between_two_of_them():
    """HSDP 2 x 2: ranks 0 and 2 hold the same parts, and so do 1 and 3."""
    parts = [sharded(rank % 2, 2) for rank in range(4)]
    values = [[torch.ones(64), torch.full((32, 8), float(rank % 2))] for rank in range(4)]
    values[3][1] += 1e-6
    each = checks(parts, values)
    for check in each:
        check.read(0)
    reports = [check.report() for check in each]
    assert reports[0] == reports[2]
    assert [check.drifted(reports) for check in each] == [0] * 4


def test_ranks_wait_for_the_samples_of_a_rank_whose_device_is_late():
    parts = [sharded(0, 1) for _ in range(2)]
    each = checks(parts, [[torch.ones(64), torch.ones(64, 8)], [torch.ones(64), torch.zeros(64, 8)]])
    for check in each:
        check.read(0)
    reports = [check.report() for check in each]
    assert [check.drifted([reports[0], 0]) for check in each] == [None, None]
    assert [check.report() for check in each] == reports, "reported again"
    assert [check.drifted(reports) for check in each] == [0, 0]


def test_ranks_without_replicas_read_nothing():
    parts = [[TensorPart((64,), (chunk(((0, 64),), rank, 2),)), sharded(rank, 2)[1]] for rank in range(2)]
    each = checks(parts, [[torch.ones(32), torch.ones(32, 8)], [torch.ones(32), torch.zeros(32, 8)]])
    for check in each:
        check.read(0)
    assert [check.report() for check in each] == [0, 0]
