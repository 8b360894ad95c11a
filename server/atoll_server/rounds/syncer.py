"""PURE: decides when rounds open and close and which weights a merge uses.

Rules (design: arXiv 2604.21428; RunSettings contains the numbers):
- A fragment is idle, open (a round collects contributions) or merging. It has at most one round at a time.
- Pace: every H/P steps of the fastest live learner, a round opens for the fragment that has waited longest. At most
  max(1, ceil(tau P / H)) rounds are open or merging. After an outage, missed rounds open at twice this pace, up to one
  round per fragment.
- A round closes when every live learner has answered. It also closes when K fresh contributions have arrived and the
  grace window (Eq. 3) has passed. It closes at its deadline in any case. The deadline depends on how long the missing
  learners usually take to answer.
- A cycle is the number of a fragment's round. A round with nothing to merge lapses: the cycle grows, but the version
  does not.
- A late contribution answers an earlier round, so it has a lower cycle than the open round. The open round does not
  wait for its sender. The contribution neither counts towards the quorum nor starts the grace window.
- Without a grace window (gamma = 0), late contributions do not wait for a round. They are merged when late
  contributions of K learners are pending.
- The weights are divided by the total weight that all counted learners would have without staleness. A merge of few
  learners' work, or of late contributions, is a fraction of an outer step. Staleness is measured in outer steps, not
  merges.
- A contribution that is too stale at the merge is refused, and its learner discards the contribution's work.
- When no learner is expected to contribute, pending contributions are merged immediately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import assert_never

from atoll_server.rounds import syncer_events as ev
from atoll_server.rounds.liveness import LearnerLiveness, LiveLearners, look_after_s, named, smoothed
from atoll_server.rounds.pacing import Pacing, Position
from atoll_server.rounds.round_state import CloseNow, PendingContribution, Phase, RoundState, StayOpen, Weigh
from atoll_server.rounds.syncer_events import Cause
from atoll_server.settings import RunSettings

CATCHING_UP = 2.0  # missed rounds open at this multiple of the normal pace
LOOK_S = 0.05  # longest time without a decision about all fragments, while events of single fragments arrive


class Syncer:
    """The state of all rounds. `on` applies an event and returns the effects that the shard must carry out."""

    def __init__(
        self,
        settings: RunSettings,
        fragments: Mapping[int, RoundState],
        weigh: Weigh,
        *,
        paused: bool = False,
        pacing: Pacing | None = None,
    ) -> None:
        """fragments: the shard's round states, by fragment number. Only the syncer changes them.

        weigh: as in RoundState.settle. pacing: this shard's slots; None if the run has only one shard.
        """
        self.pacing = pacing
        self.position: Position | None = None  # the run's position in its cycle, as last sent by the registrar
        self.settings = settings
        self.weigh = weigh
        self.fragments = fragments
        self.liveness: dict[str, LearnerLiveness] = {}
        self.due_at: float | None = None  # time at which the next round is due; in the past if rounds were missed
        self.opened_at = 0.0  # time when the newest round opened
        self.quorum_s: float | None = None  # smoothed seconds from a round's opening to its quorum
        self.sync_s: float | None = None  # smoothed seconds from a round's close to adoption
        self.paused = paused  # whether an operator paused the run; if so, no round opens, but open rounds still close
        self.looked_at = -math.inf  # time of the last decision about rounds

    def restore(self, liveness: Mapping[str, LearnerLiveness]) -> None:
        """Restores the learners after a core restart. The fragments must already be restored."""
        self.liveness.update(liveness)
        self.due_at = max((rounds.opened_at for rounds in self.fragments.values()), default=None)

    # ------------------------------------------------------------------------------ events

    def on(self, event: ev.SyncerEvent, now: float) -> list[ev.Effect]:
        """Applies one event. Returns the effects in the order in which the shard must carry them out."""
        effects = self._apply(event, now)
        if effects is None:
            return []
        present, fragment = self.present(now), ev.concerned(event)
        if fragment is not None and now < self.looked_at + LOOK_S:
            effects += self._close_if_possible(fragment, present)
            if not any(isinstance(effect, ev.Lapse) for effect in effects):  # otherwise, another round may open
                return effects
        self.looked_at = now
        return effects + self._close_what_can(present) + self._open_what_is_due(present)

    def _apply(self, event: ev.SyncerEvent, now: float) -> list[ev.Effect] | None:
        """Changes the state. Returns None if no round can open or close because of the event."""
        effects: list[ev.Effect] | None = []
        match event:
            case ev.Joined():
                self._joined(event, now)
            case ev.Reported():
                self.liveness[event.learner].hear(event.steps, event.paused, now)
                if now < self.looked_at + look_after_s(len(self.liveness)):
                    effects = None
            case ev.Declined():
                self.fragments[event.fragment].decline(event.learner, event.cycle, event.reason)
            case ev.Contributed():
                effects = self._contributed(event, now)
            case ev.Merged():
                rounds = self.fragments[event.fragment]
                assert rounds.phase is Phase.MERGING, "only a requested merge can end"
                assert event.version == rounds.version + 1, "a merge moves a fragment by exactly one version"
                rounds.version, rounds.phase = event.version, Phase.IDLE
            case ev.Adopted():
                self._adopted(event, now)
                effects = None  # adoptions may be frequent, and no round depends on them
            case ev.Left():
                effects = self._gone(event)
            case ev.Paused():
                self._paused(event.paused, now)
            case ev.Ticked():
                pass
            case _:
                assert_never(event)
        return effects

    def _adopted(self, event: ev.Adopted, now: float) -> None:
        rounds = self.fragments[event.fragment]
        if rounds.closed_at and event.version == rounds.version and event.learner in rounds.adopters:
            rounds.adopters.discard(event.learner)
            awake_since = self.liveness[event.learner].awake_since(rounds.closed_at)
            self.sync_s = smoothed(self.sync_s, now - awake_since)

    def uploading(self, learner: str, fragment: int, now: float) -> None:
        """Postpones the deadline of the fragment's round when a frame arrives. Frames are too frequent to be events."""
        self.liveness[learner].uploading[fragment] = now

    def _paused(self, paused: bool, now: float) -> None:
        if paused != self.paused:
            self.paused, self.due_at = paused, None  # no rounds were missed during a pause
            for observed in self.liveness.values() if not paused else ():
                observed.resume(now)

    def _joined(self, event: ev.Joined, now: float) -> None:
        known = self.liveness.get(event.learner)
        if known is None or known.incarnation != event.incarnation:
            self.liveness[event.learner] = LearnerLiveness(event.incarnation, now, now)
        else:
            known.gone, known.refuse_reason, known.joined_at, known.heard_at = False, "", now, now

    def _contributed(self, event: ev.Contributed, now: float) -> list[ev.Effect]:
        rounds, observed = self.fragments[event.key.fragment], self.liveness[event.key.learner]
        rounds.pending[event.key] = PendingContribution(event.cycle, event.base_version, event.tokens, event.steps)
        observed.uploading.pop(event.key.fragment, None)
        if rounds.asked == event.cycle:
            observed.answer_s = smoothed(observed.answer_s, now - observed.awake_since(rounds.opened_at))
        return self._refuse_all(event.key.learner, observed.refuse_reason)  # set if the learner was evicted

    def _gone(self, event: ev.Left) -> list[ev.Effect]:
        observed = self.liveness.get(event.learner)
        if observed is None:
            return []  # the learner was evicted before the run had parameters, so the syncer does not know it
        observed.gone, observed.refuse_reason = True, event.refuse_reason
        return self._refuse_all(event.learner, event.refuse_reason)

    def _refuse_all(self, learner: str, refuse_reason: str) -> list[ev.Effect]:
        """Refuses a learner's pending contributions, unless `refuse_reason` is empty."""
        effects: list[ev.Effect] = []
        if not refuse_reason:
            return effects
        for index, rounds in self.fragments.items():
            keys = sorted(key for key in rounds.pending if key.learner == learner)
            for key in keys:
                del rounds.pending[key]
            if keys:
                rounds.quorum_at = None  # the quorum may have included the refused contributions
                effects.append(ev.Refuse(index, tuple(ev.Refusal(key, refuse_reason, True) for key in keys)))
        return effects

    # ------------------------------------------------------------------------------ closing

    def _close_what_can(self, present: LiveLearners) -> list[ev.Effect]:
        return [effect for index in self.fragments for effect in self._close_if_possible(index, present)]

    def _close_if_possible(self, index: int, present: LiveLearners) -> list[ev.Effect]:
        rounds, effects = self.fragments[index], list[ev.Effect]()
        if rounds.phase is Phase.IDLE and rounds.pending and not present.anybody_expected:
            effects.append(self._open(index, present.now))
        elif rounds.phase is Phase.IDLE and rounds.pending and self._merges_late(rounds, present):
            rounds.cycle += 1  # a separate cycle, to which no learner is asked to contribute
            effects += self._close(
                index, CloseNow(Cause.LATE, "late contributions are merged without a round"), present
            )
        if rounds.phase is Phase.OPEN:
            if rounds.quorum_at is None and len(fresh := rounds.fresh()) >= self.quorum(present):
                rounds.quorum_at = present.now
                began_at = max(self.liveness[name].awake_since(rounds.opened_at) for name in fresh)
                self.quorum_s = smoothed(self.quorum_s, present.now - began_at)
            decision = self.decide(index, present)
            if isinstance(decision, CloseNow):
                effects += self._close(index, decision, present)
        return effects

    def _merges_late(self, rounds: RoundState, present: LiveLearners) -> bool:
        """Returns whether this fragment's late contributions are merged now, without a round.

        Contributions with cycle 0, such as the last work of a leaving learner, wait for a round.
        """
        late = {key.learner for key, waiting in rounds.pending.items() if waiting.cycle}
        waits = self.settings.grace_ratio > 0 or self.paused or not present.live
        return not waits and len(late) >= self.quorum(present)

    def decide(self, fragment: int, present: LiveLearners) -> StayOpen | CloseNow:
        """Returns whether an open round closes now, together with the reason. Changes no state."""
        rounds, now = self.fragments[fragment], present.now
        if not present.anybody_expected:
            cause = Cause.LEFT if all(observed.gone for observed in self.liveness.values()) else Cause.ALL_SILENT
            return CloseNow(cause, "no learner is expected to answer")
        missing = sorted(present.live - rounds.answered())
        if present.live and not missing:
            return CloseNow(Cause.ALL_ANSWERED, "every live learner has answered")
        deadline, names = self._deadline(fragment, missing, now), named(missing) or "any live learner"
        if now >= deadline:
            return CloseNow(Cause.DEADLINE, f"the deadline passed without {names}")
        if rounds.quorum_at is not None:
            grace_ends = rounds.quorum_at + self.grace_s(present)
            if now >= grace_ends:
                return CloseNow(Cause.GRACE, f"the quorum answered, and the grace window passed without {names}")
            return StayOpen(f"in the grace window, waiting for {names}", min(grace_ends, deadline))
        fresh, needed = len(rounds.fresh()), self.quorum(present)
        return StayOpen(f"{fresh} of {needed} contributions for the quorum, waiting for {names}", deadline)

    def _deadline(self, fragment: int, missing: Sequence[str], now: float) -> float:
        """Returns a round's deadline in monotonic seconds. Each frame from a missing learner postpones the deadline."""
        rounds = self.fragments[fragment]
        latest = rounds.opened_at + max((self.liveness[name].max_wait_s() for name in missing), default=0.0)
        for name in missing:
            frame_at = self.liveness[name].uploading.get(fragment)
            if frame_at is not None:
                latest = max(latest, frame_at + self.liveness[name].max_wait_s())
        return latest if missing else max(latest, now)

    def _close(self, fragment: int, closing: CloseNow, present: LiveLearners) -> list[ev.Effect]:
        rounds = self.fragments[fragment]
        # A learner may have paused after it was asked for a late contribution, so paused learners count here.
        counted = present.live if closing.cause is Cause.LATE else present.counted
        shares, refusals = rounds.settle(counted, self.weigh, self.settings)
        rounds.declined.clear()
        quorum_at, rounds.quorum_at, rounds.closed_at = rounds.quorum_at, None, present.now
        if not shares:
            rounds.phase = Phase.IDLE
            lapse = ev.Lapse(fragment, rounds.cycle, closing.cause, closing.reason)
            return [ev.Refuse(fragment, refusals), lapse] if refusals else [lapse]
        rounds.phase, rounds.adopters = Phase.MERGING, {share.key.learner for share in shares}
        asked = (fragment, rounds.version + 1, rounds.cycle, shares, refusals)
        return [ev.Merge(*asked, rounds.ages[rounds.version + 1], quorum_at, closing.cause, closing.reason)]

    # ------------------------------------------------------------------------------ opening

    def _open_what_is_due(self, present: LiveLearners) -> list[ev.Effect]:
        interval, next_at, now = self.interval_s(present), self._next_open_at(present), present.now
        if interval is None or next_at is None or now < next_at or self._in_flight() >= self.most_in_flight():
            return []
        idle = [index for index, rounds in self.fragments.items() if rounds.phase is Phase.IDLE]
        if not idle:
            return []
        owed = now - interval * len(self.fragments)  # at most one round per fragment
        due_at = interval + (now if self.due_at is None else max(self.due_at, owed))
        if self.pacing is not None and self.position is not None and due_at > now:
            due_at = max(now, self.position.nearest(self.pacing, due_at))
        self.due_at = due_at
        self.opened_at = now
        return [self._open(min(idle, key=lambda index: self.fragments[index].opened_at), now)]

    def _next_open_at(self, present: LiveLearners) -> float | None:
        """Returns the time at which the next round may open, in monotonic seconds.

        Returns None while the run is paused or no learner is live.
        """
        interval = self.interval_s(present)
        if interval is None or self.paused:
            return None
        due_at = present.now if self.due_at is None else min(self.due_at, present.now + interval)
        return max(due_at, self.opened_at + interval / CATCHING_UP)

    def _open(self, fragment: int, now: float) -> ev.OpenRound:
        rounds = self.fragments[fragment]
        rounds.cycle, rounds.phase, rounds.opened_at, rounds.quorum_at = rounds.cycle + 1, Phase.OPEN, now, None
        rounds.asked = rounds.cycle
        return ev.OpenRound(fragment, rounds.cycle)

    # ------------------------------------------------------------------------------ derived

    def present(self, now: float) -> LiveLearners:
        """Returns the live learners at `now`, which most other methods take as an argument."""
        return LiveLearners.at(self.liveness, now)

    def quorum(self, present: LiveLearners) -> int:
        """Returns K, the number of fresh contributions that a round needs for its quorum."""
        return self.settings.quorum.of(len(present.live))

    def interval_s(self, present: LiveLearners) -> float | None:
        """Returns the time between two openings in seconds, which is H/P steps of the fastest live learner.

        Returns None if no learner is live, or if the shard has no fragments.
        """
        fastest = present.fastest_step_s
        return (
            None if fastest is None or not self.fragments else self.settings.inner_steps / len(self.fragments) * fastest
        )

    def most_in_flight(self) -> int:
        """Returns the maximum number of this shard's rounds that are open or merging at the same time."""
        if self.pacing is not None:
            return min(self.pacing.most, len(self.fragments))
        return rounds_in_flight(self.settings, len(self.fragments))

    def grace_s(self, present: LiveLearners) -> float:
        """Returns the length of the grace window in seconds (Eq. 3).

        The length is gamma * (tau * step_time - (quorum_time + sync_time)), but at least 0.
        """
        slack = self.settings.overlap_steps * (present.fastest_step_s or 0.0)
        slack -= (self.quorum_s or 0.0) + (self.sync_s or 0.0)
        return max(0.0, self.settings.grace_ratio * slack)

    def next_wake(self, now: float) -> float | None:
        """Returns the time at which the shard must send Ticked, in monotonic seconds.

        Returns None if nothing can change before the next event.
        """
        present = self.present(now)
        times = [time for index in self.fragments if (time := self._next_look_at(index, present)) is not None]
        next_at = self._next_open_at(present)
        if next_at is not None and self._in_flight() < self.most_in_flight():
            times.append(next_at)
        return min(times, default=None)

    def next_wake_for(self, fragment: int, now: float) -> float | None:
        """Does the same as `next_wake` for a single fragment, and ignores the next opening."""
        return self._next_look_at(fragment, self.present(now))

    def _next_look_at(self, fragment: int, present: LiveLearners) -> float | None:
        rounds, times = self.fragments[fragment], list[float]()
        if rounds.phase is Phase.OPEN:
            decision = self.decide(fragment, present)
            times.append(decision.until if isinstance(decision, StayOpen) else present.now)
        if rounds.pending:
            times.append(present.now + 1.0)  # if no learner is expected by then, pending contributions are merged
        return min(times, default=None)

    def why(self, fragment: int, now: float) -> str:
        """Returns what the fragment is doing or waiting for, as text for people."""
        rounds = self.fragments[fragment]
        if rounds.phase is Phase.OPEN:
            return self.decide(fragment, self.present(now)).reason
        return "merging" if rounds.phase is Phase.MERGING else "between rounds"

    def _in_flight(self) -> int:
        return sum(rounds.phase is not Phase.IDLE for rounds in self.fragments.values())


def rounds_in_flight(settings: RunSettings, fragments: int) -> int:
    """Returns the maximum number of rounds of a run that are open or merging at the same time.

    fragments: P, the number of fragments of the run.
    """
    wanted = math.ceil(settings.overlap_steps * fragments / settings.inner_steps)
    return max(1, min(wanted, fragments))
