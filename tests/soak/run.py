"""Soak test: a core, a front and four learners, disturbed every few seconds, must keep training and must not grow.

make soak, or python -m tests.soak.run [--minutes 20] [--seed N] [--json PATH]

Each turn has three parts:

- one disturbance (disturbances.py): a cut of connections, or SIGTERM or SIGKILL to core, front or learners;
- a wait until every learner is connected, and has trained and merged again (sampling.py);
- one sample of each process: open calls, threads, file descriptors and memory.

judge.py decides whether a quantity grew. It judges:

- Open calls of every process, in every sample.
- Threads and file descriptors of each process that outlives a chapter, over that chapter, from the second one on. In a
  test of 20 minutes, this is minute 5. Each process is compared under disturbances of the same kinds.
- Memory of each process from the second chapter on, but not over its first GROWN_UP of the time, in which caches fill.
- Starts: the first sample of a core, a front and learners c and d after each start, over all starts from the second
  chapter on. This detects a core that needs more after each start.

The exit status is 1 if a quantity grew, a process died, or training did not continue. A sentence names the cause.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from atoll.demo.processes import DemoError
from rich.console import Console
from rich.table import Table

from tests.soak.deployment import LEARNERS, SoakError, deployment
from tests.soak.disturbances import CHAPTERS, Deck
from tests.soak.judge import CONNECTIONS, FILES, LAZY, LEAST, MEMORY, THREADS, Series
from tests.soak.sampling import Sampler, Usage, known

LONG_MINUTES = 10.0  # from this length on, there is time for one-minute silences, and thread pools are full
COUNTS = (THREADS, FILES, CONNECTIONS)
COMPARED = (*COUNTS, MEMORY)
GROWN_UP = 1 / 8
FILLING = 3  # threads that a pool may still start in a short test


@dataclass(frozen=True, slots=True)
class Sample:
    """The resource usage of one process at a quiet moment.

    life: number of the process's start. at_s: seconds since the beginning of the test. back_s: duration of the
    disturbance and of the wait for training.
    """

    process: str
    life: int
    chapter: int
    turn: int
    at_s: float
    after: str
    back_s: float
    used: Usage


def soak(minutes: float, seed: int, *, leaking: str = "") -> Iterator[list[Sample]]:
    """Disturbs the deployment for some minutes. Yields the samples of all processes after each turn.

    A chapter lasts a quarter of the time, and at least LEAST turns. Raises SoakError if a process died or training does
    not continue.
    """
    deck = Deck(seed, silences=minutes >= LONG_MINUTES)
    with tempfile.TemporaryDirectory() as place, deployment(Path(place), leaking=leaking) as it:
        sampler = Sampler(it)
        sampler.wait_until_training("the start")
        began, turn = time.monotonic(), 0
        for chapter in range(len(CHAPTERS)):
            until_s, least = 60 * minutes * (chapter + 1) / len(CHAPTERS), turn + LEAST
            while (now_s := time.monotonic() - began) < until_s or turn < least:
                turn += 1
                disturbance = deck.draw(chapter)
                disturbance.happen(it)
                sampler.wait_until_training(str(disturbance))
                back_s = time.monotonic() - began - now_s
                used = sampler.sample(str(disturbance), silenced=disturbance.silent)
                at_s, lives = time.monotonic() - began, {name: actor.life for name, actor in it.actors.items()}
                yield [
                    Sample(name, life, chapter, turn, at_s, str(disturbance), back_s, used[name])
                    for name, life in lives.items()
                ]


def progress(samples: list[Sample]) -> str:
    """Returns one line about a turn."""
    first = samples[0]
    what = f"{first.chapter + 1}.{first.turn:<3d} {first.after:27} trains after {first.back_s:4.1f} s"
    return f"[{first.at_s:5.0f} s] {what}" + "".join(f" | {each.process} {brief(each)}" for each in samples)


def brief(sample: Sample) -> str:
    """Returns a process's open calls, threads, other files, connections and MiB, and its unexpected calls."""
    used = sample.used
    calls = {quantity: value for quantity, value in used.items() if quantity not in COMPARED}
    text = f"{sum(calls.values()):.0f}c {used[THREADS]:.0f}t {used[FILES]:.0f}f {used[CONNECTIONS]:.0f}s"
    high = [f"{value:.0f} {it}" for it, value in calls.items() if value > (known(sample.process, it) or 0.0)]
    return f"{text} {used[MEMORY] / 2**20:.1f}M" + (f" ({', '.join(high)})" if high else "")


