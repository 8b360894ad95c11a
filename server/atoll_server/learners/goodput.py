"""PURE: accounts for learner time: goodput and the causes of lost time.

Goodput is useful learner-seconds divided by provisioned learner-seconds.
- Provisioned time runs from a learner's first Join until the learner leaves or the run ends. It includes downtime, but
  excludes announced pauses and the time between leaving and returning.
- Useful time is the time of inner steps whose tokens were merged or are pending. For a dead incarnation, only tokens
  that the core acknowledged are useful.
- The core limits the times that an incarnation reports to the time since the incarnation joined.
- If a step during a silence took far longer than usual, the core assumes that the learner's process was frozen. The
  excess time counts as downtime.

Times are wall-clock seconds, since accounts outlive the core's process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from atoll_server.learners.learner_counters import IncarnationCounters, ShardSums
from atoll_server.learners.plausibility import MaxRates, Rate, counted

SILENT_S = 10.0  # seconds without a report after which a learner counts as silent
RATE_STEPS = 4  # number of steps after which a learner has a rate
SLOW = 2.0  # multiple of the usual step time, up to which a step during a silence counts as training

CAUSES = ("down", "restarting", "joining", "blocked", "thrown_away", "other")


@dataclass(frozen=True, slots=True)
class GoodputTotals:
    """Useful, provisioned and lost time of one or more learners, in learner-seconds.

    lost_s: keyed by cause (see CAUSES).
    """

    useful_s: float
    provisioned_s: float
    lost_s: dict[str, float]

    @property
    def ratio(self) -> float:
        """The goodput, from 0 to 1; 1 if no time was provisioned."""
        return self.useful_s / self.provisioned_s if self.provisioned_s > 0 else 1.0


@dataclass(slots=True)
class TimeAccount:
    """One learner's time account, over all its incarnations."""

    first_joined_at: float
    heard_at: float
    began_at: float = 0.0  # time when the learner's current process started
    left_at: float | None = None
    left_itself: bool = False  # whether the learner left by itself; otherwise, an operator ended it
    away_s: float = 0.0  # seconds between leaving and returning, which are not provisioned
    down_s: float = 0.0
    restarting_s: float = 0.0
    bytes_down: int = 0  # payload bytes of published updates
    bytes_whole: int = 0  # payload bytes of whole fragments and initial parameters, in both directions
    parameters_down: int = 0  # number of parameters in the published updates of bytes_down
    step_time_s: float | None = None  # seconds per inner step, as the core measured last
    loss: float | None = None  # the latest known loss of the current process, or of the one before its first step
    silence_s: float = 0.0  # seconds of silence that no reported step accounts for yet
    woke_at: float = 0.0  # end of the last silence above SILENT_S
    voided_tokens: int = 0  # reported tokens that do not count, because an operator voided them
    undone_tokens: int = 0  # reported tokens that do not count, because a restore discarded them
    current: IncarnationCounters = field(default_factory=IncarnationCounters)
    past: list[IncarnationCounters] = field(default_factory=list)  # one element: the sum over all dead incarnations
    by_shard: dict[int, ShardSums] = field(default_factory=dict)  # a restarted process recomputes its own shard's sums

    def joined(self, now: float, process_age_s: float, returning: bool) -> None:
        """Records that a new incarnation joined.

        The time since the previous incarnation's last report counts as lost, unless that incarnation had left.
        now: wall-clock seconds. process_age_s: seconds since the new process started. returning: whether the learner
        has joined before.
        """
        if returning:
            gap = max(0.0, now - (self.left_at if self.left_at is not None else self.heard_at))
            if self.left_at is not None:
                self.away_s += gap
            else:
                restarting = min(gap, max(0.0, process_age_s))
                self.restarting_s += restarting
                self.down_s += gap - restarting
            self._bury()
        self.began_at = now - min(now, max(0.0, process_age_s))
        self.left_at = None
        self.heard_at = now
        self.silence_s = 0.0
        self.current = IncarnationCounters(joined_at=now)

    def left(self, now: float, *, itself: bool) -> None:
        """Records that the learner left, or that an operator ended it. A silence until then counts as down.

        now: wall-clock seconds. itself: whether the learner left by itself.
        """
        if self.left_at is None:
            self.left_itself = itself
            self.down_s += self._silent_s(now) if self._trains() else 0.0
            self.left_at = now

    def heard(self, now: float, seen: IncarnationCounters, most: MaxRates | None = None) -> None:
        """Records the counters of a report. Limits the reported times to the time since the incarnation joined.

        now: wall-clock seconds. seen: the reported counters, which are changed in place.
        most: limits on the counted steps and tokens per second; None for no limit.
        """
        was = self.current
        seen.said_steps = max(was.said_steps, seen.steps)
        seen.said_tokens = max(was.said_tokens, seen.tokens)
        if most is not None:
            paid_until = was.steps_paid or was.joined_at
            seen.steps, seen.steps_paid = counted(seen.steps, was.steps, most.steps_s, paid_until, now)
            seen.tokens, seen.tokens_paid = was.tokens_counted(seen.tokens, most, now)
        seen.grown_at = now if seen.steps > was.steps else was.grown_at
        seen.joined_at = was.joined_at
        seen.frozen_s = was.frozen_s
        seen.undone_tokens, seen.kept_tokens = was.undone_tokens, was.kept_tokens
        there = max(0.0, now - seen.joined_at)
        for name in ("stepping_s", "blocked_s", "joining_s", "paused_s"):
            said = getattr(seen, name)
            setattr(seen, name, min(max(0.0, said), there) if math.isfinite(said) else 0.0)
        # A learner measures joining_s from `Learner.start()`, but provisioned time begins at its first Join.
        seen.joining_s = min(seen.joining_s, was.joining_s or there)
        if silent_s := self._silent_s(now):
            self.silence_s = self.silence_s + silent_s
            self.woke_at = now
        if seen.said_steps > was.said_steps:
            self._explain(seen, seen.stepping_s - was.stepping_s - was.frozen_s, seen.said_steps - was.said_steps, now)
        seen.stepping_s = max(0.0, seen.stepping_s - seen.frozen_s)
        self.current = seen
        if was.restored_to is not None:  # this report's new tokens were trained on discarded parameters
            # All of them, because those that do not count yet would count later as if they were trained afterwards.
            seen.tokens, seen.tokens_paid = max(seen.tokens, seen.said_tokens), now
            self._count_only(was.restored_to)
            if was.kept_tokens is not None:
                seen.undone_tokens = max(0.0, seen.tokens - seen.abandoned_tokens - was.kept_tokens)
        self.heard_at = max(self.heard_at, now)
        self.left_at = None

    def _explain(self, seen: IncarnationCounters, stepping_s: float, steps: int, now: float) -> None:
        """Splits a silence into training time and frozen time, based on the steps in a later report.

        A learner that only lost its connection kept training, so its new steps account for the whole silence. A process
        that was frozen reports a few steps of long duration. The first report after a silence may contain only steps
        that ended before the silence. A later report then contains the frozen step.
        stepping_s: reported duration of the new steps. steps: number of the new steps. now: wall-clock seconds.
        """
        awake_s = now - self.woke_at
        during_s = min(self.silence_s, stepping_s - awake_s)  # step time that must have passed during the silence
        if during_s > 0.0 and self.step_time_s is not None:
            earlier = max(1.0, steps - awake_s / self.step_time_s)  # steps that the learner took before it woke
            frozen_s = max(0.0, during_s - SLOW * earlier * self.step_time_s)
            seen.frozen_s += frozen_s
            self.down_s += frozen_s
        if during_s > 0.0:
            self.silence_s -= during_s
        if stepping_s + SILENT_S < awake_s:  # all steps in later reports began after the silence
            self.silence_s = 0.0

    def latest_loss(self) -> float:
        """Returns the latest training loss; NaN if unknown. For a learner that has left, returns its last loss."""
        return math.nan if self.loss is None else self.loss

    @property
    def merged_token_parameters(self) -> int:
        """The sum of `ShardSums.merged_token_parameters` over all shards."""
        return sum(sums.merged_token_parameters for sums in self.by_shard.values())

    @property
    def bytes_up(self) -> int:
        return sum(sums.bytes_up for sums in self.by_shard.values())

    @property
    def parameters_up(self) -> int:
        return sum(sums.parameters_up for sums in self.by_shard.values())

    def down(self) -> tuple[int, int]:
        """Returns the payload bytes of published updates that all shards sent, and the parameters in these updates."""
        sums = self.by_shard.values()
        return (
            self.bytes_down + sum(each.bytes_down for each in sums),
            self.parameters_down + sum(each.parameters_down for each in sums),
        )

    def whole(self) -> int:
        """Returns the payload bytes of whole fragments and initial parameters, from all shards."""
        return self.bytes_whole + sum(each.bytes_whole for each in self.by_shard.values())

    def uncounted_tokens(self) -> int:
        """Returns the number of reported tokens that operators voided or restores discarded."""
        return self.voided_tokens + self.undone_tokens

    def counted_tokens(self) -> int:
        """Returns the number of counted tokens, which are those that were neither voided nor discarded by a restore."""
        count: int = self.total("tokens") - self.uncounted_tokens()
        return count

    def void_tokens(self, tokens: int) -> None:
        """Limits the number of counted tokens to `tokens`. The other tokens are voided permanently."""
        self.voided_tokens = max(self.voided_tokens, self.total("tokens") - self.undone_tokens - tokens)

    def restored(self, tokens: int, undone_tokens: float, kept_tokens: float | None = None) -> None:
        """Reduces the number of counted tokens to the number at a restored checkpoint.

        tokens: the learner's counted tokens at the checkpoint. undone_tokens: merged tokens of the current incarnation
        that the restore discarded, as a mean over fragments weighted by their number of parameters.
        kept_tokens: if a backup was restored, the incarnation's merged tokens that remain, as such a mean. A backup
        does not contain the later merges, so only the learner's next report shows how many tokens are lost.
        """
        self._count_only(tokens)
        self.current.undone_tokens = undone_tokens
        self.current.restored_to = tokens
        self.current.kept_tokens = kept_tokens

    def _count_only(self, tokens: int) -> None:
        self.undone_tokens = max(0, self.total("tokens") - self.voided_tokens - tokens)

    def moved(self, *, registrar: bool) -> TimeAccount:
        """Returns a copy for a run whose fragments move to other shards, which compute their own sums again.

        The registrar's copy keeps the traffic and discarded tokens of all shards. In other copies, these are 0.
        """
        if not registrar:
            current = replace(self.current, undone_tokens=0.0)
            return replace(self, bytes_down=0, parameters_down=0, bytes_whole=0, current=current, by_shard={})
        down, parameters = self.down()
        current = replace(self.current, undone_tokens=self.current.undone_tokens + self._undone_elsewhere())
        counted = replace(self, bytes_down=down, parameters_down=parameters, bytes_whole=self.whole())
        return replace(counted, current=current, by_shard={})

    def at(self, shard: int) -> ShardSums:
        """Returns the learner's sums at a shard, which are initially 0. The caller may change them in place."""
        return self.by_shard.setdefault(shard, ShardSums())

    def accepted(self, shard: int, tokens: float, current: bool) -> None:
        """Adds the tokens of an acknowledged contribution, or subtracts them if a contribution is refused later.

        tokens: the contribution's tokens times the fragment's share of all parameters; negative to subtract them.
        current: whether the living incarnation sent the contribution.
        """
        sums = self.at(shard)
        if current or not self.past:
            sums.accepted_tokens += tokens
        else:
            sums.accepted_before += tokens

    def _bury(self) -> None:
        """Adds the counters of the current incarnation, which has ended, to `past`."""
        dead = self.current
        dead.abandoned_tokens = max(self._lost_tokens(), dead.tokens - self._accepted())
        dead.undone_tokens, dead.kept_tokens = 0.0, None
        for sums in self.by_shard.values():
            sums.accepted_before += sums.accepted_tokens
            sums.accepted_tokens = sums.undone_tokens = 0.0
        if not self.past:
            self.past = [dead]
            return
        total = self.past[0]
        for name in (
            "steps",
            "tokens",
            "stepping_s",
            "blocked_s",
            "joining_s",
            "paused_s",
            "abandoned_tokens",
            "frozen_s",
            "said_steps",
            "said_tokens",
        ):
            setattr(total, name, getattr(total, name) + getattr(dead, name))

    def rate(self) -> Rate | None:
        """Returns the learner's training rate, or None if it is not known yet.

        A rate needs at least RATE_STEPS steps, since the first steps include compilation.
        """
        if not self.step_time_s or self.total("steps") < RATE_STEPS:
            return None
        current = self.current
        if current.said_steps:
            return Rate(1 / self.step_time_s, current.said_tokens / current.said_steps)
        # All reported tokens, since those that do not count yet would make the others' tokens implausible.
        return Rate(1 / self.step_time_s, self.total("said_tokens") / self.total("said_steps"))

    def total(self, name: str) -> Any:  # noqa: ANN401
        """Returns the sum of a counter over all incarnations. name: a field of IncarnationCounters."""
        return getattr(self.current, name) + self.earlier(name)

    def earlier(self, name: str) -> Any:  # noqa: ANN401
        """Returns the sum of a counter over all dead incarnations. name: a field of IncarnationCounters."""
        return getattr(self.past[0], name) if self.past else 0

    def balance(self, now: float) -> GoodputTotals:
        """Returns the learner's useful, provisioned and lost time up to `now`, in wall-clock seconds."""
        end = now if self.left_at is None else self.left_at
        provisioned = max(0.0, end - self.first_joined_at - self.away_s - self.total("paused_s"))
        accepted = sum(sums.accepted_before for sums in self.by_shard.values())
        thrown = self.current.thrown_away_s(lost=self._lost_tokens())
        thrown += sum(spent.thrown_away_s(accepted) for spent in self.past)
        useful = max(0.0, min(self.total("stepping_s") - thrown, provisioned))
        silent_s = self._silent_s(now)
        lost = {
            "down": self.down_s + (silent_s if self._trains() else 0.0),
            "restarting": self.restarting_s,
            "joining": self.total("joining_s") + (0.0 if self._trains() else silent_s),
            "blocked": self.total("blocked_s"),
            "thrown_away": thrown,
        }
        lost["other"] = max(0.0, provisioned - useful - sum(lost.values()))
        return GoodputTotals(useful, provisioned, lost)

    def _accepted(self) -> float:
        """Returns the living incarnation's acknowledged tokens."""
        return sum(sums.accepted_tokens for sums in self.by_shard.values())

    def _lost_tokens(self) -> float:
        """Returns the living incarnation's tokens that the learner dropped or restores discarded."""
        lost = self.current.given_up_tokens() + self._undone_elsewhere()
        if self.current.kept_tokens is None:
            return lost
        # After the restore of a backup, the learner dropped work that its first report had already shown as lost.
        tokens = max(self.current.tokens, self.current.said_tokens)
        return min(lost, max(0.0, tokens - self._accepted()))

    def _undone_elsewhere(self) -> float:
        """Returns the living incarnation's merged tokens that a restore discarded in other processes."""
        return sum(sums.undone_tokens for sums in self.by_shard.values())

    def _trains(self) -> bool:
        """Returns whether the current process has sent a report. A process reports only after it has parameters."""
        return bool(self.current.steps or self.current.joining_s)

    def _silent_s(self, now: float) -> float:
        """Returns the seconds since the last report, or 0 if the learner left or reported within SILENT_S."""
        silent_s = now - self.heard_at if self.left_at is None else 0.0
        return silent_s if silent_s > SILENT_S else 0.0

    def as_data(self) -> dict[str, Any]:
        """Returns the account as JSON values, for the run's tables in the ledger.

        The values include the sums at all shards, because a shard in another process may not be attached when the
        registrar starts again.
        """
        spent = {"current": _fields(self.current), "past": [_fields(each) for each in self.past]}
        return _fields(self) | spent | {"by_shard": {str(shard): asdict(sums) for shard, sums in self.by_shard.items()}}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> TimeAccount:
        """Returns the account from which `as_data` created these values."""
        spent = {
            "current": IncarnationCounters(**data["current"]),
            "past": [IncarnationCounters(**each) for each in data["past"]],
        }
        by_shard = {int(shard): ShardSums(**sums) for shard, sums in data.get("by_shard", {}).items()}
        return cls(**(data | spent | {"by_shard": by_shard}))


def _fields(of: TimeAccount | IncarnationCounters) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in fields(of)}


def total_goodput(balances: Iterable[GoodputTotals]) -> GoodputTotals:
    """Returns the sum of the learners' times."""
    parts = list(balances)
    lost = {cause: sum(part.lost_s.get(cause, 0.0) for part in parts) for cause in CAUSES}
    return GoodputTotals(sum(part.useful_s for part in parts), sum(part.provisioned_s for part in parts), lost)
