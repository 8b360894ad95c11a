"""Movements that the optimizer did not cause are not sent as work. Others are."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections import deque

import pytest
import structlog
import torch
from atoll import LearnerError
from atoll.boundary.movement_watch import MovementWatch
from atoll.fragments.adoption import Fate, PreparedAnchor
from atoll.model.samples import ParameterSamples
from atoll.ranks.division import undivided
from atoll.ranks.rank_group import Agreed, SingleRank, _agreed
from atoll_wire.layout.layout import MergeKind, TensorSpec, plan
from torch import nn

from tests.devices import DEVICES
from tests.learner.late_block import LateBlock
from tests.learner.watched import Watched, mlp


def sgd(model: nn.Module, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3)


@pytest.fixture
def said():
    with structlog.testing.capture_logs() as logs:
        yield logs


# ------------------------------------------------------------------------------ written


def write(model: nn.Module, how: str, values: dict[str, torch.Tensor]) -> None:
    if how == "load_state_dict":
        model.load_state_dict(values)
    elif how == "assign":
        model.load_state_dict({name: value.clone() for name, value in values.items()}, assign=True)
    elif how == "data.copy_":
        for name, parameter in model.named_parameters():
            parameter.data.copy_(values[name])
    elif how == "data":
        for name, parameter in model.named_parameters():
            parameter.data = values[name].clone()
    else:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(0).add_(values[name])


WAYS = ("load_state_dict", "data.copy_", "data", "by hand")


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", WAYS)
def test_weights_that_are_restored_before_leaving_are_not_sent(how, dtype, device, said, rows):
    model = mlp(dtype, device)
    first = copy.deepcopy(model.state_dict())
    with Watched(model, adamw(model)) as it:
        it.rounds(40)
        it.agent.taken.clear()
        write(model, how, first)
    assert not it.agent.taken
    assert it.abandoned
    assert "something other than the optimizer, such as load_state_dict, wrote the parameters" in said[-1]["event"]
    assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("before_step", [True, False])
@pytest.mark.parametrize("how", WAYS)
def test_weights_loaded_inside_the_block_are_replaced_by_the_runs_and_not_sent(how, before_step, said, rows):
    model = mlp()
    optimizer = adamw(model)
    other = mlp()
    nn.init.normal_(other[2].weight, std=0.1)
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.1)
    with Watched(model, optimizer) as it:
        it.rounds(20)
        it.gradient()
        if before_step:
            write(model, how, other.state_dict())
        optimizer.step()
        if not before_step:
            write(model, how, other.state_dict())
        it.agent.taken.clear()
        it.ask()
        it.learner.step(tokens=10)
        it.settle()
        assert not it.agent.taken
        assert it.distance() == 0.0
        assert [entry["log_level"] for entry in said] == ["warning"]
        it.turn(3)
        it.ask()
        it.turn(8)
        assert len(it.agent.taken) == 2
    assert len(said) == 1


def test_weights_loaded_in_each_step_are_never_sent(rows):
    """The load right after a reset must not pass as a projection of the reset values."""
    model = mlp()
    with Watched(model, adamw(model)) as it:
        it.rounds(20)
        it.agent.taken.clear()
        for _ in range(24):
            it.ask()
            write(model, "by hand", {name: torch.randn_like(value) for name, value in model.state_dict().items()})
            it.turn()
        assert not it.agent.taken


def test_work_that_is_dropped_while_it_waits_for_a_verdict_is_not_sent(rows):
    model = mlp()
    with Watched(model, adamw(model)) as it:
        it.rounds(20)
        it.agent.taken.clear()
        it.ask()
        it.turn()
        sent = len(it.agent.taken)
        for fragment, track in enumerate(it.learner._boundary.local.tracks):
            if rows is LateBlock:
                assert (track.flying is not None, sent) == (True, 0), "the work must wait for the verdict"
            fate = Fate(drop=True)
            it.learner._exchange.offer(PreparedAnchor(fragment, 100, track.anchor.copy(), fate))
        it.turn(8)
        assert len(it.agent.taken) == sent
        assert {(track.flying, track.version) for track in it.learner._boundary.local.tracks} == {(None, 100)}


class TwoRanks(SingleRank):
    """The first of two ranks, which owns everything. It carries out each decision one step later."""

    size = 2
    _running: Agreed | None = None

    def step(self, tokens, steps, decide, carry_out, flags):
        self.finish(carry_out)
        self._running = _agreed(tokens, steps, decide(), [flags()])

    def finish(self, carry_out):
        if self._running is not None:
            carry_out(self._running)
            self._running = None


def test_ranks_send_nothing_before_the_verdict_on_earlier_movements(said, rows):
    model = mlp()
    optimizer = adamw(model)
    with Watched(model, optimizer, ranks=TwoRanks()) as it:
        it.rounds(20)
        it.gradient()
        optimizer.step()
        write(model, "by hand", {name: value + 1 for name, value in model.state_dict().items()})
        it.agent.taken.clear()
        it.ask()
        it.learner.step(tokens=10)
        it.settle()
        assert not it.agent.taken
        assert len(said) == 1
        it.turn(3)
        it.ask()
        it.turn(8)
        assert len(it.agent.taken) == 2
        assert LateBlock.waits == 0


def test_ranks_send_nothing_that_is_overwritten_after_they_agreed_to_answer_a_round(said, rows):
    model = mlp()
    with Watched(model, adamw(model), ranks=TwoRanks()) as it:
        it.rounds(20)
        it.settle()
        it.agent.taken.clear()
        it.ask()
        for _ in range(8):
            it.turn()
            write(model, "by hand", {name: value + 1 for name, value in model.state_dict().items()})
        it.settle()
        assert not it.agent.taken
        assert said
    assert not it.agent.taken, "leaving sends none of it either"


def test_a_checkpoint_that_is_loaded_right_after_entering_is_not_sent(said, rows):
    model = mlp()
    with Watched(model, adamw(model)) as it:
        for parameter in model.parameters():
            nn.init.normal_(parameter.data, std=0.2)
        it.ask()
        it.turn()
        it.settle()
        assert not it.agent.taken
        assert it.distance() == 0.0
    assert len(said) == 1


def test_an_interrupted_restore_happens_at_the_next_step(said, monkeypatch, rows):
    model = mlp()
    with Watched(model, adamw(model)) as it:
        it.turn(10)
        write(model, "by hand", {name: value + 1 for name, value in model.state_dict().items()})
        it.ask()
        with monkeypatch.context() as patched, contextlib.suppress(InterruptedError):
            patched.setattr(it.learner._boundary, "_restore", raising)
            it.turn()
        assert not it.agent.taken
        it.learner.step(tokens=10)
        assert it.distance() == 0.0
    assert len(said) == 1


@pytest.mark.parametrize("leaves", [False, True])
def test_work_that_is_kept_back_is_not_sent_if_the_restoring_is_interrupted_before_it_began(
    leaves, said, monkeypatch, rows
):
    model = mlp()
    with Watched(model, adamw(model)) as it:
        it.turn(10)
        write(model, "by hand", {name: value + 1 for name, value in model.state_dict().items()})
        it.ask()
        with monkeypatch.context() as patched, contextlib.suppress(InterruptedError):
            patched.setattr(it.learner._boundary, "_restore", raising)
            it.turn(8)
        if not leaves:
            it.learner.step(tokens=10)
            assert it.distance() == 0.0
    assert not it.agent.taken
    assert len(said) == 1 + leaves


def raising() -> None:
    raise InterruptedError


# ------------------------------------------------------------------------------ undone


class Masters(torch.optim.SGD):
    """An optimizer that steps float32 copies and writes them to the parameters, like apex, DeepSpeed and Megatron."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.shared = list(model.parameters())
        self.masters = [parameter.detach().float().clone() for parameter in self.shared]
        super().__init__(self.shared, rate)

    @torch.no_grad()
    def step(self, closure=None):
        for parameter, master in zip(self.shared, self.masters, strict=True):
            master.add_(parameter.grad.float(), alpha=-self.param_groups[0]["lr"])
            parameter.copy_(master)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_undoes_adoptions_stops_the_learner_with_the_fix_and_sends_no_reversal(
    dtype, device, said, rows
):
    model = mlp(dtype, device)
    with contextlib.suppress(LearnerError), Watched(model, Masters(model, 0.05)) as it:
        it.turn(10)
        it.adopt()
        it.turn()
        with pytest.raises(LearnerError, match=r"undoes adopted updates.*master weights.*copies="):
            it.train_and_ask(40)
        raise LearnerError("as the loop would")
    assert not it.agent.taken
    assert [entry["log_level"] for entry in said] == ["warning", "warning"]


# ------------------------------------------------------------------------------ several in a process


def test_optimizers_step_while_learners_of_other_threads_start_and_end():
    spec = TensorSpec("w", (8, 8), "float32", MergeKind.DIRECTION)
    divisions = undivided(plan([spec], 1))
    MovementWatch(ParameterSamples([nn.Parameter(torch.ones(8, 8))], divisions)).end()
    ended, failed, usual_s = threading.Event(), list[BaseException](), sys.getswitchinterval()

    def steps() -> None:
        parameter = nn.Parameter(torch.ones(4))
        parameter.grad = torch.ones(4)
        optimizer = torch.optim.SGD([parameter], 0.01)
        try:
            while not ended.is_set():
                optimizer.step()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=steps, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    sys.setswitchinterval(1e-5)
    watches = deque(MovementWatch(ParameterSamples([nn.Parameter(torch.ones(8, 8))], divisions)) for _ in range(30))
    for _ in range(300):
        watches.popleft().end()
        watches.append(MovementWatch(ParameterSamples([nn.Parameter(torch.ones(8, 8))], divisions)))
    ended.set()
    sys.setswitchinterval(usual_s)
    for watch in watches:
        watch.end()
    for thread in threads:
        thread.join()
    assert not failed
