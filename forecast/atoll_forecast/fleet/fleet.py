"""The learners and syncers of a whole run in virtual time.

The fleet does not train. It calls the methods of a `Work` for each change of a learner's parameters, in order. The same
fleet therefore serves simulations without parameters and runs that train models (benchmarks/quality). This package
reads no clock, so that a seed always gives the same events.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from random import Random

from atoll_server.merging.merge import weight
from atoll_server.rounds import syncer_events as ev
from atoll_server.rounds.pacing import Pacing, Position
from atoll_server.rounds.round_state import RoundState
from atoll_server.rounds.syncer import Syncer, rounds_in_flight
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.settings import RunSettings

from atoll_forecast.fleet.learners import FleetLearner, LearnerSpec, LearnerTimes, Published, Ready, Work

DRAIN_STEPS = 4.0  # number of steps for which a leaving learner waits for contributions in flight
PER_BOUNDARY = 8  # limit on adoptions, and on answered rounds, at one step boundary; as in atoll.fragments.exchange
MIN_WAIT_S = 0.001  # shortest time between two timer events, as in a core


class Fleet:
    """The learners of a run, and the syncers of its shards. specs: one per learner. work: training that the fleet
    calls.

    shards: number of shards, which get the fragments in turn. merge_s: seconds from a round's end to its update.
    overlap: number of steps after which a learner waits for the merge of its contribution. With 0, as in the original
    DiLoCo (arXiv 2311.08105), the learner waits immediately. With infinity, as in Atoll, it never waits.
    """

    def __init__(
        self,
        settings: RunSettings,
        fragments: int,
        specs: Sequence[LearnerSpec],
        work: Work,
        *,
        merge_s: float = 0.0,
        overlap: float = math.inf,
        seed: int = 0,
        shards: int = 1,
    ) -> None:
        self.now = 0.0
        self.tokens = 0
        self._ending = False
        self.rounds = {index: RoundState() for index in range(fragments)}
        self.syncers = [
            Syncer(
                settings,
                {index: rounds for index, rounds in self.rounds.items() if index % shards == number},
                weight,
                pacing=pacing,
            )
            for number, pacing in enumerate(_pacings(settings, fragments, shards))
        ]
        self._inner_steps = settings.inner_steps
        self._position = Position(0.0, 0.0, 0.0)
        self.work = work
        self._merge_s = merge_s
        self._overlap = overlap
        self.learners = {
            spec.name: FleetLearner(spec, Random(f"{seed}/{spec.name}"))  # noqa: S311 - not a secret
            for spec in sorted(specs, key=lambda spec: spec.name)
        }
        self.lapses = 0
        self.merges: list[ev.Merge] = []
        self._newest: dict[int, Published] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._wake_at: float | None = None

    def run(self, until: Callable[[Fleet], bool]) -> None:
        """Runs until `until` returns True, and then lets all learners leave.

        Raises RuntimeError if no events are left before that.
        """
        for learner in self.learners.values():
            self._at(learner.spec.joins_at_s, self._of(learner, self._begin))
        while self._queue:
            self.now, _, happens = heapq.heappop(self._queue)
            happens()
            if not self._ending and until(self):
                self._ending = True
        if not self._ending:
            raise RuntimeError("no events are left before the end: every learner has left")

    @property
    def accounts(self) -> dict[str, LearnerTimes]:
        """The time account of each learner, by name."""
        return {name: learner.account for name, learner in self.learners.items()}

    # ------------------------------------------------------------------------------ learners

    def _begin(self, learner: FleetLearner) -> None:
        if self._ending:  # the run ends, so the learner does not return
            learner.left = True
            self._tell(learner, ev.Left(learner.spec.name))
            return
        learner.incarnation += 1
        learner.alive = True
        learner.waits = False
        learner.steps = 0
        learner.ready.clear()
        learner.due.clear()
        learner.flying.clear()
        self.work.begin(learner.spec.name)
        self._tell(learner, ev.Joined(learner.spec.name, learner.incarnation))
        self._go_on(learner)
        if math.isfinite(learner.spec.between_failures_s):
            life_s = learner.random.expovariate(1 / learner.spec.between_failures_s)
            self._at(self.now + life_s, self._of(learner, self._die))

    def _go_on(self, learner: FleetLearner) -> None:
        jitter = max(0.1, learner.random.gauss(1.0, learner.spec.jitter)) if learner.spec.jitter else 1.0
        learner.step_s = learner.spec.step_s * jitter
        learner.boundary_at = self.now + learner.step_s
        self._at(learner.boundary_at, self._of(learner, self._boundary))

    def _boundary(self, learner: FleetLearner) -> None:
        name = learner.spec.name
        self.work.train(name)
        learner.steps += 1
        learner.account.steps += 1
        learner.account.trained_s += learner.step_s
        self.tokens += learner.spec.tokens
        self._tell(learner, ev.Reported(name, learner.steps, paused=False))
        for _ in range(PER_BOUNDARY):
            self._adopt_one(learner)
        for _ in range(PER_BOUNDARY):
            self._answer_one(learner)
        if self._ending:
            self._leave(learner)
        else:
            self._go_on_or_stand(learner)

    def _go_on_or_stand(self, learner: FleetLearner) -> None:
        learner.waits = any(learner.steps - taken_at >= self._overlap for taken_at in learner.flying.values())
        if not learner.waits:
            learner.account.blocked_s += self.now - learner.boundary_at
            self._go_on(learner)

    def _adopt_one(self, learner: FleetLearner) -> None:
        if not learner.ready:
            return
        fragment = next(iter(learner.ready))
        ready = learner.ready.pop(fragment)
        if ready.merged or ready.drop:
            learner.flying.pop(fragment, None)
        self.work.adopt(learner.spec.name, ready.published, merged=ready.merged, drop=ready.drop)
        self._tell(learner, ev.Adopted(learner.spec.name, fragment, ready.published.version))

    def _answer_one(self, learner: FleetLearner) -> None:
        fragment = next((f for f in learner.due if f not in learner.ready), None)
        if fragment is None:
            return
        cycle = learner.due.pop(fragment)
        if fragment in learner.flying:
            self._decline(learner, fragment, cycle, "its contribution is in flight")
        elif not self._take(learner, fragment, cycle):
            self._decline(learner, fragment, cycle, "no outstanding work for this fragment")

    def _decline(self, learner: FleetLearner, fragment: int, cycle: int, reason: str) -> None:
        self._tell(learner, ev.Declined(learner.spec.name, fragment, cycle, reason))

    def _take(self, learner: FleetLearner, fragment: int, cycle: int) -> bool:
        taken = self.work.take(learner.spec.name, fragment, learner.seq + 1)
        if taken is None:
            return False
        learner.seq += 1
        learner.flying[fragment] = learner.steps
        begins = max(self.now, learner.up_free_at)
        learner.up_free_at = begins + 8 * taken.size_bytes / learner.spec.up_bits_s
        key = ContributionKey(learner.spec.name, learner.incarnation, fragment, learner.seq)
        event = ev.Contributed(key, cycle, taken.base_version, taken.tokens, taken.steps)
        arrives = learner.up_free_at + learner.spec.delay_s
        self._at(arrives, self._of(learner, lambda _: self._on(event)))
        return True

    def _leave(self, learner: FleetLearner) -> None:
        """Sends all outstanding work of a learner. The learner leaves DRAIN_STEPS steps later."""
        if not learner.leaving:
            learner.leaving = True
            max_wait_s = DRAIN_STEPS * learner.spec.step_s
            self._at(self.now + max_wait_s, self._of(learner, self._gone))
        for fragment in self.rounds:
            if fragment not in learner.flying:
                self._take(learner, fragment, 0)

    def _gone(self, learner: FleetLearner) -> None:
        learner.left = True
        goes = max(self.now, learner.up_free_at) + learner.spec.delay_s
        self._at(goes, lambda: self._on(ev.Left(learner.spec.name)))

    def _die(self, learner: FleetLearner) -> None:
        if self._ending or learner.left:
            return
        learner.alive = False
        learner.account.down_s += learner.spec.repair_s
        self._at(self.now + learner.spec.repair_s, self._of(learner, self._begin))

    def _receive(self, learner: FleetLearner, ready: Ready) -> None:
        """Handles the arrival of a published version at a learner."""
        if not learner.alive or learner.left:
            return
        fragment = ready.published.fragment
        before = learner.ready.pop(fragment, None)
        if before is not None:
            ready.merged = ready.merged or before.merged
            ready.drop = ready.drop or before.drop
        learner.ready[fragment] = ready
        if learner.leaving:
            self._adopt_one(learner)
            self._leave(learner)
        elif learner.waits:
            self._adopt_one(learner)
            self._go_on_or_stand(learner)

    def _of(self, learner: FleetLearner, happens: Callable[[FleetLearner], None]) -> Callable[[], None]:
        """Returns an event that does nothing if the learner's process has died, unless it is `_begin`."""
        incarnation = learner.incarnation

        def when() -> None:
            if learner.incarnation == incarnation and (learner.alive or happens == self._begin):
                happens(learner)

        return when

    # ------------------------------------------------------------------------------ core

    def _tell(self, learner: FleetLearner, event: ev.SyncerEvent) -> None:
        """Sends an event to the core, as a message of negligible size."""
        self._at(self.now + learner.spec.delay_s, lambda: self._on(event))

    def _on(self, event: ev.SyncerEvent) -> None:
        for syncer in self._concerned(event):
            for effect in syncer.on(event, self.now):
                self._carry_out(effect)
        self._move()
        wakes = [at for syncer in self.syncers if (at := syncer.next_wake(self.now)) is not None]
        wake_at = min(wakes, default=None)
        if wake_at is not None and not self._over() and (self._wake_at is None or wake_at < self._wake_at):
            self._wake_at = max(wake_at, self.now + MIN_WAIT_S)
            self._at(self._wake_at, self._wake)

    def _over(self) -> bool:
        return all(learner.left for learner in self.learners.values()) and not any(
            rounds.pending for rounds in self.rounds.values()
        )

    def _concerned(self, event: ev.SyncerEvent) -> Sequence[Syncer]:
        """Returns the syncers that an event concerns: the syncer of its fragment, or all syncers."""
        match event:
            case ev.Contributed():
                return (self.syncers[event.key.fragment % len(self.syncers)],)
            case ev.Declined() | ev.Adopted() | ev.Merged():
                return (self.syncers[event.fragment % len(self.syncers)],)
            case _:
                return self.syncers

    def _move(self) -> None:
        """Gives all shards the run's position in its cycle of slots, as the registrar does."""
        fastest_s = self.syncers[0].present(self.now).fastest_step_s
        if len(self.syncers) == 1 or fastest_s is None:
            return
        cycle = len(self.rounds)
        self._position = self._position.moved(cycle, self.now, fastest_s * self._inner_steps / cycle)
        for syncer in self.syncers:
            syncer.position = self._position

    def _wake(self) -> None:
        if self._wake_at is not None and self.now >= self._wake_at:
            self._wake_at = None
            self._on(ev.Ticked())

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.OpenRound():
                for learner in self.learners.values():
                    self._at(self.now + learner.spec.delay_s, self._of(learner, self._asked(effect)))
            case ev.Merge():
                self._at(self.now + self._merge_s, lambda: self._merge(effect))
            case ev.Refuse():
                self._refuse(effect.fragment, effect.refusals)
            case ev.Lapse():
                self.lapses += 1

    def _asked(self, effect: ev.OpenRound) -> Callable[[FleetLearner], None]:
        def asked(learner: FleetLearner) -> None:
            if not learner.leaving:
                learner.due[effect.fragment] = effect.cycle
            if learner.waits:  # the learner waits at a step boundary, and other learners may wait for its answer
                self._answer_one(learner)

        return asked

    def _merge(self, effect: ev.Merge) -> None:
        published = self.work.merge(effect)
        self.merges.append(effect)
        self._newest[effect.fragment] = published
        mine = {share.key.learner: share for share in effect.shares}
        refused = {refusal.key.learner for refusal in effect.refusals}
        for name, learner in self.learners.items():
            share = mine.get(name)
            if share is not None:
                learner.account.staleness.append(share.staleness)
            current = share is not None and share.key.incarnation == learner.incarnation
            self._send(learner, Ready(published, current, name in refused))
        self._on(ev.Merged(effect.fragment, effect.version))

    def _refuse(self, fragment: int, refusals: Sequence[ev.Refusal]) -> None:
        """Sends the newest version to learners whose contribution is refused."""
        for refusal in refusals:
            learner = self.learners[refusal.key.learner]
            if refusal.key.incarnation == learner.incarnation:
                self._send(learner, Ready(self._newest[fragment], merged=False, drop=True))

    def _send(self, learner: FleetLearner, ready: Ready) -> None:
        begins = max(self.now, learner.down_free_at)
        learner.down_free_at = begins + 8 * ready.published.size_bytes / learner.spec.down_bits_s
        arrives = learner.down_free_at + learner.spec.delay_s
        self._at(arrives, self._of(learner, lambda learner: self._receive(learner, ready)))

    def _at(self, when: float, happens: Callable[[], None]) -> None:
        if math.isfinite(when):
            heapq.heappush(self._queue, (when, next(self._count), happens))


def _pacings(settings: RunSettings, fragments: int, shards: int) -> list[Pacing | None]:
    """Returns the slots of each shard, or None for the only shard of a run."""
    if shards == 1:
        return [None]
    counts = [len(range(number, fragments, shards)) for number in range(shards)]
    return [Pacing.of(counts, number, rounds_in_flight(settings, fragments)) for number in range(shards)]
