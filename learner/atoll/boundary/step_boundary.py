"""A rank's work between two inner steps: it takes pseudo-gradients that are due and adopts newer anchors.

Rank 0 decides, and all ranks carry out the same decisions in the same order, because this work needs collective calls.
All ranks therefore have the same counters and tracks. In a single-process learner, a signal handler may raise at any
line, and the next boundary completes the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.layout.layout import Layout
from atoll_wire.process.clock import Clock

from atoll.boundary.local_parameters import LocalParameters
from atoll.boundary.movement import Movement
from atoll.boundary.movement_watch import FOUND, MovementWatch
from atoll.boundary.replicas import DRIFTED, ReplicaCheck
from atoll.boundary.round_answers import RoundAnswers
from atoll.errors import LearnerError
from atoll.fragments.adoption import Adopting
from atoll.fragments.exchange import PER_BOUNDARY, BoundaryWork, DueRound, ThreadExchange
from atoll.model.parameters import Parameters
from atoll.ranks.rank_group import (
    END,
    FAILED,
    FLAG_BITS,
    GO_ON,
    RESTORE,
    STAND,
    STOP,
    Agreed,
    Decision,
    RankGroup,
    stopped_by,
)
from atoll.stats import Counters

log = structlog.get_logger()

# Limit on a leaving learner's wait for the fates of its contributions, in seconds and in step times. Open rounds close
# within this time. If all learners leave at the same time, no new round opens.
MIN_WAIT_S, WAIT_STEPS = 1.0, 4.0
STAND_S = 1.0  # while the run is paused, ranks agree again and count the paused time at least this often
UNWATCHED = 1 << 62  # more than any boundary's number: without a watch, contributions may be sent immediately
TORN = "an earlier error interrupted an adoption, so the parameters may be inconsistent: restart the learner"


class Saving(Protocol):
    """Saves checkpoints of the learner, on all ranks at the same step."""

    def flags(self) -> int:
        """Returns SAVE if this rank asks for a checkpoint, SAVING while it writes one, else 0."""

    def save(self, run_tokens: int) -> None:
        """Copies this rank's state and begins to write it in the background. If this fails, it does not raise."""


