"""A user's program. It is type-checked with `mypy --strict`, and never run.

A line with an ignored error must have this error, because mypy also reports ignored errors that do not occur.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import atoll
import torch
from atoll.data import Rows, Source, TokenFile, UnitLoader, Units
from atoll.doctor import LearnerToCheck, check_connection, of_model, print_findings
from atoll.integrations import lightning, transformers
from atoll.integrations.accelerate import AcceleratedLearner
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


def leased(learner: atoll.Learner, sentences: list[str]) -> int:
    sources: list[Source] = [Rows(sentences, unit=8, version="v1"), TokenFile("tokens.bin", 33, unit=4, overlap=1)]
    units: Units = learner.units(sources[0], "text", seed=1, epochs=2)
    loader: UnitLoader = units.loader(batch_size=8, num_workers=2, pin_memory=True)
    while units.more():
        for batch in loader:
            learner.step(tokens=len(batch))
    return units.epoch


def follow(model: torch.nn.Module) -> tuple[int, ...]:
    with atoll.Follower(model, server="127.0.0.1:7070", on_update=lambda it: print(it.versions)) as follower:
        if follower.wait(version=3, timeout_s=2.0) or follower.update():
            print(follower.run, follower.generation)
        versions: tuple[int, ...] = follower.versions
    return versions


def learners_of_trainers() -> list[atoll.Learner | None]:
    callback = transformers.AtollCallback("127.0.0.1:7070", "eu-west")
    callback.close(drain=False)
    return [callback.learner, lightning.AtollCallback(["127.0.0.1:7070"], name="us-east", module="net").learner]


def accelerated(accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    with AcceleratedLearner(accelerator, model, optimizer, server="127.0.0.1:7070", name="eu-west") as learner:
        learner.step([1, 2, 3], loss=0.5)
        return learner.metrics()


def mistakes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    learner = atoll.Learner(model, optimizer, server=7070)  # type: ignore[arg-type]
    learner.step(tokens="all")  # type: ignore[arg-type]
    learner.stop()  # type: ignore[attr-defined]
    atoll.Learner(model, optimizer, "127.0.0.1:7070", adoption="replace")  # type: ignore[arg-type]
    merged: str = learner.stats().merged  # type: ignore[assignment]
    tokens: str = count_tokens(merged)  # type: ignore[assignment]
    print(tokens, learner.stats().islands)  # type: ignore[attr-defined]
    learner.units(["a", "b"], "text")  # type: ignore[arg-type]
    Rows(["a", "b"], unit="8")  # type: ignore[arg-type]
    TokenFile("tokens.bin", tokens=33)  # type: ignore[call-arg]
    for_more: str = learner.units(Rows(["a"], 1), "text").more()  # type: ignore[assignment]
    follower = atoll.Follower(model, server=7070)  # type: ignore[arg-type]
    follower.wait(timeout_s="2 s")  # type: ignore[arg-type]
    transformers.AtollCallback("127.0.0.1:7070").learner.step(1)  # type: ignore[union-attr]
    lightning.AtollCallback("127.0.0.1:7070", module=2)  # type: ignore[arg-type]
    metrics: list[str] = AcceleratedLearner(None, model, optimizer, "127.0.0.1:7070").metrics()  # type: ignore[assignment]
    print(for_more, metrics)
