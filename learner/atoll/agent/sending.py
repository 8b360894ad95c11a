"""Contributions on their way out: coded once, then sent until the core acknowledges or refuses them.

An upload of unknown fate is never replaced: the same bytes under the same key are offered again, and the core says
which frames it has, or what became of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

import structlog
from atoll_wire import codec, frames
from atoll_wire import outer_pb2 as pb
from atoll_wire.checksums import crc32c
from atoll_wire.logs import contribution
from atoll_wire.streams import upload

from atoll.agent.calls import Cure, detail, one_line
from atoll.agent.core_state import Flight, Line, Standing
from atoll.agent.retrying import Failure, retry
from atoll.fragments.exchange import Handover, Taken
from atoll.fragments.segments import Coded
from atoll.stats import Counters

log = structlog.get_logger()


class Sender:
    """One contribution of each fragment at a time."""

    def __init__(
        self,
        standing: Standing,
        handover: Handover,
        counters: Counters,
        stop: Callable[[Exception], None],
        fetch: Callable[[Line], None],
    ) -> None:
        """stop: ends the learner. fetch: brings a line up to date, whole if it says so."""
        self._standing, self._handover, self._counters = standing, handover, counters
        self._stop, self._fetch = stop, fetch
        self._rng = random.Random()  # noqa: S311 - jitter
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, line: Line, taken: Taken) -> None:
        """Takes a pseudo-gradient on; returns at once. One that was handed over before is on its way."""
        if taken.received:
            return
        taken.received = True
        if taken.outstanding.restores != line.restores:
            self._left_behind(line, taken)
            return
        assert line.flight is None, "at most one contribution of a fragment is in flight"
        line.seq += 1
        line.flight = Flight(taken, line.seq)
        self._counters.pending += 1
        task = asyncio.get_running_loop().create_task(self._carry(line, line.flight))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _left_behind(self, line: Line, taken: Taken) -> None:
        """It was trained from parameters that the run does not have any more: it goes with the next adoption."""
        log.info("work of before the run was restored is given up", fragment=line.fragment)
        self._handover.settle(taken)
        line.whole = line.drop = True
        self._fetch(line)

    def ask_again(self) -> None:
        """After the core was away: what became of contributions that it had acknowledged?"""
        for line in self._standing.lines:
            if line.flight is not None and line.flight.acknowledged and not line.flight.asking:
                line.flight.asking = True
                task = asyncio.get_running_loop().create_task(self._ask(line, line.flight))
                self._tasks.add(task)
                task.add_done_callback(self._ended)

    async def _ask(self, line: Line, flight: Flight) -> None:
        # Until it is known: a refusal that nobody hears would leave the fragment in flight for ever.
        try:
            await self._offer(line, flight)
        finally:
            flight.asking = False

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def _carry(self, line: Line, flight: Flight) -> None:
        flight.messages, flight.table = await asyncio.to_thread(_messages, flight.taken.outstanding.coded)
        await self._offer(line, flight)

    async def _offer(self, line: Line, flight: Flight) -> None:
        """Pushes until the core has answered, or the fate came another way."""
        once, failed = partial(self._push, line, flight), partial(self._failed, line, flight)
        await retry(self._standing, lambda: line.flight is flight, once, failed, self._rng)

    async def _push(self, line: Line, flight: Flight) -> bool:
        """Offers the contribution, sends the frames that the core lacks, and takes in what it answers, if it does."""
        outstanding, offered = flight.taken.outstanding, self._standing.session

        def head() -> pb.PushHeader:
            # When its turn comes the run may have been restored: then the core refuses it with the session of before.
            same = self._standing.session.generation == offered.generation
            flight.session = self._standing.session if same else offered
            return pb.PushHeader(
                session=flight.session, fragment=line.fragment, seq=flight.seq, cycle=flight.taken.cycle,
                base_version=outstanding.base_version, tokens=outstanding.tokens, steps=outstanding.steps,
                codec=self._standing.settings.codec, frames=len(flight.table),
                size_bytes=sum(length for length, _ in flight.table), digest=codec.frames_digest(flight.table),
            )  # fmt: skip

        def sent(index: int) -> None:
            self._counters.bytes_up += flight.table[index][0]

        name = self._name(line, flight)
        log.debug("sending", contribution=name, cycle=flight.taken.cycle, tokens=outstanding.tokens)
        receipt = await upload(self._standing.link, head, flight.messages, sent, known=flight.acknowledged)
        if receipt is None:
            return False
        log.debug("acknowledged", contribution=name)
        self._acknowledged(flight)
        self.decided(receipt)
        return True

    def _failed(self, line: Line, flight: Flight, failure: Failure) -> bool:
        error = failure.error
        self._counters.last_error = one_line(error)
        if line.flight is not flight:
            return True  # its fate came another way meanwhile
        match failure.cure:
            case Cure.DROP_WORK:
                log.warning("outstanding work is given up", contribution=self._name(line, flight), detail=detail(error))
                self._drop(line)
            case Cure.GIVE_UP:
                log.error("contribution refused", contribution=self._name(line, flight), detail=detail(error))
                self.end(line, merged=False)
            case Cure.JOIN_AGAIN:
                self._standing.lose(flight.session)
            case _:
                return False
        return True

    # ------------------------------------------------------------------------------ fates

    def decided(self, receipt: pb.Receipt) -> None:
        """A receipt that came outside of an update: acts on a refusal; a merge is left to its update."""
        line = self._standing.line(receipt.fragment)
        if (
            line.flight is None
            or line.flight.seq != receipt.seq
            or receipt.incarnation != self._standing.session.incarnation
        ):
            return
        if receipt.fate == pb.FATE_REFUSED:
            self._counters.last_error = receipt.reason
            log.warning("contribution refused", contribution=self._name(line, line.flight), reason=receipt.reason)
            if receipt.drop_outstanding:
                self._drop(line)
            else:
                self.end(line, merged=False)

    def end(self, line: Line, *, merged: bool) -> None:
        """The flight is over. A merge is adopted with its update; refused work is free at once."""
        assert line.flight is not None, "only a flight can end"
        flight, line.flight = line.flight, None
        self._acknowledged(flight)
        self._counters.pending -= 1
        if merged:
            log.debug("merged", contribution=self._name(line, flight))
            self._counters.merged += 1
        else:
            self._counters.refused += 1
            self._handover.release(line.fragment)

    def forget(self, line: Line) -> None:
        """Another generation: what was in flight means nothing any more."""
        if line.flight is not None:
            self._drop(line)

    def _drop(self, line: Line) -> None:
        """Refused for good: the work goes with the next adoption, of the whole fragment; until then nothing is sent."""
        assert line.flight is not None, "only a flight can be dropped"
        self._acknowledged(line.flight)
        line.flight = None
        self._counters.pending -= 1
        self._counters.refused += 1
        line.whole = line.drop = True
        self._fetch(line)

    def _name(self, line: Line, flight: Flight) -> str:
        return contribution(flight.session or self._standing.session, line.fragment, flight.seq)

    def _acknowledged(self, flight: Flight) -> None:
        if not flight.acknowledged:
            flight.acknowledged = True
            self._handover.settle(flight.taken)


def _messages(coded: Coded) -> tuple[tuple[bytes, ...], tuple[tuple[int, int], ...]]:
    payloads = list(map(codec.compress, coded.contents))
    table = tuple((len(payload), crc32c(payload)) for payload in payloads)
    return tuple(frames.encode(n, table[n][1], payload) for n, payload in enumerate(payloads)), table
