"""Sequences of events in which seeds once found faults.

A seed changes its meaning when any code draws another random number. A transcript states its events, and its test
asserts that they occurred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

from atoll_server.learners.learner_registry import LearnerRegistry

from tests.simulation.bookkeeping import Violation
from tests.simulation.island import Island
from tests.simulation.network import Weather
from tests.simulation.seed import simulate
from tests.simulation.storm import STORM_S, Storm

Faults = Iterator[tuple[float, Callable[[], None]]]


class Transcript(Storm):
    """A storm with only the given faults."""

    def begin(self) -> None:
        self._world.rotting = self._world.harmed = False
        self._world.harm = self._world.weights.strange = None
        self._world.weights.watched = self._world.late_rows.wanted = False
        self._world.rank_faults.plan_none()
        self._world.network.weather = Weather(0.005, 0.0, 0.0, 0.0, 0.0)
        super().begin()


class LongGoodBye(Transcript):
    """Learners end after the storm, and restart before their Leave calls arrive (seed 445270423)."""

    def _faults(self) -> Faults:
        for name in self._world.names:
            yield STORM_S + 0.1, partial(self._go_slowly, name)

    def _go_slowly(self, name: str) -> None:
        self._world.network.late_s[self._world.islands[name].process] = 1.5
        self._leave(name, away_s=0.5)


def test_a_learner_that_restarts_before_its_leave_arrives_comes_back():
    world = simulate(1, LongGoodBye)
    assert world.counts["started as soon as they had left"] == len(world.names)


class DyingAuditee(Transcript):
    """A restarted core dies a few disk accesses later, during the last account (seed 730002879)."""

    def begin(self) -> None:
        self._world.record = True
        super().begin()

    def _faults(self) -> Faults:
        yield STORM_S, self._when_it_is_back

    def _when_it_is_back(self) -> None:
        world = self._world
        if world.lives["core"] > 1 and world.core is not None and world.core_process is not None:
            world.core_process.countdown = 20
        else:
            world.loop.after(0.01, self._when_it_is_back)


def test_the_last_account_survives_the_death_of_the_core():
    world = simulate(1, DyingAuditee)
    assert world.counts["replays beside a core about to die"] == 1
    assert world.counts["replayed from the start"] == 1


class LateElder(Transcript):
    """A process is cut off before its Join arrives, and a newer process takes its name.

    The newer one loses its connections when the older one returns. Seeds that found this have since changed meaning.
    """

    def _faults(self) -> Faults:
        yield 1.0, self._elder

    def _elder(self) -> None:
        world = self._world
        first = world.islands["a"].process
        for call in [call for call in world.network.calls if call.learner is first]:
            call.hang_up(0.0)  # the core learns immediately that the process is dead
        first.kill()
        world.start_island("a")
        elder = world.islands.pop("a")
        world.zombies.append(elder)
        world.network.part(elder.process)
        world.loop.after(0.55, world.start_island, "a")  # later, so that the processes' start times differ
        self._when_the_younger_is_in(elder)

    def _when_the_younger_is_in(self, elder: Island) -> None:
        world = self._world
        if world.checks.highest["a"] < 2 or not world.islands["a"].counters.connected:
            world.loop.after(0.02, self._when_the_younger_is_in, elder)
            return
        for call in [call for call in world.network.calls if call.learner is world.islands["a"].process]:
            call.cut(0.01)
        world.loop.after(0.03, self._back, elder)

    def _back(self, elder: Island) -> None:
        if elder.process in self._world.network.partitioned:
            self._world.network.heal(elder.process)


def test_a_name_stays_with_the_newer_process():
    assert simulate(4, LateElder).checks.highest["a"] == 2
    with mock.patch.object(LearnerRegistry, "_older", return_value=False):
        assert any(_is_fenced_off(seed) for seed in range(4, 10)), "no seed shows the fault"


def _is_fenced_off(seed: int) -> bool:
    """Returns whether the newer process of `LateElder` loses its name."""
    try:
        simulate(seed, LateElder)
    except Violation as violation:
        return "fenced off" in str(violation)
    return False
