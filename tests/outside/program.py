"""A user's program. It is type-checked with `mypy --strict`, and never run.

A line with an ignored error must have this error, because mypy also reports ignored errors that do not occur.
"""

from __future__ import annotations

from pathlib import Path

import atoll
import torch
from atoll.doctor import LearnerToCheck, check_connection, of_model, print_findings
from atoll.integrations.batch_tokens import count_tokens
from atoll_wire.security.transport import TransportSecurity


def train(model: torch.nn.Module, batches: list[torch.Tensor]) -> int:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    random = atoll.RandomState()
    with atoll.Learner(
        model,
        [optimizer],
        server=["127.0.0.1:7070", "127.0.0.1:7071"],
        name="eu-west",
        checkpoint_dir=Path("checkpoints"),
        extra_state={"random": random},
        copies=lambda: [(parameter, parameter.detach()) for parameter in model.parameters()],
        send_frozen=True,
    ) as learner:
        for batch in batches:
            optimizer.step()
            learner.step(tokens=batch.numel(), loss=0.5)
        with learner.pause():
            learner.save_checkpoint()
        done: float = learner.run_tokens / max(1, learner.total_tokens)
    stats: atoll.Stats = learner.stats()
    versions: tuple[int, ...] = stats.versions
    return stats.merged + len(versions) + int(done)


def notebook(model: torch.nn.Module) -> atoll.Learner:
    learner: atoll.Learner = atoll.Learner(model, torch.optim.SGD(model.parameters()), "127.0.0.1:7070").start()
    try:
        learner.step(1)
    except atoll.LearnerError as error:
        print(str(error))
    learner.close(drain=False)
    return learner


def check(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    learner = LearnerToCheck("127.0.0.1:7070", TransportSecurity(), "eu-west", **of_model(model, optimizer))
    return print_findings(check_connection(learner))


def mistakes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    learner = atoll.Learner(model, optimizer, server=7070)  # type: ignore[arg-type]
    learner.step(tokens="all")  # type: ignore[arg-type]
    learner.stop()  # type: ignore[attr-defined]
    atoll.Learner(model, optimizer, "127.0.0.1:7070", adoption="replace")  # type: ignore[arg-type]
    merged: str = learner.stats().merged  # type: ignore[assignment]
    tokens: str = count_tokens(merged)  # type: ignore[assignment]
    print(tokens, learner.stats().islands)  # type: ignore[attr-defined]
