"""How rounds went: the newest of them for people, and how long their parts took for Prometheus.

It is told what the syncer is told and what it answered; no rule depends on it. Times are monotonic seconds.
It only shows, so it can stop nothing: a fault in here is logged and counted, and merges go on (`_harmless`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Concatenate, ParamSpec

import structlog

from atoll_server.rounds import events as ev
from atoll_server.telemetry.metrics import Metrics

log = structlog.get_logger()

P = ParamSpec("P")

MOST_ROUNDS, MOST_ANSWERS = 256, 20_000  # kept, of rounds that are finished: others come to an end by themselves


@dataclass(slots=True)
class Answer:
    """One learner in a round. late: what it sent answers an earlier one."""

    began_at: float | None = None  # its first frame came
    durable_at: float | None = None
    adopted_at: float | None = None
    declined: str = ""
    late: bool = False
    weight: float = 0.0
    staleness: float = 0.0


@dataclass(slots=True)
class Round:
    """One round, from open to merged or lapsed."""

    fragment: int
    cycle: int
    opened_at: float
    quorum_at: float | None = None
    closed_at: float | None = None
    merged_at: float | None = None  # computed
    published_at: float | None = None
    version: int = 0
    lapsed: bool = False
    reason: str = ""  # why it closed
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether nothing more happens to it but adoptions."""
        return self.lapsed or self.published_at is not None

    def answer(self, learner: str) -> Answer:
        """What is known of a learner's."""
        return self.answers.setdefault(learner, Answer())


def _harmless(told: Callable[Concatenate[Timeline, P], None]) -> Callable[Concatenate[Timeline, P], None]:
    """A fault in what is only shown must not reach the merge path that tells of it."""

    def telling(self: Timeline, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            told(self, *args, **kwargs)
        except Exception:
            self.faults += 1
            log.exception("the list of rounds is incomplete, merges go on: report this as a fault of Atoll")

    return telling


class Timeline:
    """Rounds by (fragment, cycle), and by the version that they made. faults: of its own; always 0."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.faults = 0
        self._rounds: OrderedDict[tuple[int, int], Round] = OrderedDict()
        self._newest: dict[int, Round] = {}  # opened last, of each fragment
        self._made: dict[tuple[int, int], Round] = {}  # fragment, version -> the round that made it

    def newest(self) -> Iterator[Round]:
        """Newest first."""
        return reversed(self._rounds.values())

    @_harmless
    def began(self, learner: str, fragment: int, cycle: int, now: float) -> None:
        """An upload was let in."""
        seen = self._rounds.get((fragment, cycle)) or self._newest.get(fragment)
        if seen is not None:
            answer = seen.answer(learner)
            answer.began_at = answer.began_at or now
            answer.late = seen.cycle != cycle

    @_harmless
    def on(self, event: ev.Event, effects: Iterable[ev.Effect], now: float) -> None:
        """What the syncer was told, and what it asked for."""
        match event:
            case ev.Contributed() if event.key.fragment in self._newest:
                seen = self._newest[event.key.fragment]
                answer = seen.answer(event.key.learner)
                answer.durable_at = now
                answer.late = seen.cycle != event.cycle or seen.closed_at is not None
            case ev.Declined() if (event.fragment, event.cycle) in self._rounds:
                self._rounds[event.fragment, event.cycle].answer(event.learner).declined = event.reason
            case ev.Merged() if (event.fragment, event.version) in self._made:
                self._published(self._made[event.fragment, event.version], now)
            case ev.Adopted() if (event.fragment, event.version) in self._made:
                seen = self._made[event.fragment, event.version]
                answer = seen.answer(event.learner)
                if seen.published_at is not None and answer.adopted_at is None:
                    answer.adopted_at = now
                    self._metrics.adopt_seconds.observe(now - seen.published_at)
        for effect in effects:
            match effect:
                case ev.OpenRound():
                    self._open(effect, now)
                case ev.Merge():
                    self._merge(effect, now)
                case ev.Lapse():
                    seen = self._close(effect.fragment, effect.cycle, effect.cause, effect.reason, None, now)
                    seen.lapsed = True
                    self._metrics.rounds.labels("lapsed").inc()

    @_harmless
    def computed(self, fragment: int, version: int, now: float) -> None:
        """A merge's numbers are there; they are not durable yet."""
        seen = self._made.get((fragment, version))
        if seen is None:
            return
        seen.merged_at = now
        if seen.closed_at is not None:
            self._metrics.merge_seconds.observe(now - seen.closed_at)

    def _open(self, effect: ev.OpenRound, now: float) -> None:
        opened = Round(effect.fragment, effect.cycle, now)
        self._rounds[effect.fragment, effect.cycle] = self._newest[effect.fragment] = opened
        self._prune()

    def _prune(self) -> None:
        """Drops the oldest finished rounds beyond the limits; of the others there is at most one a fragment."""
        kept = sum(len(seen.answers) for seen in self._rounds.values())
        for place, seen in list(self._rounds.items()):
            if len(self._rounds) <= MOST_ROUNDS and kept <= MOST_ANSWERS:
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

    def _merge(self, effect: ev.Merge, now: float) -> None:
        seen = self._close(effect.fragment, effect.cycle, effect.cause, effect.reason, effect.quorum_at, now)
        seen.version = effect.version
        for share in effect.shares:
            answer = seen.answer(share.key.learner)
            if effect.cause is ev.Cause.LATE and effect.fragment in self._newest:  # it came as an answer to that one
                came = self._newest[effect.fragment].answer(share.key.learner)
                answer.began_at = came.began_at
                answer.durable_at = came.durable_at
                answer.late = True
            answer.weight += share.weight
            answer.staleness = max(answer.staleness, share.staleness)
            answer.late = answer.late or answer.durable_at is None  # it came while no round was open
        self._made[effect.fragment, effect.version] = seen

    def _published(self, seen: Round, now: float) -> None:
        seen.published_at = now
        if seen.merged_at is not None:
            self._metrics.publish_seconds.observe(now - seen.merged_at)
        self._metrics.rounds.labels("merged").inc()
        for answer in seen.answers.values():
            if answer.weight:
                self._metrics.staleness.observe(answer.staleness)
                self._metrics.weight.observe(answer.weight)


def slowest(seen: Round, most: int) -> list[tuple[str, Answer]]:
    """Those who kept it waiting: who began and is not done, then who was durable last; who declined comes last."""

    def place(each: tuple[str, Answer]) -> tuple[bool, bool, float, str]:
        name, answer = each
        return bool(answer.declined), answer.durable_at is not None, -(answer.durable_at or 0.0), name

    return list(islice(sorted(seen.answers.items(), key=place), most))
