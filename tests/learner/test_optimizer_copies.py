"""An optimizer's copies of the parameters move with them, so that the next step does not undo an adoption."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from atoll import LearnerError
from atoll.model.optimizer_copies import OptimizerCopies
from torch import nn

from tests.learner.test_movement_watch import Masters
from tests.learner.test_movement_watch_quiet import ScheduleFree
from tests.learner.watched import Watched, mlp


class Lookahead(torch.optim.SGD):
    """Lookahead (Zhang et al. 2019): every k steps, the parameters move half way back to slow weights, which then
    follow.

    hidden: whether the slow weights are outside the optimizer's state.
    """

    def __init__(self, parameters, rate: float, every: int = 5, *, hidden: bool = False) -> None:
        super().__init__(parameters, rate)
        self.every, self.steps = every, 0
        self.slow = defaultdict(dict) if hidden else self.state

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for fast in group["params"]:
                slow = self.slow[fast].setdefault("slow", fast.detach().clone())
                fast.sub_(fast.grad, alpha=group["lr"])
                if self.steps % self.every == self.every - 1:
                    fast.copy_(slow.lerp_(fast, 0.5))
        self.steps += 1


def moved_after_a_step(it: Watched) -> float:
    """Returns the share of an adoption that remains after six more steps."""
    before = torch.cat([p.detach().float().reshape(-1).clone() for p in it.model.parameters()])
    it.adopt()
    it.learner.step(tokens=0)
    adopted = torch.cat([p.detach().float().reshape(-1).clone() for p in it.model.parameters()])
    for _ in range(6):
        it.model.zero_grad(set_to_none=False)
        it._step()
    after = torch.cat([p.detach().float().reshape(-1) for p in it.model.parameters()])
    change = adopted - before
    return float((after - before) @ change / (change @ change))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_named_masters_follow_adoptions(dtype):
    model = mlp(dtype)
    optimizer = Masters(model, 0.05)
    with Watched(model, optimizer, copies=lambda: zip(optimizer.shared, optimizer.masters, strict=True)) as it:
        it.rounds(40)
        assert it.learner.stats().abandoned_tokens == 0
        assert moved_after_a_step(it) == pytest.approx(1, abs=0.05)
        for parameter, master in zip(optimizer.shared, optimizer.masters, strict=True):
            torch.testing.assert_close(master.to(dtype), parameter.detach())


def test_masters_that_the_optimizer_has_instead_of_parameters_can_be_named():
    """apex's O2 and Megatron do this."""
    model = mlp(torch.bfloat16)
    masters = [parameter.detach().float().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, 1e-3)

    def step() -> None:
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)

    pairs = lambda: zip(model.parameters(), masters, strict=True)  # noqa: E731
    with Watched(model, optimizer, step, copies=pairs) as it:
        it.rounds(40)
        assert it.learner.stats().abandoned_tokens == 0
        before = [master.clone() for master in masters]
        it.adopt()
        it.turn()
        assert all((master - old).abs().max() > 1e-3 for master, old in zip(masters, before, strict=True))
    assert it.agent.taken


def test_lookaheads_slow_weights_are_recognised_and_follow():
    model = mlp()
    with Watched(model, Lookahead(model.parameters(), 0.05)) as it:
        it.rounds(40)
        assert moved_after_a_step(it) == pytest.approx(1, abs=0.1)
        assert it.learner.stats().abandoned_tokens == 0


def test_unnamed_slow_weights_end_the_learner_some_steps_after_adoptions():
    model = mlp()
    with (
        pytest.raises(LearnerError, match="averaged weights"),
        Watched(model, Lookahead(model.parameters(), 0.05, hidden=True), others=0.5) as it,
    ):
        it.rounds(60)


def test_schedule_free_z_is_recognised_and_follows():
    model = mlp()
    optimizer = ScheduleFree(model.parameters(), 0.05)
    with Watched(model, optimizer) as it:
        it.turn(10)
        before = [(p.detach().clone(), optimizer.state[p]["z"].clone()) for p in model.parameters()]
        it.adopt()
        it.learner.step(tokens=0)
        for (y, z), p in zip(before, model.parameters(), strict=True):
            torch.testing.assert_close(optimizer.state[p]["z"] - z, p.detach() - y)


def test_a_momentum_is_not_taken_for_a_copy():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.99)
    with Watched(model, optimizer) as it:
        it.turn(30)
        before = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
        it.adopt()
        it.learner.step(tokens=0)
        assert all(map(torch.equal, before, (optimizer.state[p]["momentum_buffer"] for p in model.parameters())))


class Recorded(torch.optim.Optimizer):
    """Has given state tensors."""

    def __init__(self, states: list[tuple[nn.Parameter, dict[str, torch.Tensor]]]) -> None:
        super().__init__([parameter for parameter, _ in states], {})
        self.state.update(states)


def test_a_momentum_of_one_value_is_not_a_copy_although_it_is_near_its_parameter():
    """A scale or a bias may have one value, and the moment of its gradient may be anything."""
    weight, scale = nn.Parameter(torch.ones(16)), nn.Parameter(torch.tensor([0.2]))
    moment = torch.tensor([0.201])
    moments = [(weight, {"exp_avg": torch.full((16,), -0.3)}), (scale, {"exp_avg": moment})]
    for states in (moments, moments[1:]):
        with torch.no_grad():
            scale.fill_(0.2)
        copies = OptimizerCopies([Recorded(states)])
        with copies.following([scale]), torch.no_grad():
            scale.sub_(0.1)
        assert moment.item() == pytest.approx(0.201)
        assert copies.found() == []


def test_a_copy_of_zeros_follows_because_the_other_copies_are_near():
    weight, bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(2))
    optimizer = Recorded([(p, {"master": p.detach().clone()}) for p in (weight, bias)])
    copies = OptimizerCopies([optimizer])
    with copies.following([bias]), torch.no_grad():
        bias.fill_(3.0)
    assert torch.equal(optimizer.state[bias]["master"], bias)
    assert copies.found() == [(0, "master")]


def test_copies_are_set_to_the_parameters_at_a_join():
    model = nn.Linear(4, 4)
    master = model.weight.detach().clone()
    copies = OptimizerCopies([], lambda: [(model.weight, master)])
    with copies.following([model.weight, model.bias], restart=True), torch.no_grad():
        model.weight.fill_(3.0)
    assert torch.equal(master, model.weight)
