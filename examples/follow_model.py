"""Answers queries with a model that is still training. Run it while examples/plain_loop.py trains.

python examples/follow_model.py

A follower only reads. It needs no optimizer, it is not a learner, and training never waits for it.
"""

from __future__ import annotations

import argparse
import math

import atoll  # before anything that imports grpc
import torch
from torch import nn


def main() -> None:
    """Answers --queries queries, and fetches a newer model between them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070", help="HOST:PORT of a core or front")
    parser.add_argument("--queries", type=int, default=20)
    options = parser.parse_args()

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    turn = torch.linspace(1, 3 * math.pi, 200)  # the first spiral of examples/plain_loop.py
    points = torch.stack([turn * turn.cos(), turn * turn.sin()], dim=1) / 10

    with atoll.Follower(model, server=options.server) as follower:
        for query in range(1, options.queries + 1):
            with torch.no_grad():
                sure = model(points).softmax(1)[:, 0].mean()
            versions = follower.versions
            print(f"query {query}: probability {sure:.3f}, versions {min(versions)} to {max(versions)}", flush=True)
            follower.wait(timeout_s=2.0)


main()
