"""Learners that train on leased units, and what truly happened to each unit. The core's accounts must match this.

The units of a simulated learner are handed out by the product's code (`LeasedUnits`, `UnitLog`), without threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from atoll.data.leased_units import LeasedUnit, LeasedUnits
from atoll.data.unit_log import UnitLog
from atoll.errors import LearnerError
from atoll.fragments.exchange import Submission
from atoll_server.data.accounts import Outcome
from atoll_server.processes.core import Core
from atoll_wire import outer_pb2 as pb

from tests.simulation.bookkeeping import Violation, the_shard

if TYPE_CHECKING:
    from tests.simulation.checks import Name, Told
    from tests.simulation.island import Island

CHANCE = 0.15  # share of seeds with a dataset
HANDOVERS = 0.5  # share of these, without a hostile learner, in which a new process must finish the dataset alone
SILENCE_S = (0.5, 2.0, 300.0)
UNITS, EPOCHS = (4, 60), (1, 2)
MOST_SAMPLES, MOST_AT_ONCE = 3, 8  # samples per unit, and per inner step
Place = tuple[int, int]  # lease, ordinal


class DataTruth:
    """The dataset of one world, and what its learners did. silence_s: the core's limit on a learner's silence."""

    def __init__(self, seed: int, chance: float = CHANCE) -> None:
        self._rng = random.Random(f"{seed} data")
        self.wanted = self._rng.random() < chance
        self.silence_s = self._rng.choice(SILENCE_S) if self.wanted else 300.0
        self.dataset = pb.DatasetDeclaration(
            name="d", units=self._rng.randint(*UNITS), epochs=self._rng.randint(*EPOCHS), seed=seed
        )
        self.rng = random.Random(f"{seed} handover")  # a separate stream
        self.may_hand_over = self.wanted and self.rng.random() < HANDOVERS
        self.hands_over = False  # as the world decides; then learners take no step without a unit, as real loops
        self.consumed = False  # whether the registrar has counted every unit as consumed
        self.units: dict[Place, tuple[int, int]] = {}  # unit and epoch, as handed out
        self.steps: dict[Place, int] = {}  # inner step of the process that finished it
        self.sent: dict[Name, frozenset[Place]] = {}  # places that a contribution names
        self.counts: Counter[str] = Counter()

    def feed(self, island: Island) -> UnitFeed | None:
        """Returns the units of a learner with one rank; None for other learners, and in a world without a dataset."""
        return UnitFeed(self, island, self._rng.random()) if self.wanted and len(island.ranks) == 1 else None

    def begun(self, lease: int, unit: LeasedUnit) -> None:
        known = self.units.setdefault((lease, unit.ordinal), (unit.epoch, unit.unit))
        if known != (unit.epoch, unit.unit):
            raise Violation(14, f"unit {unit.ordinal} of lease {lease} was {known}, and is now {unit.epoch, unit.unit}")

    # ------------------------------------------------------------------------------ the core's accounts

    def look(self, core: Core) -> None:
        """Checks that each unit is consumed, leased to one learner, or in the pool."""
        for dataset in core.run.data.datasets.values():
            leases = [each for each in core.run.data.leases.values() if each.dataset == dataset.id]
            held = [unit.position for each in leases for unit in each.units.values() if unit.outcome is Outcome.LEASED]
            outstanding = Counter([*held, *dataset.pool])
            if twice := [each for each, count in outstanding.items() if count > 1]:
                raise Violation(14, f"positions {twice} are handed out twice")
            self.consumed = dataset.consumed == dataset.declared.positions
            if dataset.consumed != dataset.next - len(outstanding):
                text = f"{dataset.consumed} consumed, {len(outstanding)} outstanding"
                raise Violation(14, f"{dataset.next} units were handed out, {text}")

    def counted(self, core: Core, fates: dict[Name, Told]) -> tuple[int, int]:
        """Returns the merged work on units in units x parameters: the true value, and the registrar's.

        fates: of all shards.
        """
        data = core.run.data
        known = sum(each.consumed * data.parameters + each.repeated - each.lost for each in data.datasets.values())
        undecided = (unit for lease in data.leases.values() for unit in lease.units.values())
        known += sum(data.merged_part(unit) for unit in undecided if unit.outcome is Outcome.LEASED)
        return sum(self._parts(core, fates).values()), known

    def _parts(self, core: Core, fates: dict[Name, Told]) -> dict[Place, int]:
        lengths = {fragment.index: fragment.length for fragment in the_shard(core).layout.fragments}
        parts: dict[Place, int] = defaultdict(int)
        for name, told in fates.items():
            if told.fate == pb.FATE_MERGED:
                for place in self.sent.get(name, ()):
                    parts[place] += lengths[name[2]]
        return parts

    def last_account(self, core: Core, fates: dict[Name, Told]) -> None:
        """Checks that every merge is counted, and that consumed units were merged in half of the parameters."""
        self.look(core)
        merged, known = self.counted(core, fates)
        # After a restore, merges can be uncounted: a snapshot has them, but its accounts are older.
        if merged < known or (merged > known and core.run.generation == 1):
            raise Violation(14, f"{merged} units x parameters were merged, the registrar counts {known}")
        parameters, parts = core.run.data.parameters, self._parts(core, fates)
        trained = {self.units[place] for place, part in parts.items() if 2 * part >= parameters}
        for dataset in core.run.data.datasets.values():
            if dataset.consumed > len(trained):
                raise Violation(14, f"{dataset.consumed} units are consumed, but {len(trained)} were merged")
            self.counts["units consumed"] += dataset.consumed
            self.counts["units repeated"] += round(dataset.repeated / parameters)
            self.counts["datasets consumed"] += dataset.consumed == dataset.declared.positions


class NotYetError(Exception):
    """The core has not answered. A real training thread would wait."""


class Queue(LeasedUnits):
    """The product's queue, which never blocks."""

    def _receive(self) -> None:
        if self._asked is not None and not self._asked.done():
            raise NotYetError
        super()._receive()