def series(samples: Sequence[Sample], minutes: float) -> list[Series]:
    """Returns the series to judge (see the module's docstring)."""
    found = list[Series]()
    for name in dict.fromkeys(each.process for each in samples):
        mine = [each for each in samples if each.process == name]
        lazy = LAZY * (len(LEARNERS) if name == "front" else 1)
        spare = {CONNECTIONS: lazy} | ({THREADS: FILLING} if minutes < LONG_MINUTES else {})
        for quantity in dict.fromkeys(quantity for each in mine for quantity in each.used):
            if (most := known(name, quantity)) is not None:
                found.append(Series(role(name), quantity, of(quantity, mine), known=most))
        for life in dict.fromkeys(each.life for each in mine):
            found += of_life(name, life, samples, spare)
        first = [now for before, now in pairwise(mine) if now.life > before.life and now.chapter > 0]
        found += [Series(f"{role(name)}, after starts", it, of(it, first), spare=spare.get(it, 0)) for it in COMPARED]
    return [each for each in found if each.known is not None or len(each.values) >= LEAST]


def of_life(name: str, life: int, samples: Sequence[Sample], spare: dict[str, int]) -> Iterator[Series]:
    """Yields the series of one process, from the second chapter on."""
    lived = [each for each in samples if (each.process, each.life) == (name, life)]
    kind = [each for each in samples if each.process == name or {each.process, name} <= set(LEARNERS)]
    whole = f"{role(name)}, start {life}"
    for chapter in range(1, len(CHAPTERS)):
        part = [each for each in lived if each.chapter == chapter]
        if len(part) == len({each.turn for each in samples if each.chapter == chapter}):  # it outlived the chapter
            for it in COUNTS:
                before = [each for each in (kind if it == THREADS else lived) if each.chapter < chapter]
                over = f"{whole}, chapter {chapter + 1}"
                yield Series(over, it, of(it, part), before=of(it, before), spare=spare.get(it, 0))
    warm_s = lived[0].at_s + GROWN_UP * samples[-1].at_s
    yield Series(whole, MEMORY, of(MEMORY, [each for each in lived if each.chapter > 0 and each.at_s >= warm_s]))


def of(quantity: str, samples: Sequence[Sample]) -> tuple[float, ...]:
    """Returns the values of a quantity. A sample without the quantity counts as zero."""
    return tuple(each.used.get(quantity, 0.0) for each in samples)


def role(name: str) -> str:
    """Returns the role of a process, for people."""
    return name if name in {"core", "front"} else f"learner {name}"


def table(found: list[Series]) -> Table:
    """Returns a table with a row for each series that is not always zero."""
    shown = Table("process", "quantity", title="soak: samples of quiet moments")
    for column in ("samples", "first", "lowest", "highest", "last", ""):
        shown.add_column(column, justify="right")
    for each in found:
        if any(each.values):
            scale, digits = (2**20, 1) if each.quantity == MEMORY else (1, 0)
            ends = each.values[0], min(each.values), max(each.values), each.values[-1]
            unit = ", MiB" if each.quantity == MEMORY else ""
            row = [f"{value / scale:.{digits}f}" for value in ends]
            shown.add_row(
                each.process, each.quantity + unit, f"{len(each.values)}", *row, "GREW" if each.grew() else "ok"
            )
    return shown


def main() -> int:
    """Prints progress and a table. Returns 1 if the test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of disturbances (default: %(default)s)")
    parser.add_argument("--json", type=Path, dest="json_path")
    parser.add_argument("--leak", default="", metavar="NAME", help="plant a leak in this learner, as a check")
    arguments = parser.parse_args()
    console, samples, wrong = Console(width=160, soft_wrap=True), list[Sample](), list[str]()
    try:
        for turn in soak(arguments.minutes, arguments.seed, leaking=arguments.leak):
            samples += turn
            console.print(progress(turn), highlight=False)
    except (SoakError, DemoError) as error:
        wrong.append(str(error))
    found = series(samples, arguments.minutes)
    wrong += [each.sentence() for each in found if each.grew()]
    console.print(table(found))
    for sentence in wrong:
        console.print(f"error: {sentence}", highlight=False)
    if arguments.json_path is not None:
        told = {"minutes": arguments.minutes, "seed": arguments.seed, "wrong": wrong}
        told |= {"series": [asdict(each) for each in found], "samples": [asdict(each) for each in samples]}
        arguments.json_path.write_text(json.dumps(told) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
