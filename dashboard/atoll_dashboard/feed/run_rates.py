"""PURE: computes rates over several windows, and histories of one run, from successive polls."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import LearnerState

from atoll_dashboard.feed.history import History, Rates, ReportedRates
from atoll_dashboard.models.api_models import Event, Run

TOKENS_WINDOW_S = 10.0
BYTES_WINDOW_S = 60.0
RECENT_S = 300.0
MIN_RECENT_S = 60.0  # shorter spans would mostly show the time that learners need to join
LONG_WINDOW_S, LONG_EVERY_S = 3600.0, 60.0  # for the cost per day and recently lost time
MIN_LONG_S = 600.0  # a shorter span says little about a day or a month
SETTLED_S = 10.0  # seconds within which learners report to a restarted core
MIN_RATE_S = 10.0  # a rate over a shorter span would suggest a slow run
RUN, LEARNERS = "run", "learners"
POINTS = {RUN: 480, LEARNERS: 240}  # limits of the histories
TOKENS = "tokens"
LOSS = "loss"
UP = "up"
DOWN = "down"


@dataclass(frozen=True, slots=True)
class Kept:
    """The contents of the history file. poll: run, generation and core's time of the last poll.

    histories: histories by their names in POINTS. position: position of the core's newest event; see ListEventsRequest.
    """

    poll: tuple[str, int, float]
    histories: Mapping[str, History[str]]
    events: Sequence[Event]
    position: tuple[int, int]


class RunRates:
    """The rates of one generation of a run.

    history: columns of the run. learners_history: columns of its learners, named by `column`. bytes: rates of bytes by
    region and direction. long: rates of all bytes, over an hour. lost: rates of lost seconds by learner, over an hour.
    poll: run, generation and core's time of the last poll; None before the first. gap: whether a gap in the histories
    has not ended yet.
    """

    def __init__(self) -> None:
        self.history: History[str] = History(POINTS[RUN])
        self.learners_history: History[str] = History(POINTS[LEARNERS])
        self.poll: tuple[str, int, float] | None = None
        self.gap = False
        self._tokens: ReportedRates[str] = ReportedRates(TOKENS_WINDOW_S)
        self.bytes: Rates[tuple[str, str]] = Rates(BYTES_WINDOW_S)
        self.long: Rates[str] = Rates(LONG_WINDOW_S)
        self.lost: Rates[str] = Rates(LONG_WINDOW_S)
        self._seconds: Rates[str] = Rates(RECENT_S)
        self._moved: defaultdict[tuple[str, str], float] = defaultdict(
            float
        )  # region, direction -> bytes since this dashboard was started
        self._totals: dict[tuple[str, str], int] = {}  # learner, direction -> bytes at the last poll
        self._totals_known = False
        self._live = 0  # live learners at the last point
        self._began_at = math.inf  # time of the first poll
        self._epoch = 0  # the core's epoch at the last poll
        self._bytes_from = math.inf  # time of the first poll of this epoch

    def kept(self, events: Sequence[Event], position: tuple[int, int]) -> Kept:
        """Returns the contents for the history file."""
        assert self.poll is not None, "there is a history after the first poll"
        return Kept(self.poll, {RUN: self.history, LEARNERS: self.learners_history}, events, position)

    def restore(self, kept: Kept) -> None:
        """Continues the histories of an earlier process."""
        self.poll = kept.poll
        self.history, self.learners_history = kept.histories[RUN], kept.histories[LEARNERS]

    def following(self, status: pb.StatusReply) -> RunRates:
        """Returns the rates that a status continues: these, or new rates if its sums began again.

        The sums begin again with another run, and with the next generation after a restore. A new generation continues
        the histories of the same run after a gap.
        """
        if self.poll is None:
            return self
        run, generation, at = self.poll
        if (status.run, status.generation) == (run, generation) and status.at >= at:
            return self
        rates = RunRates()
        if status.run == run and status.at > at:
            rates.history, rates.learners_history, rates.gap = self.history, self.learners_history, True
        return rates

    def take(self, status: pb.StatusReply) -> None:
        """Adds the sums of one poll."""
        self._began_at = min(self._began_at, status.at)
        if status.epoch != self._epoch or self._bytes_from == math.inf:
            # A span with an outage would make the rate too low for a minute.
            self._epoch, self._bytes_from, self.bytes = status.epoch, status.at, Rates(BYTES_WINDOW_S)
        for each in status.learners:
            for way, total in ((UP, each.wire.up), (DOWN, each.wire.down + each.wire.whole)):
                # Differences are per learner: the earlier bytes of a learner that moves stay in its earlier region.
                before = self._totals.get((each.learner, way), 0 if self._totals_known else total)
                self._moved[each.region, way] += max(0, total - before)
                self._totals[each.learner, way] = total
        self.bytes.add(status.at, dict(self._moved))
        self.long.add(status.at, {"all": sum(self._moved.values())}, LONG_EVERY_S)
        for each in status.learners:
            if each.state == LearnerState.LIVE:  # a rate does not include the time that the learner needs to join
                self._tokens.add(status.at, each.learner, each.tokens)
        lost = {each.learner: each.goodput.provisioned_s - each.goodput.useful_s for each in status.learners}
        self.lost.add(status.at, lost, LONG_EVERY_S)
        goodput = {"useful": status.goodput.useful_s, "provisioned": status.goodput.provisioned_s}
        self._seconds.add(status.at, goodput)
        self._totals_known = True
        self.poll = (status.run, status.generation, status.at)

    def tokens_per_s(self, learner: pb.LearnerStatus) -> float | None:
        """Returns a learner's rate of training in tokens per second: 0 unless it is live, None if not yet known."""
        if not self._has_lasted(self._began_at):
            return None
        return self._tokens.rate(learner.learner) if learner.state == LearnerState.LIVE else 0.0

    def sum_of_tokens_per_s(self, learners: Iterable[pb.LearnerStatus]) -> float | None:
        """Returns the rate of these learners, or None if no rate of those that are live is known yet."""
        if self.gap or not self._has_lasted(self._began_at):
            return None
        rates = [self.tokens_per_s(each) for each in learners if each.state == LearnerState.LIVE]
        known = [each for each in rates if each is not None]
        return sum(known) if known or not rates else None

    def bytes_per_s(self, region: str, way: str) -> float | None:
        """Returns a region's rate of the last minute, or None until the core has run for MIN_RATE_S seconds."""
        return self.bytes.rate((region, way)) if self._has_lasted(self._bytes_from) else None

    def _has_lasted(self, since: float) -> bool:
        return self.poll is not None and self.poll[2] - since >= MIN_RATE_S

    def lost_s(self, learner: str) -> float:
        """Returns the seconds that a learner lost in the last `lost.span_s()` seconds."""
        return min(self.lost.grown(learner), self.lost.span_s())

    def recent(self) -> float | None:
        """Returns the goodput of the last five minutes, or None in the first MIN_RECENT_S seconds."""
        provisioned = self._seconds.grown("provisioned")
        if not provisioned or self._seconds.span_s() < MIN_RECENT_S:
            return None
        return self._seconds.grown("useful") / provisioned

    def remember(self, status: pb.StatusReply, run: Run, *, gap: bool) -> None:
        """Adds a point to each history. run: the run's state at the same poll. gap: see `History.add`.

        A restarted core does not know the learners' progress until they report again, so a gap lasts until then.
        """
        self.gap = self.gap or gap
        live = sum(each.state == LearnerState.LIVE for each in status.learners)
        if self.gap and status.uptime_s < SETTLED_S and live < self._live:
            return
        gap, self.gap, self._live = self.gap, False, live
        values = {"goodput": run.goodput.ratio, LOSS: run.loss, TOKENS: run.tokens_per_s}
        values |= {UP: run.wire.up_bytes_per_s, DOWN: run.wire.down_bytes_per_s}
        self.history.add(status.at, _known(values), gap=gap)
        losses = {column(LOSS, each.learner): each.loss for each in status.learners}
        tokens = {column(TOKENS, each.learner): self.tokens_per_s(each) for each in status.learners}
        self.learners_history.add(status.at, losses | _known(tokens), gap=gap)


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def column(name: str, learner: str) -> str:
    """Returns the name of a learner's column in the histories. name: LOSS or TOKENS."""
    return f"{name} {learner}"
