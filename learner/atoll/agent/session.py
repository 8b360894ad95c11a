"""A learner's presence at its core: it joins, follows what happens, reports, and comes back when the core was away.

Lives on the agent's event loop and owns all that is known of the core. What must be fetched or sent goes to the
Fetcher and the Sender; what the training loop must do goes to the Handover.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import grpc
import grpc.aio
import numpy as np
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.access import Access
from atoll_wire.arrivals import Arrivals
from atoll_wire.calling import LinkLost, answer, opened, until_it_ends
from atoll_wire.contract import REPORT_S, REPORTED
from atoll_wire.layout import Layout
from atoll_wire.links import Link, retire

from atoll.agent.calls import FIRST_BACKOFF_S, GOODBYE_S, LONGEST_BACKOFF_S, Cure, backoff_s, cure, detail, one_line
from atoll.agent.core_state import Line, Standing
from atoll.agent.fetching import Fetcher
from atoll.agent.joining import CODECS, FirstModel, Identity, Joiner, planned
from atoll.agent.sending import Sender
from atoll.errors import LearnerError
from atoll.fragments.exchange import Handover, Taken
from atoll.stats import Counters

log = structlog.get_logger()

LOOK_S = 0.25  # between looks whether there is something to report
PATIENCE_STEPS = 4.0  # a round that finds no step boundary for so many steps is declined
LEAST_PATIENCE_S, MOST_PATIENCE_S = 4.0, 60.0  # with a core that is silent; between them, by what was usual
WATCH_S = 0.5
HELD_S = 2.0  # a connection that lasted so long was a good one: the next back-off begins anew
DUPLICATE_S = 12.0  # a core may not know yet that this name's last process is dead
PART_OF_AN_OUTAGE = 0.1  # waited between attempts to join: it gets at most so much longer by that


class Presence:
    """Made and used on one event loop. on_ready: told the layout when the first anchors are here."""

    def __init__(
        self,
        identity: Identity,
        model: FirstModel,
        handover: Handover,
        counters: Counters,
        on_ready: Callable[[Layout], None],
        stop: Callable[[Exception], None],
        dial: Callable[[str, Access], Link] = Link,
    ) -> None:
        self._identity, self._model, self._handover, self._counters = identity, model, handover, counters
        self._on_ready, self._entered, self._said_away = on_ready, False, False
        self._leaving = False
        self._rng = random.Random()  # noqa: S311 - jitter
        self._dial, self._links = dial, [dial(address, identity.access) for address in identity.addresses]
        self._retired: set[asyncio.Task[None]] = set()
        self._arrivals = Arrivals(LEAST_PATIENCE_S, MOST_PATIENCE_S)  # of what happens, and of signs of life
        self.standing = Standing(self._links[0])
        self._joiner = Joiner(identity, model, self.standing, counters)
        self._sender = Sender(self.standing, handover, counters, stop, self._fetch)
        self._fetcher = Fetcher(self.standing, handover, counters, stop, self._sender)

    def _fetch(self, line: Line) -> None:
        """What was refused for good is mended by fetching: the Sender asks, the Fetcher does."""
        self._fetcher.begin(line)

    async def live(self) -> None:
        """Goes on for ever; raises LearnerError when trying again is of no use."""
        attempt, short, began = 0, 0, time.monotonic()  # short: connections in a row that did not last
        try:
            while True:
                try:
                    await self._join()
                    joined_at = time.monotonic()
                    short += 1
                    try:
                        await self._stay()
                    finally:
                        if time.monotonic() - joined_at > HELD_S:
                            short, began = 0, time.monotonic()
                except grpc.aio.AioRpcError as error:
                    if not self._leaving:  # else it is how the core says that it heard
                        self._note(error, time.monotonic() - began)
                except LinkLost:
                    pass  # there is another link
                if self._leaving:
                    await asyncio.Event().wait()
                self.standing.connected.clear()
                self._counters.connected = False
                await asyncio.sleep(self._pause_s(time.monotonic() - began, short))
                attempt += 1
                self.standing.link = self._links[attempt % len(self._links)]
                if self.standing.link.stale:
                    self._dial_again()
        finally:
            self.standing.leaving = True
            for link in self._links:
                await link.close()
            for task in self._retired:
                task.cancel()

    def _pause_s(self, away_s: float, short: int) -> float:
        """Until the next attempt: a part of the outage so far, or longer with a core that lets in and hangs up."""
        part_s = min(LONGEST_BACKOFF_S, max(FIRST_BACKOFF_S, PART_OF_AN_OUTAGE * away_s))
        return max(self._rng.uniform(0.5, 1.0) * part_s, backoff_s(short, self._rng) if short else 0.0)

    def _note(self, error: grpc.aio.AioRpcError, waited_s: float) -> None:
        """Says once why the core is away; raises LearnerError when that will not pass."""
        self._counters.last_error = one_line(error)
        address, name = self.standing.link.address, self._identity.name
        duplicate = error.code() is grpc.StatusCode.ALREADY_EXISTS and waited_s < DUPLICATE_S
        if cure(error) in {Cure.STOP, Cure.GIVE_UP} and not duplicate:
            raise LearnerError(f"learner {name!r} cannot go on: {detail(error)}")
        if not self._entered and waited_s > self._identity.connect_timeout_s:
            raise LearnerError(
                f"no core at {address} within {waited_s:.0f} s ({one_line(error)}): start one, or check --server"
            )
        if not self._said_away:
            self._said_away = True
            self._counters.reconnects += self._entered
            text = "core is away: training goes on" if self._entered else "waiting for the core"
            log.warning(text, learner=name, server=address, error=one_line(error))

    async def _join(self) -> None:
        """Joins, and begins to fetch what the core has that is newer."""
        standing, reply = self.standing, await self._joiner.join()
        known = {self.standing.settings.codec} if self.standing.lines else CODECS
        layout = planned(self._model.tensors, reply, known)
        restored = bool(standing.lines) and reply.generation != standing.session.generation
        if not standing.lines:
            standing.layout = layout
            standing.lines = [Line(f.index, np.empty(0, np.float32)) for f in layout.fragments]
        elif restored:
            self._restored(reply)
        standing.settings, standing.session = reply.settings, self._joiner.session(reply)
        standing.lost.clear()
        standing.connected.set()
        self._counters.connected = True
        self._counters.told(reply.run_tokens, reply.struck_tokens, anew=restored)
        self._counters.total_tokens = reply.settings.total_tokens
        if self._said_away:
            log.info("the core is there", learner=self._identity.name, epoch=reply.epoch)
            self._said_away = False
        for line, version in standing.newest(reply.versions):
            if version < max(line.version, line.target):
                line.setbacks += 1
                line.whole |= version < line.version
            line.target = version
            self._fetcher.begin(line)

    def _restored(self, reply: pb.JoinReply) -> None:
        """The run went back to a checkpoint. The work since then is given up, and fragments are fetched whole."""
        log.warning("the run was restored to a checkpoint: this learner follows", generation=reply.generation)
        self._handover.adopted.clear()
        for line in self.standing.lines:
            line.whole = line.drop = True
            line.target = 0
            line.setbacks += 1
            line.restores += self._entered
            line.incoming = None
            self._sender.forget(line)

    async def _stay(self) -> None:
        """Follows and reports until either breaks or some other call finds the core gone."""
        works = (self._follow(), self._report(), self._enter(), self._watch())
        tasks = {asyncio.create_task(work) for work in works}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _enter(self) -> None:
        """At the first time lets training begin when all fragments are here. Ends when the core was found gone."""
        if not self._entered:
            here, lost = asyncio.create_task(self._fetcher.all_here()), asyncio.create_task(self.standing.lost.wait())
            try:
                await asyncio.wait({here, lost}, return_when=asyncio.FIRST_COMPLETED)
                if not here.done():
                    return
                here.result()
            finally:
                for task in (here, lost):
                    task.cancel()
                await asyncio.gather(here, lost, return_exceptions=True)
            assert self.standing.layout is not None, "joining comes first"
            self._entered = True
            self._on_ready(self.standing.layout)
        await self.standing.lost.wait()

    async def _watch(self) -> None:
        """Ends when the core is silent for longer than is likely: its connections are dead, and nobody said so.

        Or when there are new certificates: what moves on the old connections goes on there.
        """
        self._arrivals.again(time.monotonic())
        while not self._arrivals.overdue(time.monotonic()) and not self.standing.link.stale:
            await asyncio.sleep(WATCH_S)
            await self.standing.link.rest()
        why = "new certificates" if self.standing.link.stale else "the core is silent"
        patience_s = round(self._arrivals.patience_s(), 1)
        log.warning(f"{why}: dialling again", learner=self._identity.name, patience_s=patience_s)
        self.standing.connected.clear()  # before the old one hangs up: nobody may call there again
        self._dial_again()

    def _dial_again(self) -> None:
        old = self.standing.link
        self.standing.link = self._links[self._links.index(old)] = self._dial(old.address, self._identity.access)
        self._retired.add(retired := asyncio.create_task(retire(old)))
        retired.add_done_callback(self._retired.discard)

    # ------------------------------------------------------------------------------ following

    async def _follow(self) -> None:
        standing = self.standing
        request = pb.FollowRequest(session=standing.session, log=standing.log, sequence=standing.sequence)
        with (
            standing.link.quick.use() as connection,
            opened("Follow", connection.stub.Follow(request)) as call,
        ):
            async for happening in call:
                if not self._happened(happening):
                    return

    def _happened(self, happening: pb.Happening) -> bool:
        """Takes in what the core tells; whether it goes on telling."""
        standing = self.standing
        standing.log, standing.sequence = happening.log, happening.sequence
        self._arrivals.saw(time.monotonic())
        match happening.WhichOneof("what"):
            case "current":
                self._sender.ask_again()  # the state tells versions, but not the fates since our last position
                self._counters.told(happening.current.run_tokens, happening.current.struck_tokens)
                for line, version in standing.newest(happening.current.versions):
                    self._fetcher.heard_of(line, version)
                for round_opened in happening.current.open:
                    self._opened(round_opened)
                self._pause(happening.current.paused.reason)
            case "opened":
                self._opened(happening.opened)
            case "published":
                self._counters.told(happening.published.run_tokens, happening.published.struck_tokens)
                line = standing.line(happening.published.fragment)
                self._fetcher.heard_of(line, happening.published.version)
            case "receipt":
                self._sender.decided(happening.receipt)
            case "paused":
                self._pause(happening.paused.reason)
            case "shutting_down":
                return False
        return True

    def _pause(self, reason: str) -> None:
        self._counters.stands = reason
        self._handover.pause(reason)

    def _opened(self, opened: pb.RoundOpened) -> None:
        if self.standing.line(opened.fragment).flight is not None:
            self._decline(opened.fragment, opened.cycle, "its contribution is in flight")
        else:
            self._handover.ask(opened.fragment, opened.cycle)

    def _decline(self, fragment: int, cycle: int, reason: str) -> None:
        self._handover.declined.append(pb.Declined(fragment=fragment, cycle=cycle, reason=reason))

    # ------------------------------------------------------------------------------ reporting

    async def _report(self) -> None:
        told, told_at = (-1, False), 0.0
        with (
            self.standing.link.quick.use() as connection,
            opened("Report", connection.stub.Report()) as call,
        ):
            while not call.done():
                for due in self._handover.withdraw(max(1.0, PATIENCE_STEPS * self._counters.step_time_s)):
                    self._decline(due.fragment, due.cycle, "no inner step while it was open")
                now = time.monotonic()
                state = (self._counters.steps, self._counters.pausing(time.perf_counter()))
                news = bool(self._handover.adopted or self._handover.declined) or state != told
                if news or now - told_at >= REPORT_S:
                    progress = self._progress()
                    if told[0] < 0:
                        progress.session.CopyFrom(self.standing.session)
                    told, told_at = (progress.steps, progress.paused), now
                    with until_it_ends():
                        await call.write(progress)
                if not call.done():
                    await asyncio.sleep(LOOK_S)
            await call

    def _progress(self) -> pb.Progress:
        """All counters, and what was adopted and declined since the last message, as much as one takes."""
        progress = self._counters.progress()
        declined, adopted = self._handover.declined, self._handover.adopted
        progress.declined.extend(declined.popleft() for _ in range(min(REPORTED, len(declined))))
        progress.adopted.extend(adopted.popleft() for _ in range(min(REPORTED, len(adopted))))
        return progress

    # ------------------------------------------------------------------------------ told by the agent

    def submit(self, taken: Taken) -> None:
        """A pseudo-gradient to be sent."""
        self._sender.send(self.standing.lines[taken.fragment], taken)

    async def say_goodbye(self) -> None:
        """Leaves cleanly if the core is there. Whoever calls it ends `live` then: there is no joining again."""
        self._leaving = True
        if self.standing.connected.is_set():
            request = pb.LeaveRequest(session=self.standing.session, last=self._progress())
            try:
                with self.standing.link.quick.use() as connection:
                    await answer(connection.stub.Leave(request, timeout=GOODBYE_S))
            except (grpc.aio.AioRpcError, LinkLost) as error:
                why = str(error) if isinstance(error, LinkLost) else one_line(error)
                log.warning("good-bye was not heard", learner=self._identity.name, error=why)
