"""A learner of the Atoll side: the same steps as the other side, with three lines added."""

from __future__ import annotations

import argparse
from pathlib import Path

from atoll.learner import Learner
from torch import nn

from benchmarks.narrow_links.pace import Job, Pace, tokens_of_step


def main() -> None:
    """Trains one learner with the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--number", "--steps"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--record", type=Path, required=True)
    options = parser.parse_args()
    pace = Pace(Job(options.number, options.step_s, options.steps, options.record))
    name = f"learner-{options.number}"
    with Learner(pace.model, pace.optimizer, options.server, name, insecure_plaintext=True) as learner:
        for step in range(options.steps):
            began, batch = pace.begin(step)
            loss = pace.model.loss(batch)
            pace.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(pace.model.parameters(), 1.0)
            pace.optimizer.step()
            pace.pad(began)
            learner.step(tokens=tokens_of_step(), loss=loss.item())
            pace.end(step, began, loss.item())
    stats = learner.stats()
    print(f"blocked {stats.blocked_s:.3f} s of {stats.steps} steps, {stats.merged} merged, {stats.refused} refused")


if __name__ == "__main__":
    main()
