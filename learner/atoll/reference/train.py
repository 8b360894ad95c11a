"""`atoll learner`: an ordinary PyTorch training loop with Atoll's three lines, and the same loop without them."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import cast

import structlog
import torch
from atoll_wire.errors import UserError
from safetensors.torch import load_file

from atoll.learner import Learner
from atoll.reference import data
from atoll.reference.model import SIZES, Transformer, build
from atoll.reference.settings import JoinSettings, TrainSettings
from atoll.stats import Stats

log = structlog.get_logger()

WARM_UP = 0.05  # fraction of the run's tokens
LAST_LR = 0.1  # fraction of the peak rate
OWN_WARM_UP = 30  # steps at the start of each process, because a restarted process has a new optimizer
SAY_EVERY_S = 5.0
EVALUATION_WINDOWS, EVALUATION_BATCH = 256, 32


class DeviceError(UserError):
    """torch cannot use a device on this machine."""


def optimizer_for(model: Transformer, learning_rate: float) -> torch.optim.AdamW:
    """Returns AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def learning_rate(peak: float, done: float, own_steps: int) -> float:
    """Returns the learning rate: a linear warm-up, then a cosine decay to a tenth of the peak.

    Each process also warms up for a few steps. done: trained fraction of the run's tokens, 0 to 1. If the total is
    unknown, pass WARM_UP, which gives the peak. own_steps: steps of this process so far.
    """
    peak *= min(1.0, (own_steps + 1) / OWN_WARM_UP)
    if done < WARM_UP:
        return peak * max(done, 1e-3) / WARM_UP
    angle = math.pi * min(1.0, (done - WARM_UP) / (1 - WARM_UP))
    return peak * (LAST_LR + (1 - LAST_LR) * (1 + math.cos(angle)) / 2)


def train(settings: TrainSettings, joining: JoinSettings) -> None:
    """Trains as one learner until the run reaches its total tokens, max_steps are done, or SIGTERM or SIGINT arrives.

    The learning rate schedule follows the core's --total-tokens. If the core has no total, the rate stays at its peak.
    With `slow_down` above 1, the learner pauses after each step and trains at 1/slow_down of full speed.
    """
    model, corpus, device = _prepare(settings)
    optimizer = optimizer_for(model, settings.learning_rate)
    tokens = settings.batch * SIZES[settings.size].context
    said = time.monotonic()
    with (
        Leaving() as leaving,
        Learner(
            model,
            optimizer,
            server=joining.servers,
            name=joining.name,
            region=joining.region,
            adoption=joining.adoption,
            connect_timeout_s=joining.connect_timeout_s,
            drain_s=joining.drain_s,
            metrics_listen=joining.metrics_listen,
            metrics_plaintext=joining.metrics_plaintext,
            tls=joining.tls,
            insecure_plaintext=joining.insecure_plaintext,
        ) as learner,
    ):
        leaving.learner = learner
        # The run's tokens include those of earlier processes with this name, except for steps after their last report.
        # A restarted learner therefore continues with batches that it has not trained on.
        first = learner.run_tokens // tokens
        log.info("joined", learner=joining.name, run_tokens=learner.run_tokens, first_batch=first)
        batches = _batches(settings, corpus, joining.name, first)
        steps = 0
        if not learner.total_tokens:
            log.warning(
                "the core has no --total-tokens, so the learning rate stays at its peak, and the run does not end by "
                "itself: restart the core with --total-tokens"
            )
        while (done := _done(learner)) < 1.0 and steps != settings.max_steps and not leaving.asked:
            began = time.perf_counter()
            rate = learning_rate(settings.learning_rate, done, steps)
            loss = inner_step(model, optimizer, next(batches), rate, device)
            learner.step(tokens=tokens, loss=loss)
            steps += 1
            if settings.slow_down > 1.0:
                with learner.pause():
                    time.sleep((settings.slow_down - 1.0) * (time.perf_counter() - began))
            if time.monotonic() - said >= SAY_EVERY_S:
                said, stats = time.monotonic(), learner.stats()
                _say(joining.name, stats, loss)
    stats = learner.stats()
    log.info(
        "left the run",
        learner=joining.name,
        steps=stats.steps,
        tokens=stats.tokens,
        merged=stats.merged,
        refused=stats.refused,
    )