class UnitFeed:
    """The units that one process trains on. log: of its training thread."""

    def __init__(self, truth: DataTruth, island: Island, seed: float) -> None:
        self._truth, self._island, self._rng = truth, island, random.Random(seed)
        self.log = UnitLog()
        self._queue = Queue(truth.dataset, self, self.log, 0, lambda: None, contextlib.nullcontext)
        self._unit: LeasedUnit | None = None
        self._left = 0  # samples of the unit that are still to be trained
        self._steps: dict[Place, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------ as the agent

    @property
    def run(self) -> tuple[str, int]:
        assert self._island.session is not None, "the learner has joined"
        session = self._island.session.core.session
        return session.run, session.generation

    def lease_units(self, request: Callable[[], pb.LeaseUnitsRequest], after_s: float) -> Future[Any]:
        """See `Leasing`."""
        future: Future[Any] = Future()
        task = asyncio.get_running_loop().create_task(self._ask(future, request, after_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future

    async def _ask(self, future: Future[Any], request: Callable[[], pb.LeaseUnitsRequest], after_s: float) -> None:
        assert self._island.session is not None, "the learner has joined"
        try:
            future.set_result(await self._island.session.lease_units(request, after_s))
        except LearnerError as error:
            future.set_exception(error)

    # ------------------------------------------------------------------------------ as the training loop

    def step(self, number: int) -> None:
        """Trains on the samples of one inner step. number: of the step. Raises LearnerError."""
        for _ in range(self._rng.randint(0, MOST_AT_ONCE)):
            if self._unit is None and not self._begin():
                break
            assert self._unit is not None, "begun above"
            self._left -= 1
            if not self._left:
                self._unit.log.handed = self._unit.ordinal
                self._steps[self._lease_of(self._unit), self._unit.ordinal] = number
                self._unit = None
        self.log.stepped(number)

    def ready(self) -> bool:
        """Returns whether the loop can take a step: it has a unit, or all units are finished."""
        if not self._truth.hands_over:
            return True
        if self._unit is None and not self._queue.finished:
            self.log.settle()
            self._begin()
        return self._unit is not None or self._queue.finished

    def others_wait(self) -> bool:
        """Returns whether other learners may wait for the units of this one, so that it must train on.

        A real loop that has finished all units leaves. These learners stay, and a restarted core may not know that they
        have finished.
        """
        return self._truth.hands_over and not self._truth.consumed

    def waits(self) -> bool:
        """Returns whether the loop waits because other learners hold all remaining units."""
        return self._truth.hands_over and self._unit is None and self._queue._retry_s > 0

    def _begin(self) -> bool:
        try:
            self._unit = self._queue.next()
        except NotYetError:
            return False
        if self._unit is None:
            return False
        self._truth.begun(self._lease_of(self._unit), self._unit)
        self._left = self._rng.randint(1, MOST_SAMPLES)
        return True

    def _lease_of(self, unit: LeasedUnit) -> int:
        return next(lease for lease, log in self.log._leases.items() if log is unit.log)

    def sent(self, taken: Submission, name: Name, after: int, upto: int) -> None:
        """Checks that a contribution of steps `after` + 1 to `upto` names the units that these steps finished."""
        trained = frozenset(place for place, step in self._steps.items() if after < step <= upto)
        named = {(lease, n) for lease, low, high in taken.units for n in range(low + 1, high + 1)}
        if named != trained:
            raise Violation(14, f"{name} names units {sorted(named)}, but contains {sorted(trained)}")
        self._truth.sent[name] = trained
