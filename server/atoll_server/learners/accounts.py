"""PURE: useful / provisioned learner-seconds, and where the rest went.

Provisioned: from a name's first joining until it leaves or the run ends, downtime included; deliberate pauses are
left out. Useful: time in inner steps whose tokens were merged or are pending. What a learner reports is bounded by
what the core saw: it cannot have trained longer than it was there, a process that was silent for longer than its steps
explain was frozen, and tokens of a dead incarnation count only when the core acknowledged them. Times are wall-clock
seconds, since accounts outlive a core process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from atoll_server.learners.plausibility import Most, Rate, counted

SILENT_S = 10.0
RATE_STEPS = 4  # that a learner has made before others are compared with it
SLOW = 2.0  # times its usual step time: what a step may take that is made while nothing is heard

CAUSES = ("down", "restarting", "joining", "blocked", "thrown_away", "other")


@dataclass(slots=True)
class Spent:
    """Counters of one incarnation, as reported so far."""

    joined_at: float = 0.0
    steps: int = 0
    tokens: int = 0
    stepping_s: float = 0.0
    blocked_s: float = 0.0
    joining_s: float = 0.0
    paused_s: float = 0.0
    abandoned_tokens: float = 0.0
    accepted_tokens: float = 0.0  # acknowledged, mean over fragments weighted by parameters
    grown_at: float = 0.0  # when new steps were last reported; 0: never
    steps_paid: float = 0.0  # see influence.counted; 0: since it joined
    tokens_paid: float = 0.0
    frozen_s: float = 0.0  # of stepping_s as it was said: the process stood, and did not know
    undone_tokens: float = 0.0  # merged, and then left behind when an older checkpoint was restored; as accepted_tokens
    restored_to: int | None = None  # an older checkpoint was restored since its last report: tokens that counted then
    said_steps: int = 0  # as reported; `steps` and `tokens` are what counts of them
    said_tokens: int = 0

    def tokens_counted(self, said: int, most: Most, now: float) -> tuple[int, float]:
        """What counts now of so many tokens, and until when time is used up by that."""
        return counted(said, self.tokens, most.tokens_s, self.tokens_paid or self.joined_at, now)

    def given_up_tokens(self) -> float:
        """By the learner, or with what a restored checkpoint left behind."""
        return self.abandoned_tokens + self.undone_tokens

    def thrown_away_s(self, dead: bool) -> float:
        """Stepping time of tokens that will never be merged."""
        tokens = max(self.tokens, self.said_tokens)
        if not tokens:
            return self.stepping_s if dead else 0.0
        lost = max(self.abandoned_tokens, tokens - self.accepted_tokens) if dead else self.given_up_tokens()
        return self.stepping_s * min(1.0, max(0.0, lost) / tokens)


@dataclass(frozen=True, slots=True)
class Balance:
    """Learner-seconds of one learner, or of all."""

    useful_s: float
    provisioned_s: float
    lost_s: dict[str, float]

    @property
    def ratio(self) -> float:
        """Goodput; 1.0 before anything was provisioned."""
        return self.useful_s / self.provisioned_s if self.provisioned_s > 0 else 1.0


@dataclass(slots=True)
class Account:
    """One learner over all its incarnations."""

    first_joined_at: float
    heard_at: float
    began_at: float = 0.0  # when the process was started that speaks for the learner
    left_at: float | None = None
    away_s: float = 0.0  # between clean good-byes and returns: not provisioned
    down_s: float = 0.0
    restarting_s: float = 0.0
    merged_token_parameters: int = 0  # tokens of each contribution times its fragment's parameters: sums are exact
    bytes_up: int = 0  # payloads: of acknowledged contributions,
    bytes_down: int = 0  # of published updates,
    bytes_whole: int = 0  # of whole fragments and first parameters, both ways
    parameters_up: int = 0  # that the coded bytes stand for
    parameters_down: int = 0
    step_time_s: float | None = None  # of its inner steps, as last seen
    silence_s: float = 0.0  # not heard of for longer than SILENT_S, and not yet explained by a reported step
    woke_at: float = 0.0  # when the last such silence ended
    struck_tokens: int = 0  # by an operator: they were reported and do not count
    undone_tokens: int = 0  # reported, and not counted since an older checkpoint was restored
    current: Spent = field(default_factory=Spent)
    past: list[Spent] = field(default_factory=list)  # sums of dead incarnations; at most one element

    def joined(self, now: float, process_age_s: float, returning: bool) -> None:
        """A new incarnation joins; the gap since the last sign of life is lost, unless it had left."""
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
        self.current = Spent(joined_at=now)

    def heard(self, now: float, seen: Spent, most: Most | None = None) -> None:
        """Takes in the counters of a report; time spent cannot exceed the time since joining.

        most: what may be counted of its steps and tokens; None: all.
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
        seen.accepted_tokens = was.accepted_tokens
        seen.frozen_s = was.frozen_s
        seen.undone_tokens = was.undone_tokens
        there = max(0.0, now - seen.joined_at)
        for name in ("stepping_s", "blocked_s", "joining_s", "paused_s"):
            said = getattr(seen, name)
            setattr(seen, name, min(max(0.0, said), there) if math.isfinite(said) else 0.0)
        # It tells how long joining took from its own start on; provisioned it is from its first Join.
        seen.joining_s = min(seen.joining_s, was.joining_s or there)
        if silent_s := self._silent_s(now):
            self.silence_s = self.silence_s + silent_s
            self.woke_at = now
        if seen.said_steps > was.said_steps:
            self._explain(seen, seen.stepping_s - was.stepping_s - was.frozen_s, seen.said_steps - was.said_steps, now)
        seen.stepping_s = max(0.0, seen.stepping_s - seen.frozen_s)
        self.current = seen
        if was.restored_to is not None:  # it trained on from parameters that the run does not have any more
            self._count_only(was.restored_to)
        self.heard_at = max(self.heard_at, now)
        self.left_at = None

    def _explain(self, seen: Spent, stepping_s: float, steps: int, now: float) -> None:
        """Charges a silence to steps that began before its end: what they cannot have taken, the process was frozen.

        stepping_s: what the new steps took, as reported. A report after the silence may have only steps that ended
        before it; a later one then has the step that stood. A learner that is only cut off trains on: its steps
        explain the time.
        """
        awake_s = now - self.woke_at
        during_s = min(self.silence_s, stepping_s - awake_s)  # at least so much of the steps' time lies in the silence
        if during_s > 0.0 and self.step_time_s is not None:
            earlier = max(1.0, steps - awake_s / self.step_time_s)  # steps that were not made since it woke
            frozen_s = max(0.0, during_s - SLOW * earlier * self.step_time_s)
            seen.frozen_s += frozen_s
            self.down_s += frozen_s
        if during_s > 0.0:
            self.silence_s -= during_s
        if stepping_s + SILENT_S < awake_s:  # all that is reported from now on began after the silence
            self.silence_s = 0.0

    def forget_contributions(self) -> None:
        """Before they are counted again from the ledger, which is exact; this account was written some time before."""
        self.merged_token_parameters = 0
        self.bytes_up = 0
        self.parameters_up = 0
        for spent in (self.current, *self.past):
            spent.accepted_tokens = 0.0

    def counted_tokens(self) -> int:
        """Of all that it reported, what counts."""
        count: int = self.total("tokens") - self.struck_tokens - self.undone_tokens
        return count

    def strike(self, tokens: int) -> None:
        """So many count of all that it reported; struck ones never count again."""
        self.struck_tokens = max(self.struck_tokens, self.total("tokens") - self.undone_tokens - tokens)

    def restored(self, tokens: int, undone_tokens: float) -> None:
        """The run goes back to an older checkpoint. tokens: that counted of this learner then.

        undone_tokens: of the process that speaks for it: merged, and left behind; mean over fragments weighted by
        parameters.
        """
        self._count_only(tokens)
        self.current.undone_tokens = undone_tokens
        self.current.restored_to = tokens

    def _count_only(self, tokens: int) -> None:
        self.undone_tokens = max(0, self.total("tokens") - self.struck_tokens - tokens)

    def accepted(self, tokens: float, current: bool) -> None:
        """The core acknowledged a contribution of so many (weighted) tokens; negative: refused after all."""
        spent = self.current if current or not self.past else self.past[0]
        spent.accepted_tokens += tokens

    def _bury(self) -> None:
        """Adds the dead incarnation to the past, its lost tokens included."""
        dead = self.current
        dead.abandoned_tokens = max(dead.given_up_tokens(), dead.tokens - dead.accepted_tokens)
        dead.undone_tokens = 0.0
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
            "accepted_tokens",
            "frozen_s",
            "said_steps",
            "said_tokens",
        ):
            setattr(total, name, getattr(total, name) + getattr(dead, name))

    def rate(self) -> Rate | None:
        """How fast it trains; None before enough of its steps were seen: the first ones compile."""
        if not self.step_time_s or self.total("steps") < RATE_STEPS:
            return None
        current = self.current
        if current.said_steps:
            return Rate(1 / self.step_time_s, current.said_tokens / current.said_steps)
        return Rate(1 / self.step_time_s, self.total("tokens") / self.total("steps"))

    def total(self, name: str) -> Any:  # noqa: ANN401
        """A counter summed over all incarnations."""
        mine = getattr(self.current, name)
        return mine + getattr(self.past[0], name) if self.past else mine

    def balance(self, now: float) -> Balance:
        """Useful and lost seconds so far."""
        end = now if self.left_at is None else self.left_at
        provisioned = max(0.0, end - self.first_joined_at - self.away_s - self.total("paused_s"))
        thrown = self.current.thrown_away_s(dead=False) + sum(spent.thrown_away_s(dead=True) for spent in self.past)
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
        return Balance(useful, provisioned, lost)

    def _trains(self) -> bool:
        """Whether the process that speaks for it has said anything: before its first parameters it has nothing to."""
        return bool(self.current.steps or self.current.joining_s)

    def _silent_s(self, now: float) -> float:
        """Since it was last heard of, where that is long ago: until it comes back it is taken for dead."""
        silent_s = now - self.heard_at if self.left_at is None else 0.0
        return silent_s if silent_s > SILENT_S else 0.0

    def as_data(self) -> dict[str, Any]:
        """For the ledger."""
        spent = {"current": _fields(self.current), "past": [_fields(each) for each in self.past]}
        return _fields(self) | spent

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Account:
        """From the ledger."""
        spent = {"current": Spent(**data["current"]), "past": [Spent(**each) for each in data["past"]]}
        return cls(**(data | spent))


def _fields(of: Account | Spent) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in fields(of)}


def overall(balances: Iterable[Balance]) -> Balance:
    """The run's balance: sums over learners."""
    parts = list(balances)
    lost = {cause: sum(part.lost_s.get(cause, 0.0) for part in parts) for cause in CAUSES}
    return Balance(sum(part.useful_s for part in parts), sum(part.provisioned_s for part in parts), lost)