def _done(learner: Learner) -> float:
    return learner.run_tokens / learner.total_tokens if learner.total_tokens else WARM_UP


def _say(name: str, stats: Stats, loss: float) -> None:
    log.info(
        "training",
        learner=name,
        steps=stats.steps,
        run_tokens=stats.run_tokens,
        loss=round(loss, 4),
        merged=stats.merged,
        pending=stats.pending,
        connected=stats.connected,
    )


def train_alone(settings: TrainSettings, stream: str, tokens: int, tell: Callable[[int, float], None]) -> Transformer:
    """Runs the same loop without a core, and returns the trained model.

    stream: the name of a learner, which decides the batches. tokens: number of training tokens. tell: called with each
    step's number and loss.
    """
    model, corpus, device = _prepare(settings)
    optimizer, batches = optimizer_for(model, settings.learning_rate), _batches(settings, corpus, stream)
    steps = tokens // (settings.batch * SIZES[settings.size].context)
    for step in range(steps):
        rate = learning_rate(settings.learning_rate, step / steps, step)
        tell(step, inner_step(model, optimizer, next(batches), rate, device))
    return model


def validation_loss(model: Transformer, corpus: data.Corpus, count: int = EVALUATION_WINDOWS) -> float:
    """Returns the mean loss in nats per byte over `count` fixed windows of validation text."""
    device = next(model.parameters()).device
    windows = data.validation_windows(corpus, count, model.size.context)
    model.eval()
    with torch.inference_mode():
        losses = [model.loss(part.to(device)).item() for part in windows.split(EVALUATION_BATCH)]
    model.train()
    return sum(losses) / len(losses)


def loss_of_file(path: Path, size: str, text: Path | None) -> float:
    """Returns the validation loss of an exported checkpoint in nats per byte. text: see `data.load`.

    This function reads the file only with safetensors and torch.
    """
    model = build(size, 0)
    model.load_state_dict(load_file(path), strict=True)
    return validation_loss(model, data.load(text, SIZES[size].context))


def _prepare(settings: TrainSettings) -> tuple[Transformer, data.Corpus, torch.device]:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = usable_device(settings.device)
    corpus = data.load(settings.data, SIZES[settings.size].context)
    model = build(settings.size, settings.seed).to(device)
    log.info(
        "loaded model and text",
        size=settings.size,
        parameters=sum(p.numel() for p in model.parameters()),
        device=str(device),
        corpus=corpus.sha256[:16],
        training_bytes=len(corpus.training),
    )
    return model, corpus, device


def _batches(settings: TrainSettings, corpus: data.Corpus, stream: str, first: int = 0) -> Iterator[torch.Tensor]:
    context = SIZES[settings.size].context
    return data.batches(corpus.training, settings.batch, context, settings.seed, stream, first)


def usable_device(chosen: str) -> torch.device:
    """Returns the training device. Raises DeviceError if torch cannot compute on it.

    chosen: a device of torch, or "auto" for a GPU if torch finds one, else the CPU.
    """
    if chosen == "auto":
        chosen = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(chosen)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:  # torch raises any of these
        fact = str(error).split("\n")[0].split(" device type at start of device string")[0].split(". ")[0]
        raise DeviceError(f"--device {chosen} cannot be used ({fact}): give auto, cpu or cuda") from error
    return device


def inner_step(
    model: Transformer, optimizer: torch.optim.Optimizer, window: torch.Tensor, rate: float, device: torch.device
) -> float:
    """Takes one optimizer step at this learning rate and returns the loss. window: int64 (batch, context + 1)."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    narrow = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()
    with narrow:
        loss = model.loss(window.to(device))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())


class Leaving:
    """Context manager that handles SIGTERM and SIGINT.

    Set `learner` once the learner has joined. Until then, a signal raises KeyboardInterrupt, which ends the wait for a
    core. Afterwards, a signal only sets `asked` and makes `step` return. The loop should check `asked` after each step
    and end, so that the learner leaves cleanly. Leaving the block restores the old handlers.
    """

    def __init__(self) -> None:
        self.asked = False
        self.learner = cast("Learner | None", None)

    def __enter__(self) -> Leaving:
        self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
        if self.learner is None:
            raise KeyboardInterrupt
        self.learner.leave_soon()
