"""Two ranks of one learner, with a core that the test controls, have the same values at every step."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from tests.learner.fake_core import fake_core
from tests.learner.loops import until

RANK = """
import hashlib, json, sys, threading, torch, torch.distributed as dist, atoll
from atoll import learner as public
torch.set_num_threads(1)
copied = []
class Counted(public.DeviceCoder):
    def _copy_ahead(self, anchor):
        copied.append(len(anchor))
        super()._copy_ahead(anchor)
if sys.argv[3] == "device": # CPU tensors replace the device's tensors
    public.DeviceCoder = Counted
    public.coding_device = lambda _: torch.device("cpu")
dist.init_process_group("gloo")
rank, breath = dist.get_rank(), threading.Event()
torch.manual_seed(rank)
inner = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8, 8))
model = torch.nn.parallel.DistributedDataParallel(inner.to(memory_format=torch.channels_last))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
seen = []
with atoll.Learner(model, optimizer, sys.argv[1], "island", connect_timeout_s=30, drain_s=5) as learner:
    seen.append([learner.run_tokens, learner.total_tokens])
    for step in range(60):
        model(torch.randn(4, 8, 3, 3)).square().mean().backward()
        if step % 20 != 19:  # as if a gradient scaler skipped it
            optimizer.step()
        optimizer.zero_grad()
        breath.wait(0.01)
        learner.step(tokens=10)
        whole = b"".join(p.detach().contiguous().numpy().tobytes() for p in model.parameters())
        seen.append([learner.run_tokens, hashlib.sha256(whole).hexdigest()])
stats = learner.stats()
json.dump([copied, seen, [stats.steps, stats.tokens, stats.skipped]], open(f"{sys.argv[2]}/rank{rank}", "w"))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", params=["host", pytest.param("device", marks=pytest.mark.ci)])
def ranks(request, tmp_path_factory):
    """Returns both ranks' values after each step, while a round is merged and other learners train.

    Each rank owns one of two fragments. The first is merged.
    """
    directory = tmp_path_factory.mktemp("ranks")
    (directory / "rank.py").write_text(RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with fake_core() as core:
        core.run_tokens, core.total_tokens = 5_000, 70_000
        done = []
        command = [*launch, str(directory / "rank.py"), core.address, str(directory), request.param]
        running = threading.Thread(
            target=lambda: done.append(subprocess.run(command, capture_output=True, text=True, timeout=100))
        )
        running.start()
        until(lambda: core.progress and core.progress[-1].steps, 60.0)
        for fragment in (0, 1):
            core.open(fragment)
            until(lambda fragment=fragment: core.pending(fragment))
        core.run_tokens = 9_000
        core.merge(0)
        running.join(100)
        adopted = [each.version for progress in core.progress for each in progress.adopted]
    assert done[0].returncode == 0, done[0].stderr[-3000:]
    said = [json.loads((directory / f"rank{rank}").read_text()) for rank in (0, 1)]
    sizes = [fragment.length for fragment in core.layout.fragments]
    return request.param, sizes, adopted, *said


def test_ranks_hold_the_same_parameters_after_every_step(ranks):
    *_, adopted, (_, first, _), (_, second, _) = ranks
    assert adopted == [1]
    assert [digest for _, digest in first[1:]] == [digest for _, digest in second[1:]]


def test_ranks_know_the_same_tokens_of_the_run_at_every_step(ranks):
    """Otherwise, schedules would differ, and a loop that follows them would never end on some ranks."""
    *_, (_, first, _), (_, second, _) = ranks
    assert first[0] == second[0] == [5_000, 70_000]
    assert [tokens for tokens, _ in first[1:]] == [tokens for tokens, _ in second[1:]]
    assert first[-1][0] >= 9_000


def test_all_ranks_count_the_same_steps(ranks):
    """Ranks answer rounds by these counters, so these must be equal. Three steps were skipped."""
    *_, (_, _, first), (_, _, second) = ranks
    assert first == second == [57, 59 * 2 * 10, 3]


def test_each_owner_copies_its_anchor_to_a_device_when_a_round_opens(ranks):
    place, sizes, _, (first, *_), (second, *_) = ranks
    assert [first, second] == ([[sizes[0]], [sizes[1]]] if place == "device" else [[], []])
