"""Movements in normal training loops count as work: no warning, nothing dropped, everything sent."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import structlog
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.devices import DEVICES, GPU
from tests.end_to_end.world import small_model, task
from tests.learner.late_block import LateBlock
from tests.learner.merging import Kind, Merging
from tests.learner.watched import Watched, mlp

Case = tuple[nn.Module, torch.optim.Optimizer | list[torch.optim.Optimizer], Callable[[], object] | None]


def sgd(model: nn.Module, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate)


def adamw(model: nn.Module, rate: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), rate)


def plain() -> Case:
    model = mlp()
    return model, adamw(model), None


def fused_on_a_gpu() -> Case:
    model = mlp(device=GPU)
    return model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True), None


def bfloat16() -> Case:
    model = mlp(torch.bfloat16)
    return model, adamw(model), None


def float16() -> Case:
    model = mlp(torch.float16)
    return model, sgd(model), None


def clipped_gradients() -> Case:
    model = mlp()
    optimizer = sgd(model, 0.5)
    return model, optimizer, lambda: (nn.utils.clip_grad_norm_(model.parameters(), 0.1), optimizer.step())


def large_rate_at_first() -> Case:
    model = mlp()
    optimizer = sgd(model, 1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return model, optimizer, lambda: (optimizer.step(), schedule.step())


def warm_up_from_zero() -> Case:
    model = mlp()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 30)
    return model, optimizer, lambda: (optimizer.step(), schedule.step())


def restarted_rate() -> Case:
    model = mlp()
    optimizer = adamw(model, 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 12)
    return model, optimizer, lambda: (optimizer.step(), schedule.step())


def clipped_weights() -> Case:
    """Weight clipping, as in a WGAN's critic. The first clip moves the weights far."""
    model = mlp()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.05, 0.05)

    return model, optimizer, step


def projected_weights() -> Case:
    """Weights that the loop projects to rows of unit length."""
    model = mlp()
    optimizer = sgd(model)

    def step() -> None:
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.div_(parameter.norm(dim=1, keepdim=True))

    return model, optimizer, step


def spectral_norm() -> Case:
    model = mlp()
    parametrizations.spectral_norm(model[2])
    return model, sgd(model), None


def weight_norm() -> Case:
    model = mlp()
    for number in (0, 2, 4):
        parametrizations.weight_norm(model[number])
    return model, adamw(model), None


def decay_by_hand() -> Case:
    model = mlp()
    optimizer = adamw(model)

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 - 1e-3)
        optimizer.step()

    return model, optimizer, step


def averages_swapped_for_evaluation() -> Case:
    model = mlp()
    optimizer = adamw(model)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    turns = iter(range(10**6))

    def step() -> None:
        if next(turns) % 5 == 4:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(average.module.state_dict())
            with torch.no_grad():
                model(torch.randn(4, 16))
            model.load_state_dict(kept)
        optimizer.step()
        average.update_parameters(model)

    return model, optimizer, step


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024).

    The parameters are y in training and x in evaluation; the state has z.
    """

    def __init__(self, parameters, rate: float, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": rate, "beta": beta})
        self.steps, self.training = 0, True

    def _turn(self, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    parameter.data.lerp_(self.state[parameter]["z"].to(parameter.dtype), weight(group["beta"]))

    def eval(self) -> None:
        if self.training:
            self._turn(lambda beta: 1 - 1 / beta)
        self.training = False

    def train(self) -> None:
        if not self.training:
            self._turn(lambda beta: 1 - beta)
        self.training = True

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.detach().clone())
                y.lerp_(z, 1 / self.steps)
                y.add_(y.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / self.steps) - 1))
                z.sub_(y.grad, alpha=group["lr"])


def schedule_free(dtype: torch.dtype = torch.float32) -> Case:
    model = mlp(dtype)
    optimizer = ScheduleFree(model.parameters(), 0.05)
    turns = iter(range(10**6))

    def step() -> None:
        if next(turns) % 5 == 4:
            optimizer.eval()
            with torch.no_grad():
                model(torch.randn(4, 16, dtype=dtype))
            optimizer.train()
        optimizer.step()

    return model, optimizer, step


def schedule_free_bfloat16() -> Case:
    return schedule_free(torch.bfloat16)


def skipped_by_a_scaler() -> Case:
    """Steps that a GradScaler skips because a gradient overflowed."""
    model = mlp()
    optimizer = adamw(model)
    turns = iter(range(10**6))
    return model, optimizer, lambda: optimizer.step() if (turn := next(turns)) > 5 and turn % 4 else None


def accumulated_gradients() -> Case:
    """Several optimizer steps per learner step."""
    model = mlp()
    optimizer = adamw(model)
    return model, optimizer, lambda: [optimizer.step() for _ in range(4)]


def several_optimizers() -> Case:
    model = mlp()
    optimizers = [sgd(model[0]), adamw(nn.ModuleList([model[2], model[4]]))]
    return model, optimizers, lambda: [optimizer.step() for optimizer in optimizers]


def tied_weights() -> Case:
    model = mlp()
    model.append(nn.Linear(8, 8))
    model.append(nn.Linear(8, 8))
    model[6].weight = model[5].weight
    return model, adamw(model), None


class LowRank(nn.Module):
    """LoRA: the base is frozen, and B begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def low_rank() -> Case:
    model = mlp()
    for number in (0, 2, 4):
        model[number] = LowRank(model[number])
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3), None


