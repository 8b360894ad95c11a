"""One rank of the synchronous job: the reference model under DistributedDataParallel, on gloo.

Its standard input is a pipe from the parent that carries no data. The pipe closes when the parent ends.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from atoll.reference import data
from atoll.reference.model import SIZES, Transformer, build
from atoll.reference.settings import TrainSettings
from atoll.reference.train import learning_rate, optimizer_for
from torch import Tensor, nn

from benchmarks.data_parallel.time_accounts import Event, Joined, Prepared, Saved, Step, Up, encode

MEETING_S = 120.0  # timeout of gloo; the parent ends the job long before this
CHECKPOINT = "checkpoint.pt"
USUAL_TOKENS = 4_000_000
STOP = "stop-before"  # file of rank 0, which contains the number of the first step that no rank takes


class LossOf(nn.Module):
    """The model with its loss as `forward`, because DistributedDataParallel wraps only that method."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, window: Tensor) -> Tensor:
        """Returns the mean loss. window: int64 (batch, time + 1)."""
        return self.model.loss(window)


class Records:
    """Appends a rank's events to its file, one write per event, so that SIGKILL leaves no incomplete line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: Event) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(encode(event))


def main() -> None:
    """Trains from the last checkpoint to the last step, or until the parent asks it to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument(
        "--stop-asked",
        type=Path,
        required=True,
        help="file that the parent creates to end this rank after its current step",
    )
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--meeting", type=Path, required=True, help="file through which the ranks of one start meet")
    parser.add_argument("--preset", required=True)
    for name in ("--rank", "--ranks", "--tokens", "--seed", "--checkpoint-steps"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    record = Records(options.records)
    record(Up(time.monotonic()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    settings = TrainSettings(size=options.preset, seed=options.seed)
    corpus = data.load(settings.data, SIZES[settings.size].context)
    model = build(settings.size, settings.seed)
    optimizer = optimizer_for(model, settings.learning_rate)
    record(Prepared(time.monotonic()))

    # Ranks meet through a file, not a port. gloo then chooses free ports, and ranks never meet ranks of an earlier
    # start.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.meeting.resolve()}",
        rank=options.rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=MEETING_S),
    )
    first = load(options.dir / CHECKPOINT, model, optimizer)
    whole = nn.parallel.DistributedDataParallel(LossOf(model), gradient_as_bucket_view=True)
    record(Joined(time.monotonic(), first))
    context = SIZES[settings.size].context
    tokens = settings.batch * context
    # Without --tokens, the learning rate falls as in a run of USUAL_TOKENS, and then stays constant.
    horizon = math.ceil((options.tokens or USUAL_TOKENS) / (tokens * options.ranks))
    # Each batch depends only on its number, so a repeated step has the same text.
    batches = data.batches(corpus.training, settings.batch, context, settings.seed, f"rank-{options.rank}", first)
    done = first
    for step in range(first, horizon if options.tokens else sys.maxsize):
        if _stops(options.dir / STOP, options.rank == 0 and options.stop_asked.exists(), step):
            break
        start_s = time.monotonic()
        rate = learning_rate(settings.learning_rate, step / horizon, step)
        loss = _inner_step(whole, optimizer, next(batches), rate)
        done = step + 1
        record(Step(step, start_s, time.monotonic(), tokens, loss))
        if options.rank == 0 and done % options.checkpoint_steps == 0:
            start_s = time.monotonic()
            save(options.dir / CHECKPOINT, model, optimizer, done)
            record(Saved(done, start_s, time.monotonic()))
    if options.rank == 0:
        save(options.dir / CHECKPOINT, model, optimizer, done)
    dist.destroy_process_group()


def _inner_step(
    whole: nn.parallel.DistributedDataParallel, optimizer: torch.optim.Optimizer, window: Tensor, rate: float
) -> float:
    """Takes the reference learner's inner step, with the mean gradient of all ranks."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = whole(window)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())


def _stops(stop: Path, asked: bool, step: int) -> bool:
    """Returns whether the job stops before `step`. The result is the same on all ranks.

    asked: whether this is rank 0 and the parent has asked it to stop.

    When asked, rank 0 writes the number of the step after `step` to the file. No other rank can begin that step before
    rank 0 has taken part in the all-reduce of `step`. Each rank therefore finds the file in time.
    """
    if stop.exists():
        return step >= int(stop.read_text())
    if asked:
        draft = stop.with_suffix(".tmp")
        draft.write_text(str(step + 1))
        draft.replace(stop)
    return False


def save(path: Path, model: Transformer, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Replaces the checkpoint atomically, without a flush to disk, because only processes are killed."""
    draft = path.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, draft)
    draft.replace(path)


def load(path: Path, model: Transformer, optimizer: torch.optim.Optimizer | None) -> int:
    """Loads the checkpoint, if there is one, and returns its number of steps.

    optimizer: None to skip the optimizer's state.
    """
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _end_with_parent() -> None:
    """Ends this process when the parent ends, even by SIGKILL, because the pipe from the parent then closes."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's destructor may wait for a thread that waits for the GIL
