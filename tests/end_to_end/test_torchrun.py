"""A learner with two ranks under torch.distributed: rank 0 connects to the core, and all ranks take the same steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.world import Trainee, core, eventually, train

RANK = """
import sys, hashlib, threading, torch, torch.distributed as dist, atoll
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, breath = dist.get_rank(), threading.Event()
torch.manual_seed(rank)  # the ranks begin differently: entering must make them equal
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 32))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
out = open(f"{sys.argv[2]}/rank{rank}", "w")
generator = torch.Generator().manual_seed(100 + rank)
with atoll.Learner(model, optimizer, server=sys.argv[1], name="island", connect_timeout_s=30) as learner:
    for step in range(120):
        x = torch.randint(0, 32, (32,), generator=generator)
        loss = nn.functional.cross_entropy(model(x), (x * 7 + 3) % 32)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        breath.wait(0.01)
        learner.step(tokens=32, loss=loss.item())
        whole = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(hashlib.sha256(whole).hexdigest(), learner.run_tokens, file=out)
print(learner.stats().merged, file=out)
dist.destroy_process_group()
"""


def torchrun(directory: Path, address: str, script: str) -> subprocess.CompletedProcess[str]:
    (directory / "rank.py").write_text(script)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(directory / "rank.py"), address, str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.ci
def test_all_ranks_of_an_island_apply_an_update_at_the_same_step(tmp_path):
    with core(tmp_path) as running:
        stop = []
        other = Trainee(running.address, "other", lambda _: bool(stop))
        other.start()
        done = torchrun(tmp_path, running.address, RANK)
        stop.append(True)
        other.done()
        assert done.returncode == 0, done.stderr[:6000]
        eventually(lambda: running.status().contributions.pending == 0)
        status = running.status()
    first, second = ((tmp_path / f"rank{rank}").read_text().splitlines() for rank in (0, 1))
    assert len(first) == 121
    assert first[:-1] == second[:-1]
    assert int(first[-1]) > 3
    run_tokens = [int(line.split()[1]) for line in first[:-1]]
    assert run_tokens == sorted(run_tokens)
    assert run_tokens[-1] > 2 * 120 * 32  # includes the other learner's tokens
    island = next(each for each in status.learners if each.learner == "island")
    assert island.tokens == 2 * 120 * 32


@pytest.mark.ci
def test_every_rank_hears_that_rank_0_could_not_join(tmp_path):
    with core(tmp_path) as running:
        train(running.address, "a", steps=5)
        done = torchrun(tmp_path, running.address, RANK.replace("nn.Embedding(32, 16)", "nn.Embedding(31, 16)"))
    assert done.returncode != 0
    assert '"0.weight" is float32 [31, 16]' in done.stderr
    assert "rank 0 could not join the run" in done.stderr


@pytest.mark.ci
def test_a_learner_with_several_ranks_cannot_lease_data_units(tmp_path):
    leasing = '    learner.units(atoll.data.Rows([0, 1], 1), "rows")\n    for step in range(120):'
    with core(tmp_path) as running:
        done = torchrun(tmp_path, running.address, RANK.replace("    for step in range(120):", leasing))
        status = running.status()
    assert done.returncode != 0
    assert "this learner has 2 ranks, and only a single-process learner can lease units: start one" in done.stderr
    assert not status.datasets
    assert [each.state for each in status.learners] == ["left"], "a refused learner must leave"
