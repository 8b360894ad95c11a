"""Checks that the simulation finds every deliberate defect: `make simulate-defects`.

found.txt has the last seed that found each defect. If a code change draws another random number, seeds change their
meaning. The search then starts again, and --write stores the new seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulation.bookkeeping import Violation
from tests.simulation.data_defects import DATA_DEFECTS
from tests.simulation.defects import DEFECTS
from tests.simulation.seed import simulate
from tests.simulation.sharded_defects import SHARDED_DEFECTS
from tests.simulation.sharded_world import simulate_sharded

MAX_SEEDS = 5000
FOUND = Path(__file__).with_name("found.txt")
ALL_DEFECTS = DEFECTS | SHARDED_DEFECTS


def find(name: str, first: int = 0, count: int = MAX_SEEDS) -> tuple[int, str] | None:
    """Returns the first seed that finds a defect, with the violation, or None."""
    world: Callable[[int], Any] = simulate if name in DEFECTS else simulate_sharded
    if name in {each.__name__ for each in DATA_DEFECTS}:
        world = partial(simulate, data=1.0)
    with contextmanager(ALL_DEFECTS[name])():
        for seed in range(first, first + count):
            try:
                world(seed)
            except Violation as violation:
                if isinstance(violation.__cause__, TypeError | AttributeError | NameError | ValueError):
                    # The defect itself failed, which proves nothing. A Violation holds its world, so it cannot pass
                    # between processes.
                    raise RuntimeError(
                        f"defect {name} no longer fits the code: {violation}; change it to match the code"
                    ) from None
                return seed, str(violation)
    return None


def known() -> dict[str, int]:
    """Returns the seeds that last found each defect."""
    return {name: int(seed) for name, seed in map(str.split, FOUND.read_text().splitlines())}


def find_again(name: str, first: int = 0, count: int = MAX_SEEDS) -> tuple[int, str] | None:
    """Does the same as `find`, but tries the last known seed first."""
    seed = known().get(name)
    return (None if seed is None else find(name, seed, 1)) or find(name, first, count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=MAX_SEEDS, help="most seeds per defect (default: %(default)s)")
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--known", action="store_true", help="try the seeds of found.txt first, which is much faster")
    parser.add_argument("--write", action="store_true", help="store the seeds in found.txt, for --known")
    arguments = parser.parse_args()
    began, seeds, missed, before = time.monotonic(), dict[str, int](), [], known()
    search = find_again if arguments.known else find
    with ProcessPoolExecutor() as pool:
        searches = {pool.submit(search, name, arguments.first, arguments.seeds): name for name in ALL_DEFECTS}
        for done in as_completed(searches):
            name, found = searches[done], done.result()
            if found is None:
                missed.append(name)
                print(f"MISSED  {name} in {arguments.seeds} seeds", flush=True)
            else:
                seeds[name] = found[0]
                moved = arguments.known and before.get(name) != found[0]
                print(f"{found[0]:6}{'*' if moved else ' '} {name}: {found[1][:110]}", flush=True)
    if arguments.write:
        kept = sorted((name, seed) for name, seed in (before | seeds).items() if name in ALL_DEFECTS)
        FOUND.write_text("".join(f"{name} {seed}\n" for name, seed in kept))
    print(f"{len(ALL_DEFECTS) - len(missed)} of {len(ALL_DEFECTS)} found in {time.monotonic() - began:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
