"""The schedule of failures: random with a seed, or a given list."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from atoll_wire.errors import ExitStatus, UserError

KILL, PAUSE = "kill", "pause"
CORE = "core"


class ScheduleError(UserError):
    """The schedule is unreadable or invalid. The message is one line with the fix."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """A failure that happens `at_s` seconds after all learners have begun to train.

    what: KILL (SIGKILL, then a restart) or PAUSE (SIGSTOP for `for_s` seconds). target: name of the process.
    """

    at_s: float
    what: str
    target: str
    for_s: float = 0.0


def parse(text: str, targets: Sequence[str]) -> list[Fault]:
    """Reads a schedule such as "12:kill:eu-west,30:pause:us-east:5,40:kill:core". Raises ScheduleError."""
    return sorted(_parse(part.strip(), targets) for part in text.split(",") if part.strip())


def _parse(part: str, targets: Sequence[str]) -> Fault:
    fields = part.split(":")
    try:
        at_s = float(fields[0])
        what = fields[1]
        target = fields[2]
        for_s = float(fields[3]) if what == PAUSE else 0.0
    except (IndexError, ValueError) as error:
        raise ScheduleError(
            f'--schedule "{part}" is invalid: use the form 12:kill:NAME or 12:pause:NAME:5', ExitStatus.USAGE
        ) from error
    if what not in {KILL, PAUSE} or target not in targets or not at_s >= 0 or not for_s >= 0:
        raise ScheduleError(
            f'--schedule "{part}" is invalid (unknown action or target, or an invalid time): kill or pause one of '
            f"{', '.join(targets)}, with times of 0 s or more",
            ExitStatus.USAGE,
        )
    return Fault(at_s, what, target, for_s)


def random_faults(
    seed: int, seconds: float, learners: Sequence[str], mtbf_s: float, core_mtbf_s: float, pauses: float
) -> list[Fault]:
    """Returns random failures with exponentially distributed intervals. A seed always gives the same failures.

    mtbf_s: mean seconds between failures of any learner, or 0 for no failures. core_mtbf_s: the same for the core.
    pauses: share of learner failures that are pauses (5 s on average) and not kills.
    """
    rng = random.Random(f"learners {seed}")  # noqa: S311 - not for security
    faults = []
    at_s = 0.0
    while mtbf_s and (at_s := at_s + rng.expovariate(1 / mtbf_s)) < seconds:
        target, paused = rng.choice(list(learners)), rng.random() < pauses
        faults.append(Fault(at_s, PAUSE if paused else KILL, target, rng.expovariate(1 / 5.0) if paused else 0.0))
    rng, at_s = random.Random(f"core {seed}"), 0.0  # noqa: S311 - see above
    while core_mtbf_s and (at_s := at_s + rng.expovariate(1 / core_mtbf_s)) < seconds:
        faults.append(Fault(at_s, KILL, CORE))
    return sorted(faults)
