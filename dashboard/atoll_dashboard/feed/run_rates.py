"""PURE: computes rates over several windows, and histories of one run, from successive polls."""

from __future__ import annotations

import math
from collections import defaultdict

from atoll_wire import outer_pb2 as pb

from atoll_dashboard.feed.history import History, Rates
from atoll_dashboard.models.api_models import Run

TOKENS_WINDOW_S = 10.0
BYTES_WINDOW_S = 60.0
RECENT_S = 300.0
MIN_RECENT_S = 60.0  # shorter spans would mostly show the time that learners need to join
LONG_WINDOW_S, LONG_EVERY_S, MIN_LONG_S = 3600.0, 10.0, 60.0  # for the cost per day
LEARNER_POINTS = 240
TOKENS = "tokens"
UP = "up"
DOWN = "down"


class RunRates:
    """The rates of one generation of a run.

    tokens: by learner. bytes: by region and direction. long: all bytes, over an hour.
    """

    def __init__(self) -> None:
        self.history: History[str] = History()
        self.learners_history: History[tuple[str, str]] = History(LEARNER_POINTS)
        self.tokens: Rates[str] = Rates(TOKENS_WINDOW_S)
        self.bytes: Rates[tuple[str, str]] = Rates(BYTES_WINDOW_S)
        self.long: Rates[str] = Rates(LONG_WINDOW_S)
        self._seconds: Rates[str] = Rates(RECENT_S)
        self._moved: defaultdict[tuple[str, str], float] = defaultdict(
            float
        )  # region, direction -> bytes since this dashboard was started
        self._totals: dict[tuple[str, str], int] = {}  # learner, direction -> bytes at the last poll
        self._last: pb.StatusReply | None = None

    def is_another(self, status: pb.StatusReply) -> bool:
        """Returns whether a status is from a different run or generation, or from a restored backup.

        The caller must then start with new rates.
        """
        last = self._last
        if last is None:
            return False
        return (status.run, status.generation) != (last.run, last.generation) or status.at < last.at

    def take(self, status: pb.StatusReply) -> None:
        """Adds the sums of one poll."""
        for each in status.learners:
            for way, total in ((UP, each.wire.up), (DOWN, each.wire.down + each.wire.whole)):
                # Differences are per learner: the earlier bytes of a learner that moves stay in its earlier region.
                before = self._totals.get((each.learner, way), 0 if self._last is not None else total)
                self._moved[each.region, way] += max(0, total - before)
                self._totals[each.learner, way] = total
        self.bytes.add(status.at, dict(self._moved))
        self.long.add(status.at, {"all": sum(self._moved.values())}, LONG_EVERY_S)
        self.tokens.add(status.at, {each.learner: each.tokens for each in status.learners})
        goodput = {"useful": status.goodput.useful_s, "provisioned": status.goodput.provisioned_s}
        self._seconds.add(status.at, goodput)
        self._last = status

    def recent(self) -> float | None:
        """Returns the goodput of the last five minutes, or None in the first MIN_RECENT_S seconds."""
        provisioned = self._seconds.grown("provisioned")
        if not provisioned or self._seconds.span_s() < MIN_RECENT_S:
            return None
        return self._seconds.grown("useful") / provisioned

    def remember(self, status: pb.StatusReply, run: Run) -> None:
        """Adds a point to each history. run: the run's state at the same poll."""
        self.history.add(
            status.at,
            {
                "goodput": run.goodput.ratio,
                TOKENS: run.tokens_per_s,
                "loss": math.nan if run.loss is None else run.loss,
                UP: run.wire.up_bytes_per_s,
                DOWN: run.wire.down_bytes_per_s,
            },
        )
        losses = {("loss", each.learner): each.loss for each in status.learners}
        rates = {(TOKENS, each.learner): self.tokens.rate(each.learner) for each in status.learners}
        self.learners_history.add(status.at, losses | rates)
