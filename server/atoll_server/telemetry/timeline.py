"""Keeps the newest rounds for people and measures the durations of their phases for Prometheus.

The timeline subscribes to the journal and does not influence rounds. Times are monotonic seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import assert_never

from atoll_server.rounds import syncer_events as ev
from atoll_server.telemetry import entries
from atoll_server.telemetry.entries import Entry
from atoll_server.telemetry.metrics import Metrics

MAX_ROUNDS, MAX_ANSWERS = 256, 20_000  # limits on kept finished rounds and their answers; few rounds are unfinished


@dataclass(slots=True)
class Answer:
    """One learner's answer to a round. late: whether the contribution answers an earlier round or missed the close."""

    began_at: float | None = None  # arrival time of its first frame
    durable_at: float | None = None
    adopted_at: float | None = None
    declined: str = ""
    late: bool = False
    weight: float = 0.0
    staleness: float = 0.0


@dataclass(slots=True)
class Round:
    """One round, from its opening to its merge or lapse."""

    fragment: int
    cycle: int
    opened_at: float
    quorum_at: float | None = None
    closed_at: float | None = None
    merged_at: float | None = None  # time when its merge was computed
    published_at: float | None = None
    version: int = 0
    lapsed: bool = False
    reason: str = ""  # the reason why the round closed
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether only adoptions can still change this round."""
        return self.lapsed or self.published_at is not None

    def answer(self, learner: str) -> Answer:
        """Returns a learner's answer. Adds an empty answer first if there is none."""
        return self.answers.setdefault(learner, Answer())


