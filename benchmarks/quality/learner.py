"""One learner of `over_grpc`: the recipe's steps, padded to one length, with Atoll's three lines."""

from __future__ import annotations

import json
import sys
import time

import torch
from atoll.learner import Learner
from atoll.reference import data
from atoll.reference.train import inner_step, learning_rate, optimizer_for

from benchmarks.quality.recipe import Recipe
from benchmarks.quality.training import CPU, batches, new_model, tokens_of_step


def main() -> None:
    """Runs one learner. Arguments: SERVER NAME STEP_S RECIPE, the last as JSON. The last line of output is JSON."""
    server, name, step_s, given = sys.argv[1:]
    recipe = Recipe(**json.loads(given))
    torch.set_num_threads(1)
    model = new_model(recipe)
    optimizer = optimizer_for(model, recipe.learning_rate)
    own = batches(recipe, data.load(None, recipe.model.context), name)
    steps = 0
    with Learner(model, optimizer, server, name, insecure_plaintext=True) as learner:
        while learner.run_tokens < recipe.tokens:
            began = time.monotonic()
            rate = learning_rate(recipe.learning_rate, learner.run_tokens / recipe.tokens, steps)
            loss = inner_step(model, optimizer, next(own), rate, CPU)
            time.sleep(max(0.0, began + float(step_s) - time.monotonic()))
            learner.step(tokens=tokens_of_step(recipe), loss=loss)
            steps += 1
    stats = learner.stats()
    print(json.dumps({"steps": steps, "merged": stats.merged, "refused": stats.refused, "blocked_s": stats.blocked_s}))


if __name__ == "__main__":
    main()
