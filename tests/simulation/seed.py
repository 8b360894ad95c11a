"""One seed from beginning to end, with simulated clocks and random choices."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import secrets
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar
from unittest import mock

import psutil
import structlog
from atoll_server.merging import merge
from atoll_server.rounds import liveness
from atoll_server.rounds.liveness import LiveLearners
from atoll_server.rounds.round_state import CloseNow
from atoll_server.rounds.syncer import Syncer
from atoll_server.rounds.syncer_events import Cause, Effect, Merge
from atoll_server.storage import crash_points
from atoll_server.uploads.uploads import Upload, Uploads
from atoll_wire.layout import layout
from atoll_wire.process import allocator
from atoll_wire.process.clock import SystemClock

from tests.simulation.bookkeeping import Violation
from tests.simulation.checks import Checks
from tests.simulation.data_units import CHANCE
from tests.simulation.disk import Platter
from tests.simulation.loop import Process, VirtualLoop, here
from tests.simulation.storm import Storm
from tests.simulation.world import World

TURNS_TO_END = 10  # turns of the loop until nested cancelled tasks end


class _Birth:
    def create_time(self) -> float:
        process = here()
        assert process is not None, "only simulated processes read it"
        assert process.born is not None, "a running process was born"
        return process.born


def _real(_: SystemClock) -> float:
    raise AssertionError("simulated code reads the machine's clock; pass it the loop's clock")


@contextmanager
def determinism(loop: VirtualLoop) -> Iterator[None]:
    """Context manager that makes a run deterministic, with small frames, so that uploads have several."""
    rng, real = random.Random(loop.rng.random()), random.Random

    def seeded(seed: object = None) -> random.Random:
        return real(rng.random() if seed is None else seed)

    with ExitStack() as stack:
        for target, name, value in (
            (SystemClock, "monotonic", _real), (SystemClock, "wall", _real), (random, "Random", seeded),
            (secrets, "token_bytes", rng.randbytes), (secrets, "randbits", rng.getrandbits),
            (uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128))), (psutil, "Process", _Birth),
            (layout, "FRAME_PARAMETERS", 256), (liveness, "EXPECTED_S", 3.0), (liveness, "UNSEEN_ANSWER_S", 4.0),
            (allocator, "drop_library_pages", lambda _: None), (merge, "warm_up", lambda: None),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(target, name, value))
        crash_points.watch(lambda _: (process := here()) and process.touch())
        stack.callback(crash_points.watch, None)
        yield


def simulate(seed: int, storm: Callable[[World], Storm] = Storm, *, data: float = CHANCE) -> World:
    """Runs one seed to its end. storm: replaces the seed's storm. data: chance that the seed has a dataset.

    Raises Violation, with the world as `world`.
    """
    loop = VirtualLoop(random.Random(seed))
    with ExitStack() as stack:
        world = stack.enter_context(simulating(loop, lambda: World(seed, loop, storm, data)))
        came = Uploads.came

        def frames_came(uploads: Uploads, upload: Upload, now: float, *, new: bool) -> bool:
            whole = came(uploads, upload, now, new=new)
            world.rank_faults.frames_came(upload)
            return whole

        stack.enter_context(mock.patch.object(Uploads, "came", frames_came))
        loop.run_until_complete(world.run())
    return world


class SimulatedWorld(Protocol):
    """A world that `simulating` can run and end. disks: of all processes that have one."""

    checks: Checks

    @property
    def disks(self) -> list[Platter]: ...

    def processes(self) -> list[Process]:
        """Returns all processes that may still run."""
        ...


Simulated = TypeVar("Simulated", bound=SimulatedWorld)


@contextmanager
def simulating(loop: VirtualLoop, make: Callable[[], Simulated]) -> Iterator[Simulated]:
    """Yields a world whose runs are repeatable. A Violation gets the world as `world`. Ends all its processes."""
    merge.warm_up()
    with determinism(loop), ExitStack() as stack:
        stack.callback(structlog.configure, **structlog.get_config())
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        asyncio.set_event_loop(loop)
        collects = gc.isenabled()
        gc.disable()
        world = make()
        close = Syncer._close

        def closing(syncer: Syncer, fragment: int, reason: CloseNow, present: LiveLearners) -> list[Effect]:
            world.checks.closing(syncer, fragment, reason.cause, present.now)
            effects = close(syncer, fragment, reason, present)
            for effect in effects:
                if isinstance(effect, Merge) and reason.cause is Cause.ALL_ANSWERED:
                    late = any(share.staleness for share in effect.shares)
                    if not late and abs(sum(share.weight for share in effect.shares) - 1) > 1e-6:
                        raise Violation(7, f"all learners answered in time, but the weights are {effect.shares}")
            return effects

        stack.enter_context(mock.patch.object(Syncer, "_close", closing))
        try:
            yield world
        except Violation as violation:
            violation.world = world  # type: ignore[attr-defined]
            raise
        finally:
            for process in world.processes():
                process.on_death.clear()
                process.kill()
            for task in asyncio.all_tasks(loop):
                task.cancel()
            for _ in range(TURNS_TO_END):
                loop.run_until_complete(asyncio.sleep(0))
            for disk in world.disks:
                for end in disk.at_end:
                    end()
            loop.close()
            asyncio.set_event_loop(None)
            if collects:
                gc.enable()