class Timeline:
    """The kept rounds, keyed by (fragment, cycle) and by the (fragment, version) of their merges."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._rounds: OrderedDict[tuple[int, int], Round] = OrderedDict()
        self._newest: dict[int, Round] = {}  # the newest round of each fragment
        self._made: dict[tuple[int, int], Round] = {}  # by fragment and version: the round that made the version

    def newest(self) -> Iterator[Round]:
        """Yields the kept rounds, newest first."""
        return reversed(self._rounds.values())

    def on(self, entry: Entry, now: float) -> None:
        """Records an entry if the entry is about a round. now: monotonic seconds."""
        match entry:
            case entries.RoundOpened():
                self._opened(entry, now)
            case entries.UploadBegan():
                self._began(entry, now)
            case entries.Acknowledged():
                self._acknowledged(entry, now)
            case entries.Declined():
                self._declined(entry.learner, entry.fragment, entry.cycle, entry.reason)
            case entries.ArrivalRefused():
                key = entry.fate.key
                self._declined(key.learner, key.fragment, entry.cycle, "its contribution was refused")
            case entries.RoundClosed():
                self._closed(entry.merge, now)
            case entries.RoundLapsed():
                self._lapsed(entry.lapse, now)
            case entries.MergeComputed():
                self._computed(entry, now)
            case entries.Published():
                self._published(entry.merge, now)
            case entries.Adopted():
                self._adopted(entry, now)
            case (
                entries.OfTheRun()
                | entries.OfLearners()
                | entries.OfFronts()
                | entries.OfCallers()
                | entries.TurnedAway()
                | entries.Clamped()
                | entries.PendingRefused()
            ):
                pass
            case _:
                assert_never(entry)

    def _opened(self, entry: entries.RoundOpened, now: float) -> None:
        opened = Round(entry.fragment, entry.cycle, now)
        self._rounds[entry.fragment, entry.cycle] = opened
        self._newest[entry.fragment] = opened
        self._prune()

    def _began(self, entry: entries.UploadBegan, now: float) -> None:
        fragment = entry.key.fragment
        seen = self._rounds.get((fragment, entry.cycle)) or self._newest.get(fragment)
        if seen is not None:
            answer = seen.answer(entry.key.learner)
            answer.began_at = answer.began_at or now
            answer.late = seen.cycle != entry.cycle

    def _acknowledged(self, entry: entries.Acknowledged, now: float) -> None:
        seen = self._newest.get(entry.key.fragment)
        if seen is not None:
            answer = seen.answer(entry.key.learner)
            answer.durable_at = now
            answer.late = seen.cycle != entry.cycle or seen.closed_at is not None

    def _declined(self, learner: str, fragment: int, cycle: int, reason: str) -> None:
        seen = self._rounds.get((fragment, cycle))
        if seen is not None:
            seen.answer(learner).declined = reason

    def _lapsed(self, lapse: ev.Lapse, now: float) -> None:
        seen = self._close(lapse.fragment, lapse.cycle, lapse.cause, lapse.reason, None, now)
        seen.lapsed = True
        self._metrics.rounds.labels("lapsed").inc()

    def _computed(self, entry: entries.MergeComputed, now: float) -> None:
        seen = self._made.get((entry.fragment, entry.version))
        if seen is None:
            return
        seen.merged_at = now
        if seen.closed_at is not None:
            self._metrics.merge_seconds.observe(now - seen.closed_at)

    def _adopted(self, entry: entries.Adopted, now: float) -> None:
        seen = self._made.get((entry.fragment, entry.version))
        if seen is None:
            return
        answer = seen.answer(entry.learner)
        if seen.published_at is not None and answer.adopted_at is None:
            answer.adopted_at = now
            self._metrics.adopt_seconds.observe(now - seen.published_at)

    def _prune(self) -> None:
        """Drops the oldest finished rounds beyond the limits. At most one round per fragment is unfinished."""
        kept = sum(len(seen.answers) for seen in self._rounds.values())
        for place, seen in list(self._rounds.items()):
            if len(self._rounds) <= MAX_ROUNDS and kept <= MAX_ANSWERS:
                break
            if seen.finished:
                kept -= len(self._rounds.pop(place).answers)
                self._made.pop((seen.fragment, seen.version), None)

    def _close(
        self, fragment: int, cycle: int, cause: ev.Cause, reason: str, quorum_at: float | None, now: float
    ) -> Round:
        seen = self._rounds.setdefault((fragment, cycle), Round(fragment, cycle, now))
        seen.closed_at = now
        seen.reason = reason
        seen.quorum_at = quorum_at
        self._metrics.closed.labels(cause.value).inc()
        if quorum_at is not None:
            self._metrics.quorum_wait.observe(quorum_at - seen.opened_at)
            self._metrics.grace_wait.observe(now - quorum_at)
        return seen

    def _closed(self, merge: ev.Merge, now: float) -> None:
        seen = self._close(merge.fragment, merge.cycle, merge.cause, merge.reason, merge.quorum_at, now)
        seen.version = merge.version
        for share in merge.shares:
            answer = seen.answer(share.key.learner)
            if merge.cause is ev.Cause.LATE and merge.fragment in self._newest:  # late work answers the newest round
                came = self._newest[merge.fragment].answer(share.key.learner)
                answer.began_at = came.began_at
                answer.durable_at = came.durable_at
                answer.late = True
            answer.weight += share.weight
            answer.staleness = max(answer.staleness, share.staleness)
            answer.late = answer.late or answer.durable_at is None  # the contribution arrived between rounds
        self._made[merge.fragment, merge.version] = seen

    def _published(self, merge: ev.Merge, now: float) -> None:
        seen = self._made.get((merge.fragment, merge.version))
        if seen is None:
            return
        seen.published_at = now
        if seen.merged_at is not None:
            self._metrics.publish_seconds.observe(now - seen.merged_at)
        self._metrics.rounds.labels("merged").inc()
        for answer in seen.answers.values():
            if answer.weight:
                self._metrics.staleness.observe(answer.staleness)
                self._metrics.weight.observe(answer.weight)


def slowest(seen: Round, most: int) -> list[tuple[str, Answer]]:
    """Returns up to `most` learners with their answers, beginning with those that delayed the round most.

    Learners without a durable contribution come first, then those with the latest contributions. Learners that declined
    come last.
    """

    def place(each: tuple[str, Answer]) -> tuple[bool, bool, float, str]:
        name, answer = each
        return bool(answer.declined), answer.durable_at is not None, -(answer.durable_at or 0.0), name

    return list(islice(sorted(seen.answers.items(), key=place), most))
