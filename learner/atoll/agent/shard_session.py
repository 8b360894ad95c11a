"""A learner's session at one shard: follows the shard's notifications and reports progress.

An unreachable shard stalls only its own fragments. The learner retries that shard and stays connected to the others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import grpc.aio
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost, open_stream, tolerate_ended_call, unary_reply
from atoll_wire.contract import REPORT_S, REPORTED
from atoll_wire.process.clock import Clock
from atoll_wire.process.tasks import run_until_first_ends

from atoll.agent.core_view import CoreView, ShardView
from atoll.agent.fetching import Fetcher
from atoll.agent.sending import Sender
from atoll.fragments.exchange import ThreadExchange
from atoll.stats import Counters
from atoll.transfers.call_errors import GOODBYE_S, Remedy, backoff_s, one_line, remedy

log = structlog.get_logger()

LOOK_S = 0.25  # seconds between checks for new progress to report
PATIENCE_STEPS = 4.0  # the learner declines a round after this many step times (at least 1 s) without a step boundary
WATCH_S = 0.5  # seconds between checks for a silent shard and for new certificates


class ShardSession:
    """A session at one shard. dial_again: a function that replaces a shard's broken link."""

    def __init__(
        self,
        core: CoreView,
        shard: ShardView,
        exchange: ThreadExchange,
        counters: Counters,
        fetcher: Fetcher,
        sender: Sender,
        dial_again: Callable[[ShardView], None],
        clock: Clock,
    ) -> None:
        self._core = core
        self._shard = shard
        self._exchange = exchange
        self._counters = counters
        self._fetcher = fetcher
        self._sender = sender
        self._dial_again = dial_again
        self._clock = clock

    async def live(self) -> None:
        """Runs until the learner must join again. Then returns, or raises AioRpcError or LinkLost."""
        failures = 0
        while True:
            try:
                await self._stay()
                why = "the shard ended the session"
            except (grpc.aio.AioRpcError, LinkLost) as error:
                if self._ends_with(error):
                    raise
                why = one_line(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)
            else:
                if self._ends_with():
                    return
            finally:
                failures = 0 if self._shard.connected.is_set() else failures
                self._shard.connected.clear()
            if not failures:
                log.warning(
                    "lost the connection to a shard: the syncs of its fragments wait",
                    server=self._shard.link.address,
                    error=why,
                )
            self._counters.connected = False
            self._counters.last_error = why
            await asyncio.sleep(backoff_s(failures, random.Random()))  # noqa: S311 - jitter
            failures += 1
            if self._shard.link.stale:
                self._dial_again(self._shard)

    def _ends_with(self, error: grpc.aio.AioRpcError | LinkLost | None = None) -> bool:
        """Returns whether the learner must join again. Otherwise, it retries this shard."""
        if self._shard.lost.is_set() or self._core.said_goodbye:
            return True
        if isinstance(error, grpc.aio.AioRpcError) and remedy(error) is not Remedy.TRY_AGAIN:
            return True
        others = [shard for shard in self._core.near() if shard is not self._shard]
        return not self._shard.address and not any(shard.connected.is_set() for shard in others)

    async def _stay(self) -> None:
        """Runs the Follow and Report calls until one of them ends or the shard does not know the session."""
        await run_until_first_ends(self.follow(), self._report(), self._shard.lost.wait(), self._watch())

    async def _watch(self) -> None:
        """Connects again and returns if the shard has been silent for so long that its connections must be dead.

        Also connects again if the certificates were replaced. Transfers continue on the old connections.
        """
        shard = self._shard
        shard.arrivals.again(self._clock.monotonic())
        while not shard.arrivals.overdue(self._clock.monotonic()) and not shard.link.stale:
            await asyncio.sleep(WATCH_S)
            await shard.link.rest()
        why = "certificates were replaced" if shard.link.stale else "the core does not answer"
        max_wait_s = round(shard.arrivals.max_wait_s(), 1)
        log.warning(f"{why}: reconnecting", learner=shard.session.learner, max_wait_s=max_wait_s)
        shard.connected.clear()  # before the old link closes, so that no new call uses that link
        self._dial_again(shard)

    # ------------------------------------------------------------------------------ following

    async def follow(self) -> None:
        """Handles notifications until the shard ends the call. Raises AioRpcError, LinkLost and LearnerError."""
        shard = self._shard
        request = pb.FollowRequest(session=shard.session, log=shard.log, sequence=shard.sequence, shard=shard.number)
        known = {fragment: track.known() for fragment, track in shard.tracks.items()}
        with (
            shard.link.quick.use() as connection,
            open_stream("Follow", connection.stub.Follow(request)) as call,
        ):
            async for notification in call:
                if not shard.connected.is_set() and not shard.lost.is_set():
                    self._back()
                if not self._happened(notification, known):
                    return

    def _back(self) -> None:
        """Records that the shard answers again."""
        log.info("connected to the shard", server=self._shard.link.address)
        self._shard.connected.set()
        self._counters.connected = self._core.connected()

    def _happened(self, notification: pb.Notification, known: dict[int, int]) -> bool:
        """Handles a notification. Returns False if the shard is shutting down. known: the newest versions that were
        known when the Follow call began."""
        shard = self._shard
        shard.log, shard.sequence = notification.log, notification.sequence
        shard.arrivals.saw(self._clock.monotonic())
        match notification.WhichOneof("what"):
            case "current":
                self._sender.ask_again(shard)  # the state contains versions, but no fates since the last known position
                self._counters.told(notification.current.run_tokens, notification.current.voided_tokens)
                for track, version in shard.newest(notification.current.versions):
                    self._fetcher.heard_after_break(track, version, known[track.fragment])
                for round_opened in notification.current.open:
                    self._opened(round_opened)
                self._pause(notification.current.paused.reason)
            case "opened":
                self._opened(notification.opened)
            case "published":
                self._counters.told(notification.published.run_tokens, notification.published.voided_tokens)
                track = shard.track(notification.published.fragment)
                self._fetcher.heard_of(track, notification.published.version)
            case "receipt":
                self._sender.decided(shard, notification.receipt)
            case "paused":
                self._pause(notification.paused.reason)
            case "shutting_down":
                return False
        return True

    def _pause(self, reason: str) -> None:
        self._counters.paused_by = reason
        self._exchange.pause(reason)

    def _opened(self, opened: pb.RoundOpened) -> None:
        track = self._shard.track(opened.fragment)
        if track.in_flight is not None:
            self._decline(opened.fragment, opened.cycle, "the learner's earlier contribution is in flight")
        else:
            self._exchange.ask(opened.fragment, opened.cycle)
            self._fetcher.opened(track)

    def _decline(self, fragment: int, cycle: int, reason: str) -> None:
        self._exchange.declined.append(pb.Declined(fragment=fragment, cycle=cycle, reason=reason))

    # ------------------------------------------------------------------------------ reporting

    async def _report(self) -> None:
        shard = self._shard
        told, told_at = (-1, False), 0.0
        with (
            shard.link.quick.use() as connection,
            open_stream("Report", connection.stub.Report()) as call,
        ):
            while not call.done():
                patience_s = max(1.0, PATIENCE_STEPS * self._counters.step_time_s)
                for due in self._exchange.withdraw(patience_s):
                    self._decline(due.fragment, due.cycle, f"no inner step in the last {patience_s:.0f} s")
                now = self._clock.monotonic()
                state = (self._counters.steps, self._counters.pausing(now))
                self._core.sort_answers(self._exchange)
                news = bool(shard.adopted or shard.declined) or state != told
                if news or now - told_at >= REPORT_S:
                    progress = self._progress()
                    if told[0] < 0:
                        progress.session.CopyFrom(shard.session)
                    told, told_at = (progress.steps, progress.paused), now
                    with tolerate_ended_call():
                        await call.write(progress)
                if not call.done():
                    await asyncio.sleep(LOOK_S)
            await call

    def _progress(self) -> pb.Progress:
        """Returns all counters and, up to a limit, the adoptions and declined rounds since the last message."""
        progress, shard = self._counters.progress(self._clock.monotonic()), self._shard
        progress.shard = shard.number
        progress.round_trip_s = shard.link.round_trip_s
        progress.declined.extend(shard.declined.popleft() for _ in range(min(REPORTED, len(shard.declined))))
        progress.adopted.extend(shard.adopted.popleft() for _ in range(min(REPORTED, len(shard.adopted))))
        return progress

    async def say_goodbye(self) -> None:
        """Leaves cleanly if the shard is connected. A failure is only logged."""
        shard = self._shard
        if not shard.connected.is_set():
            return
        self._core.sort_answers(self._exchange)
        request = pb.LeaveRequest(session=shard.session, last=self._progress())
        try:
            with shard.link.quick.use() as connection:
                await unary_reply(connection.stub.Leave(request, timeout=GOODBYE_S))
        except (grpc.aio.AioRpcError, LinkLost) as error:
            why = str(error) if isinstance(error, LinkLost) else one_line(error)
            log.warning("the leave call failed", learner=shard.session.learner, error=why)
