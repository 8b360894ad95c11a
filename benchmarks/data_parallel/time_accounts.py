"""Time accounts of a synchronous job, computed from the records of its ranks by `balance`.

In a start, all ranks run together until a failure. The next start continues from the last checkpoint. A step is kept if
its result is in the final model. Times are monotonic seconds of one machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise

STAGES = ("interpreter", "preparing", "joining")  # stages of a start, in this order
CAUSES = (*STAGES, "redone", "saving", "cut_off", "other")


@dataclass(frozen=True, slots=True)
class Up:
    """The interpreter runs and has imported torch."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """The text is read and the model is built. From then on, a rank needs the other ranks."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Joined:
    """All ranks have met and loaded the checkpoint. step: number of the next step."""

    at_s: float
    step: int


@dataclass(frozen=True, slots=True)
class Step:
    """A finished step: batch, forward pass, backward pass with its all-reduce, and optimizer."""

    step: int
    start_s: float
    end_s: float
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint after `step` steps was saved."""

    step: int
    start_s: float
    end_s: float


Event = Up | Prepared | Joined | Step | Saved
KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in (Up, Prepared, Joined, Step, Saved)}


def encode(event: Event) -> bytes:
    """Returns an event as one line of JSON."""
    return json.dumps({"kind": type(event).__name__} | asdict(event)).encode() + b"\n"


def decode(line: bytes) -> Event:
    """Returns the event in a complete line."""
    fields = json.loads(line)
    return KINDS[fields.pop("kind")](**fields)


@dataclass(slots=True)
class Life:
    """One rank in one start of the job. died_s: when the rank was killed or ended; None while the rank runs."""

    spawned_s: float
    died_s: float | None = None
    up_s: float | None = None
    prepared_s: float | None = None
    joined_s: float | None = None
    first_step: int | None = None
    steps: list[Step] = field(default_factory=list)
    saves: list[Saved] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Adds an event from the rank's records."""
        match event:
            case Up():
                self.up_s = event.at_s
            case Prepared():
                self.prepared_s = event.at_s
            case Joined():
                self.joined_s = event.at_s
                self.first_step = event.step
            case Step():
                self.steps.append(event)
            case Saved():
                self.saves.append(event)

    @property
    def last_seen_age_s(self) -> float:
        """The end of the rank's last record."""
        reached = [at_s for at_s in (self.up_s, self.prepared_s, self.joined_s) if at_s is not None]
        stepped = [step.end_s for step in self.steps[-1:]]
        saved = [save.end_s for save in self.saves[-1:]]
        return max([self.spawned_s, *reached, *stepped, *saved])

    @property
    def last_work_s(self) -> float:
        """The end of the rank's last step, or the time when it joined if it took no step."""
        assert self.joined_s is not None, "a rank works only after it has joined"
        return self.steps[-1].end_s if self.steps else self.joined_s


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL of one rank. at_s: seconds after History.began_s."""

    at_s: float
    rank: int


@dataclass(slots=True)
class History:
    """The history of a job.

    lives: by start, then by rank. kills: in order. began_s: when all ranks were first prepared; None before that.
    """

    ranks: int
    began_s: float | None = None
    lives: list[list[Life]] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Balance:
    """Rank-seconds, tokens of all ranks, and the duration of each restart.

    A duration is None if no useful step followed.
    """

    seconds: float
    provisioned_s: float
    useful_s: float
    lost_s: dict[str, float]
    tokens_trained: int
    tokens_kept: int
    restart_s: list[float | None]

    @property
    def goodput(self) -> float:
        """Useful / provisioned rank-seconds; 1.0 before anything was provisioned."""
        return self.useful_s / self.provisioned_s if self.provisioned_s > 0 else 1.0

    @property
    def goodput_without_interpreter_start(self) -> float:
        """The goodput if the interpreters of restarted ranks started immediately."""
        rest = self.provisioned_s - self.lost_s["interpreter"]
        return self.useful_s / rest if rest > 0 else 1.0


def failures(seed: int, mtbf_s: float, ranks: int) -> Iterator[Kill]:
    """Yields endless failures of a Poisson process, each of a random rank. mtbf_s: mean seconds between failures."""
    dice, at_s = random.Random(seed), 0.0  # noqa: S311 - failures, not secrets
    while True:
        at_s += dice.expovariate(1 / mtbf_s)
        yield Kill(at_s, dice.randrange(ranks))


def balance(history: History, end_s: float, final_step: int) -> Balance:
    """Returns the accounts of a job that ended at end_s with a model of final_step steps.

    Provisioned: the time of all ranks, including downtime and restarts, from their first preparation to the end.
    Useful: time in kept steps. If a step was repeated after a restart, only the last repetition counts. Waiting for
    other ranks inside a step counts as useful, even while rank 0 saves. Only recorded steps count. The time of a killed
    rank after its last record is `cut_off`.
    lost_s: the remaining time by cause. useful_s and the causes sum to provisioned_s.
    """
    began_s = history.began_s
    assert began_s is not None, "the clock runs from the first start on"
    kept = _kept_below(history, final_step)
    useful, lost = 0.0, dict.fromkeys(CAUSES, 0.0)
    trained_tokens = kept_tokens = 0

    def inside(start_s: float, stop_s: float) -> float:
        return max(0.0, min(stop_s, end_s) - max(start_s, began_s))

    for lives, below in zip(history.lives, kept, strict=True):
        for life in lives:
            died = end_s if life.died_s is None else life.died_s
            # A stage that was not completed lasted until the rank's death. Later stages took no time.
            ends = (life.spawned_s, life.up_s, life.prepared_s, life.joined_s)
            reached = [died if at_s is None else at_s for at_s in ends]
            for cause, (start_s, stop_s) in zip(STAGES, pairwise(reached), strict=True):
                lost[cause] += inside(start_s, stop_s)
            lost["saving"] += sum(inside(each.start_s, each.end_s) for each in life.saves)
            if life.joined_s is not None:
                lost["cut_off"] += inside(life.last_seen_age_s, died)
            for step in life.steps:
                trained_tokens += step.tokens
                if step.step < below:
                    useful += inside(step.start_s, step.end_s)
                    kept_tokens += step.tokens
                else:
                    lost["redone"] += inside(step.start_s, step.end_s)
    provisioned = history.ranks * (end_s - began_s)
    lost["other"] = provisioned - useful - sum(lost.values())
    return Balance(
        end_s - began_s, provisioned, useful, lost, trained_tokens, kept_tokens, _restarts(history, began_s, kept)
    )


def _kept_below(history: History, final_step: int) -> list[int]:
    """Returns, for each start, the first step whose work is lost.

    This is the step that a later start continued from, or the step after the final model.
    """
    below, found = final_step, []
    for lives in reversed(history.lives):
        found.append(below)
        below = min([below, *(life.first_step for life in lives if life.first_step is not None)])
    return found[::-1]


def _restarts(history: History, began_s: float, kept: list[int]) -> list[float | None]:
    """Returns the seconds from each kill to the start of the next kept step of any rank."""
    starts = [
        min((step.start_s for life in lives for step in life.steps if step.step < below), default=None)
        for lives, below in zip(history.lives, kept, strict=True)
    ]
    found: list[float | None] = []
    for number, kill in enumerate(history.kills, 1):  # kill n ended start n, counted from one
        following = [at for at in starts[number:] if at is not None]
        found.append(following[0] - (began_s + kill.at_s) if following else None)
    return found