def compiled() -> Case:
    model = mlp()
    return torch.compile(model, backend="eager"), adamw(model), None


def compiled_step() -> Case:
    model = mlp()
    optimizer = sgd(model)
    return model, optimizer, torch.compile(optimizer.step, backend="eager")


def by_hand() -> Case:
    """A step without torch's optimizers. Only the list of parameters is known."""
    model = mlp()

    @torch.no_grad()
    def step() -> None:
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.05)

    return model, sgd(model), step


CASES = (
    plain, bfloat16, float16, clipped_gradients, large_rate_at_first, warm_up_from_zero, restarted_rate,
    clipped_weights, projected_weights, spectral_norm, weight_norm, decay_by_hand, averages_swapped_for_evaluation,
    schedule_free, schedule_free_bfloat16, skipped_by_a_scaler, accumulated_gradients, several_optimizers, tied_weights,
    low_rank, compiled, compiled_step, by_hand, *((fused_on_a_gpu,) if GPU in DEVICES else ()),
)  # fmt: skip


@pytest.mark.parametrize("others", [0.01, 0.2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_normal_loop_gets_no_warning(case, others, rows):
    model, optimizer, step = case()
    with structlog.testing.capture_logs() as logs, Watched(model, optimizer, step, others=others) as it:
        it.rounds(60)
        taken, trained = len(it.agent.taken), it.learner.stats().steps
        assert LateBlock.waits == 0
    assert [each for each in logs if not each["event"].startswith("buffers changed")] == []
    assert not it.abandoned
    assert taken >= 2 * 8, f"only {taken} contributions in {trained} steps"
    assert len(it.agent.taken) == taken + 2, "leaving must send the rest"


# ------------------------------------------------------------------------------ learners that merge with each other


class Convolution(nn.Module):
    """A model with other memory layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.turned, self.last = nn.Parameter(torch.randn(8, 6).t()), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).mean((2, 3)) @ self.turned.t())


class Tied(nn.Module):
    """A model with a shared scale, and a parameter without values."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.head.weight, self.empty = self.table.weight, nn.Parameter(torch.empty(0))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x)) * self.scale


def to_zero(draw: Callable[[], torch.Tensor]) -> Callable[[nn.Module], torch.Tensor]:
    """Returns a loss whose gradients mostly have a few directions."""
    return lambda model: model(draw()).float().square().mean()


def slow(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, 1e-3)


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).bfloat16()


MERGING = {
    "one parameter": Kind(
        lambda: nn.Linear(1, 1, bias=False), to_zero(lambda: torch.randn(2, 1)), slow, fragments=1
    ),
    "channels_last and transposed": Kind(Convolution, to_zero(lambda: torch.randn(2, 3, 8, 8)), slow),
    "bfloat16": Kind(narrow, to_zero(lambda: torch.randn(4, 16, dtype=torch.bfloat16)), slow),
    "tied": Kind(Tied, to_zero(lambda: torch.randint(0, 32, (8,))), slow),
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("kind", MERGING.values(), ids=MERGING)
def test_normal_learners_with_steps_back_by_chance_get_no_warning(kind):
    for seed in range(25):
        with structlog.testing.capture_logs() as logs, Merging(kind, seed) as it:
            it.turn(60)
        assert logs == [], f"seed {seed}"


@pytest.mark.ci
def test_learners_get_no_warning_after_a_restore_from_a_backup():
    """Converged, AdamW takes small steps. After a restore, some are 100 times as large."""
    random = torch.Generator().manual_seed(0)

    def loss(model: nn.Module) -> torch.Tensor:
        x, y = task(random)
        return nn.functional.cross_entropy(model(x), y)

    for seed in range(6):
        with (
            structlog.testing.capture_logs() as logs,
            Merging(Kind(small_model, loss, lambda m: adamw(m, 3e-3)), seed) as it,
        ):
            it.turn(60)
            backup = it.anchors
            it.turn(240)
            it.back(backup)
            it.turn(30)
        assert logs == [], f"seed {seed}"
