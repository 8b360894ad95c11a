"""A model that does not fit in a core's memory is refused in advance, with the memory that it needs."""

from __future__ import annotations

from atoll.errors import LearnerError
from atoll_server import memory_budget

from tests.end_to_end.world import Trainee, core


def test_a_model_that_fits_is_accepted():
    assert memory_budget.too_much(1_000_000, None) == ""
    assert memory_budget.too_much(124_000_000, 3 << 30) == ""


def test_a_model_that_does_not_fit_is_refused_with_the_needed_memory():
    reason = memory_budget.too_much(12_000_000_000, 16 << 30)
    assert "12000000000 trainable parameters" in reason
    assert "needs 139.2 GiB" in reason
    assert "--memory gives 16.0" in reason
    assert "this machine or container has" in memory_budget.too_much(1 << 50, None)


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory_budget, "CGROUPS", (tmp_path / "absent", limit))
    limit.write_text("1073741824\n")
    assert memory_budget.machine_bytes() == 1 << 30
    limit.write_text("max\n")
    assert memory_budget.machine_bytes() > 1 << 30


def test_the_learner_of_a_too_large_model_ends_with_that_line(tmp_path):
    with core(tmp_path, "--memory", "512MiB") as running:
        trainee = Trainee(running.address, "large", lambda _: True)
        trainee.start()
        trainee.join(30)
        assert isinstance(trainee.error, LearnerError)
        assert "--memory gives 0.5" in str(trainee.error)
        assert "trainable parameters" in str(trainee.error)