class StepBoundary:
    """One rank's step boundaries. watch: None except on rank 0. failure: a function that returns the agent's error, or
    None. saving: None if the learner saves no checkpoints. replicas: None for a single process.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        parameters: Parameters,
        local: LocalParameters,
        rounds: RoundAnswers,
        watch: MovementWatch | None,
        exchange: ThreadExchange,
        counters: Counters,
        ranks: RankGroup,
        clock: Clock,
        failure: Callable[[], LearnerError | None],
        saving: Saving | None = None,
        replicas: ReplicaCheck | None = None,
    ) -> None:
        self._name = name
        self._layout = layout
        self._parameters = parameters
        self.local = local
        self._rounds = rounds
        self._watch = watch
        self._exchange = exchange
        self._counters = counters
        self._ranks = ranks
        self._clock = clock
        self._agent_failure = failure
        self._saving = saving
        self._replicas = replicas
        self._undone: LearnerError | None = None
        self._to_restore = False
        self._number = 0  # number of the newest step boundary, which is the same on all ranks
        self._broken = False  # an error interrupted a boundary of several ranks, so their calls no longer match
        self._stood_s = 0.0
        self.run_tokens = 0
        self.total_tokens = 0

    def agree_on_tokens(self) -> None:
        """Tells all ranks the run's token counts before the first step."""
        known = self._counters
        first = self._ranks.agree(lambda: Decision(GO_ON, known.run_tokens, known.total_tokens), self._flags)
        self._count(first)

    # ------------------------------------------------------------------------------ between two inner steps

    def step(self, tokens: int, steps: int = 1) -> float:
        """Does the work of one boundary. Returns how many seconds it waited because the run was paused.

        tokens: number of this rank's training tokens in the step. steps: 1, or 0 if the optimizer's step was skipped.
        Raises LearnerError if the learner cannot continue.
        """
        self._parameters.check_unchanged()
        self._number += 1
        if self._watch is not None:
            self._watch.step(self._number)
        self._rounds.hand_over()
        self._stood_s = 0.0
        if self._broken:
            raise LearnerError(TORN)
        self._broken = self._ranks.size > 1
        self._ranks.step(tokens, steps, self._decide, self._carry_out, self._flags)
        self._broken = False
        return self._stood_s

    def failure(self) -> LearnerError | None:
        """Returns the error that stops this process, or None."""
        return LearnerError(TORN) if self.local.torn else self._undone or self._agent_failure()

    def _failed(self) -> bool:
        return self.failure() is not None

    def _flags(self) -> int:
        """Returns this rank's flags for the next agreement."""
        report = self._replicas.report() if self._replicas is not None else 0
        saving = self._saving.flags() if self._saving is not None else 0
        return report << FLAG_BITS | saving | (FAILED if self._failed() else 0)

    def _decide(self) -> Decision:
        """Returns rank 0's decision. It contains pending work, unless training must first wait, stop or be reset."""
        exchange = self._exchange
        if self._failed():
            return self._decision(STOP)
        if exchange.stands:
            return self._decision(STAND)
        if (found := self._judge()) != GO_ON:
            return self._decision(found)
        if not (exchange.something or exchange.todo):
            return self._decision(GO_ON)
        # With several ranks, an adoption takes two boundaries. Copies of values wait for the coder, so their number is
        # limited, too.
        several, most = self._ranks.size > 1, PER_BOUNDARY - self._rounds.uncoded
        todo = exchange.next(adopted_first=several, most_rounds=most)
        return self._decision(GO_ON, tuple((each.fragment, each.cycle) for each in todo.due), todo)

    def _decision(
        self, request: int, due: tuple[tuple[int, int], ...] = (), todo: BoundaryWork | None = None
    ) -> Decision:
        counters = self._counters
        known, total = counters.run_tokens_after(self.run_tokens), counters.total_tokens
        if todo is None:
            return Decision(request, known, total, due=due, step_s=counters.step_time_s, judged=self._judged)
        adopted = tuple(
            Adopting(new.fragment, new.version, new.checksum, new.fate.q is not None, new.fate.drop, new.fate.restores)
            for new in todo.prepared
        )
        return Decision(request, known, total, tuple(todo.released), adopted, due, counters.step_time_s, self._judged)

    def _judge(self) -> int:
        """Returns RESTORE if code other than the optimizer moved the parameters, STOP if this recurs, else GO_ON."""
        if self._watch is None or self._to_restore:
            return RESTORE if self._to_restore else GO_ON
        work = self._exchange.something or self._exchange.todo or self._rounds.kept_back
        verdict = self._watch.glance(now=bool(work))
        if verdict is Movement.FINE:
            return GO_ON
        if verdict is Movement.COPIES:
            self._undone = LearnerError(FOUND[verdict])
            return STOP
        log.warning(FOUND[verdict], learner=self._name, consequence="the parameters are reset to the run's values")
        self._to_restore = True  # stays set until the restore is complete, because a signal handler may raise earlier
        return RESTORE

    def _carry_out(self, agreed: Agreed) -> None:
        """Carries out the decision that all ranks agreed on. While the run is paused, agrees again until the run
        resumes."""
        self._count(agreed)
        while agreed.decision.request == STAND and not agreed.failed:
            self._stand()
            agreed = self._ranks.agree(self._decide, self._flags)
            self._count(agreed)
        self._counters.paused = False
        self._stop_if_failed(agreed)
        with self._exchange.working:
            if self._ranks.size > 1:
                self._finish_adoptions()  # adoptions of the last agreement, whose values have arrived in the meantime
            if agreed.decision.request == RESTORE:
                self._restore()
            self._compare_replicas(agreed)
            todo = self._todo(agreed.decision)
            self._release(todo)
            for newer in todo.prepared:
                if newer.fate.drop:
                    self._withdraw(newer.fragment)
                self.local.begin(newer)
            if self._ranks.size > 1:
                todo.prepared.clear()
            else:
                self._finish_adoptions()
            self._rounds.answer(self._number)
            self._rounds.hand_over(agreed.decision.judged)
            self._save(agreed)

    def _save(self, agreed: Agreed) -> None:
        if self._saving is not None and agreed.save:
            self._saving.save(self.run_tokens)

    def _count(self, agreed: Agreed) -> None:
        """Counts tokens and steps since the last agreement. Schedules read the same counts on all ranks."""
        self._counters.trained(agreed.tokens, agreed.steps)
        self.run_tokens = agreed.decision.run_tokens + agreed.tokens
        self.total_tokens = agreed.decision.total_tokens

    def _stop_if_failed(self, agreed: Agreed) -> None:
        if agreed.failed:
            raise self.failure() or stopped_by(agreed.failed)

    def _stand(self) -> None:
        """Waits at most STAND_S seconds while the run is paused. Other ranks wait in the next agreement."""
        began, self._counters.paused = self._clock.monotonic(), True
        if self._ranks.is_leader:
            self._exchange.wait_resumed(STAND_S)
        self._stood_s += self._counters.rested(began, self._clock.monotonic())

    # ------------------------------------------------------------------------------ adoptions

    def _todo(self, decision: Decision) -> BoundaryWork:
        """Returns the work that rank 0 decided on."""
        if not self._ranks.is_leader:
            self._exchange.follow(decision.released, decision.adopted, decision.due)
        return self._exchange.todo

    def _release(self, todo: BoundaryWork) -> None:
        """Makes the work of refused contributions outstanding again, unless it must be dropped."""
        while todo.released:
            self._abandon(todo.released[0], self.local.tracks[todo.released[0]].refused())
            todo.released.popleft()

    def _finish_adoptions(self) -> None:
        """Applies the changes of the adoptions that have begun."""
        fragments = self.local.begun
        if not fragments:
            return
        self._parameters.reshard()
        moved = [parameter for number in fragments for parameter in self._parameters.of(self._layout.fragments[number])]
        with self.local.moving(), self._parameters.copies.following(moved):
            for number in fragments:
                self._abandon(number, self.local.finish(number, self._counters.tokens, self._counters.steps))
                version = self.local.tracks[number].version
                self._exchange.adopted.append(pb.Adopted(fragment=number, version=version))
            if self._ranks.size == 1:
                self._exchange.todo.prepared.clear()  # not earlier, because a signal handler may raise
        self.seen(fragments)

    def _restore(self) -> None:
        """Resets all parameters to their anchors and drops outstanding work."""
        fragments = range(len(self.local.tracks))
        self._parameters.reshard()
        with self._parameters.copies.following(self._parameters.values, restart=True), self.local.moving():
            for fragment in fragments:
                self._withdraw(fragment)
                given_up = self.local.restore(fragment, self._counters.tokens, self._counters.steps)
                self._abandon(fragment, given_up)
        self.seen(fragments, reset=True)
        self._to_restore = False

    def _compare_replicas(self, agreed: Agreed) -> None:
        """Makes the replicas of a fragment equal if their samples differ, and reads those of fragments that are due."""
        if self._replicas is None:
            return
        drifted = self._replicas.drifted(agreed.replicas)
        if drifted is not None:
            if self._ranks.is_leader:
                log.warning(DRIFTED, learner=self._name, fragment=drifted, consequence="they are equal again")
            moved = self._parameters.of(self._layout.fragments[drifted])
            self._parameters.reshard()
            with self.local.moving(), self._parameters.copies.following(moved):
                self.local.equalize(drifted)
            self.seen([drifted])
        for fragment, _ in agreed.decision.due:
            self._replicas.read(fragment)

    def _withdraw(self, fragment: int) -> None:
        """Withdraws a contribution that was kept back, because its work is dropped."""
        self._abandon(fragment, self._rounds.withdraw(fragment, "the learner dropped its work"))

    @property
    def _judged(self) -> int:
        """The number of the newest boundary whose movements rank 0's watch has judged."""
        return self._watch.judged if self._watch is not None else UNWATCHED

    def seen(self, fragments: Sequence[int], *, reset: bool = False) -> None:
        """Tells the watch that the learner, and no other code, changed these fragments. reset: after a bad verdict."""
        if self._watch is not None:
            self._watch.adopted(tuple(fragments), reset=reset)

    def _abandon(self, fragment: int, tokens: int) -> None:
        self._counters.abandoned_tokens += tokens * self._layout.fragments[fragment].length / self._layout.parameters

    # ------------------------------------------------------------------------------ leaving

    def drain(self, drain_s: float) -> None:
        """Sends the last pseudo-gradients, including those of fragments whose contribution in flight is merged or
        refused in time.

        drain_s: the time limit in seconds. All ranks call this together. The model stays unchanged, because each owner
        adopts newer anchors in a copy of the values.
        """
        self._rounds.hand_over()
        self._ranks.finish(self._carry_out)
        self._finish_adoptions()
        now = self._clock.monotonic()
        deadline, late = now + drain_s, now + max(MIN_WAIT_S, WAIT_STEPS * self._counters.step_time_s)
        found = Movement.FINE if self._watch is None else self._watch.leave()
        strange = found is not Movement.FINE or self._to_restore
        if strange:
            log.warning(
                FOUND[found or Movement.WRITTEN], learner=self._name, consequence="outstanding work is not sent"
            )
        verdict = Decision(RESTORE if strange else GO_ON, judged=self._judged)
        agreed = self._ranks.agree(lambda: verdict, self._flags)
        while not agreed.failed and agreed.decision.request != END:
            self._save(agreed)
            self._counters.trained(agreed.tokens, agreed.steps)
            self._carry_out_last(agreed.decision)
            agreed = self._ranks.agree(lambda: self._last_decision(deadline, min(late, deadline)), self._flags)

    def _last_decision(self, deadline: float, late: float) -> Decision:
        """Returns rank 0's next decision after the last step: pseudo-gradients that can now be taken, or END."""
        exchange, counters, tracks = self._exchange, self._counters, self.local.tracks
        todo, last = exchange.next(), self._last_takes()
        while todo.due:
            self._rounds.decline(todo.due.popleft(), "the learner is leaving")
        if not todo and not last:
            more = self._clock.monotonic() < late and any(track.later(counters.steps) for track in tracks)
            end = late if more else deadline
            settled = exchange.wait_settled(max(0.0, end - self._clock.monotonic()), fates=more)
            if not more or (not settled and self._clock.monotonic() < end):
                return Decision(END)
            return Decision()
        return self._decision(GO_ON, () if todo else last, todo)

    def _last_takes(self) -> tuple[tuple[int, int], ...]:
        """Returns up to PER_BOUNDARY fragments whose outstanding work can be sent, each with cycle 0 (no round)."""
        counters = self._counters
        ready = [
            (number, 0)
            for number, track in enumerate(self.local.tracks)
            if track.flying is None and track.steps_from < counters.steps and track.tokens_from < counters.tokens
        ]
        return tuple(ready[:PER_BOUNDARY])

    def _carry_out_last(self, decision: Decision) -> None:
        if decision.request == RESTORE:
            for fragment, track in enumerate(self.local.tracks):
                self._withdraw(fragment)
                self._abandon(fragment, track.give_up(self._counters.tokens, self._counters.steps))
        self._rounds.hand_over(decision.judged)
        todo = self._todo(decision)
        self._release(todo)
        while todo.prepared:
            newer = todo.prepared.popleft()
            given_up = self.local.adopt_apart(newer, self._counters.tokens, self._counters.steps)
            self._abandon(newer.fragment, given_up)
        for fragment, _ in decision.due:
            self._rounds.take(DueRound(fragment, 0, 0.0))
