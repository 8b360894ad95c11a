"""A learner's membership in a run: joins, keeps a session at every shard, and joins again after an outage.

RunSession runs on the agent's event loop and owns the CoreView. The Fetcher fetches fragments, the Sender sends
contributions, and the ThreadExchange holds work for the training thread.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable

import grpc
import grpc.aio
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost
from atoll_wire.connections.link import Link, close_gracefully, is_atoll_status, is_connection_lost
from atoll_wire.errors import ExitStatus
from atoll_wire.layout.layout import Layout
from atoll_wire.process.clock import Clock
from atoll_wire.process.tasks import end_all, first_ended
from atoll_wire.security.transport import TransportSecurity

from atoll.agent.coordination import Coordination, Leading, receive_on_loop
from atoll.agent.core_view import CoreView, FragmentTrack, ShardView
from atoll.agent.fetching import Fetcher
from atoll.agent.join_request import CODECS, Identity, Joiner, ModelDescription, planned
from atoll.agent.sending import Sender
from atoll.agent.shard_session import ShardSession
from atoll.agent.unit_leasing import lease_units
from atoll.errors import LearnerError
from atoll.fragments import segments
from atoll.fragments.exchange import Submission, ThreadExchange
from atoll.fragments.segments import Coder
from atoll.ranks.messages import RankMessages
from atoll.stats import Counters
from atoll.transfers.call_errors import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Remedy, backoff_s, detail, one_line, remedy
from atoll.transfers.places import checked_address

log = structlog.get_logger()

HELD_S = 2.0  # after a connection that lasted this many seconds, back-off restarts from its shortest wait
# A core may consider the previous process of a name alive for this many seconds after it first refused the name.
DUPLICATE_S = 12.0
REMIND_S = 60.0  # an outage is logged again after this many seconds
PART_OF_AN_OUTAGE = 0.1  # wait between attempts to join, as a share of the outage's duration so far


class RunSession:
    """Keeps a learner in a run. Use it on one event loop only.

    on_ready: called with the layout when the first anchors have arrived. stop: called with the error that ends the
    learner.
    coder: computes the changes to the parameters.
    """

    def __init__(
        self,
        identity: Identity,
        model: ModelDescription,
        exchange: ThreadExchange,
        counters: Counters,
        on_ready: Callable[[Layout], None],
        stop: Callable[[Exception], None],
        clock: Clock,
        dial: Callable[[str, TransportSecurity, Clock], Link] = Link,
        messages: RankMessages | None = None,
        coder: Coder = segments,
    ) -> None:
        self._identity = identity
        self._model = model
        self._exchange = exchange
        self._counters = counters
        self._on_ready = on_ready
        self._entered = False
        self._said_away: dict[str, float] = {}  # by cause of this outage: when it was last logged, in monotonic seconds
        self._name_taken_at: float | None = None  # when the core first refused the name since the last join
        self._stop = stop
        self._clock = clock
        self._rng = random.Random()  # noqa: S311 - jitter
        self._dial = dial
        self._links = [dial(address, identity.security, clock) for address in identity.addresses]
        self._retired: set[asyncio.Task[None]] = set()
        self.core = CoreView(self._links[0])
        self._joiner = Joiner(identity, model, self.core, counters, clock)
        self._coordination = self._coordinated(messages)
        self._sender = Sender(self.core, exchange, counters, stop, self._fetch, self._coordination)
        self._fetcher = Fetcher(self.core, exchange, counters, stop, self._sender, self._coordination, coder)
        self._sessions: dict[ShardView, ShardSession] = {}
        self._running: dict[ShardView, asyncio.Task[None]] = {}  # session tasks

    def _coordinated(self, messages: RankMessages | None) -> Coordination:
        if messages is None:
            return Coordination()
        leading = Leading(messages, self.core, self._exchange, self._counters)
        leading.begin_fetch = self._fetch
        leading.merged = lambda track: self._sender.end(track, merged=True)
        receive_on_loop(messages, leading.receive, self._stop)
        return leading

    def _fetch(self, track: FragmentTrack) -> None:
        """Starts a fetch for the Sender, which needs the whole fragment after a final refusal."""
        self._fetcher.begin(track)

    async def live(self) -> None:
        """Stays in the run until cancelled. Raises LearnerError if a retry cannot help."""
        attempt, short, began = 0, 0, self._clock.monotonic()  # short: number of consecutive short connections
        try:
            while True:
                try:
                    await self._join()
                    joined_at = self._clock.monotonic()
                    short += 1
                    try:
                        await self._stay()
                    finally:
                        if self._clock.monotonic() - joined_at > HELD_S:
                            short, began = 0, self._clock.monotonic()
                except grpc.aio.AioRpcError as error:
                    if not self.core.said_goodbye:  # after Leave, the core ends the session with an error
                        await self._note(error, self._clock.monotonic() - began)
                except LinkLost:
                    pass  # another link has replaced this link
                if self.core.said_goodbye:
                    await asyncio.Event().wait()
                self._counters.connected = False
                await asyncio.sleep(self._pause_s(self._clock.monotonic() - began, short))
                attempt += 1
                self.core.link = self._links[attempt % len(self._links)]
                if self.core.link.stale:
                    self.core.link = self._redialled(self.core.link)
        finally:
            self.core.leaving = True
            await self._leave(self.core.shards)
            await self._close()
            for task in self._retired:
                task.cancel()

    def _pause_s(self, away_s: float, short: int) -> float:
        """Returns the seconds until the next attempt: a fraction of the outage's duration, or more if new sessions keep
        ending."""
        part_s = min(LONGEST_BACKOFF_S, max(FIRST_BACKOFF_S, PART_OF_AN_OUTAGE * away_s))
        return max(self._rng.uniform(0.5, 1.0) * part_s, backoff_s(short, self._rng) if short else 0.0)

    async def _note(self, error: grpc.aio.AioRpcError, waited_s: float) -> None:
        """Logs once per minute why the core cannot be reached. Raises LearnerError if a retry cannot help."""
        fault = await self.core.link.tls_fault() if is_connection_lost(error) else ""
        self._counters.last_error = fault or one_line(error)
        address, name = self.core.link.address, self._identity.name
        if remedy(error) in {Remedy.STOP, Remedy.GIVE_UP} and not self._name_may_become_free(error):
            status = ExitStatus.REFUSED if remedy(error) is Remedy.STOP else ExitStatus.FAILED
            raise LearnerError(f"learner {name!r} cannot continue: {detail(error)}", status)
        if not self._entered and waited_s > self._identity.connect_timeout_s:
            text = f"could not join the run at {address} within {waited_s:.0f} s"
            if fault or is_atoll_status(error):
                status = ExitStatus.FAILED if fault else ExitStatus.UNREACHABLE
                raise LearnerError(f"{text}: {fault or detail(error)}", status)
            fix = "if no core runs there, start a core, or correct the server address"
            raise LearnerError(f"{text} ({one_line(error)}): {fix}", ExitStatus.UNREACHABLE)
        cause, now = fault or "away", self._clock.monotonic()
        if now - self._said_away.get(cause, -math.inf) >= REMIND_S:
            self._counters.reconnects += self._entered and not self._said_away
            self._said_away[cause] = now
            text = "lost the connection to the core: training continues" if self._entered else "waiting for the core"
            log.warning(text, learner=name, server=address, error=self._counters.last_error)

    def _name_may_become_free(self, error: grpc.aio.AioRpcError) -> bool:
        """Returns whether another process uses the name and the first refusal was less than DUPLICATE_S seconds ago."""
        if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
            return False
        now = self._clock.monotonic()
        if self._name_taken_at is None:
            self._name_taken_at = now
        return now - self._name_taken_at < DUPLICATE_S

    # ------------------------------------------------------------------------------ joining

    async def _join(self) -> None:
        """Joins the run and begins to fetch all newer versions."""
        reply = await self._joiner.join()
        self._name_taken_at = None
        await self._joined(reply)
        self._coordination.joined(reply, max(track.restores for track in self.core.tracks.values()))
        for fragment, version in sorted(reply.versions.items()):
            track = self.core.track(fragment)
            self._fetcher.heard_after_break(track, version, max(track.version, track.target))
        for track in self.core.tracks.values():
            self._fetcher.begin(track)

    async def _joined(self, reply: pb.JoinReply) -> None:
        """Applies the reply to a Join."""
        core = self.core
        known = {core.settings.codec} if core.tracks else CODECS
        layout = planned(self._model.tensors, reply, known)
        shards = self._placed(reply, layout)
        restored = core.layout is not None and reply.generation != core.session.generation
        if core.layout is None:
            core.layout = layout
        elif restored:
            self._restored(reply)
        core.settings, core.session = reply.settings, self._joiner.session(reply)
        await self._take_over(shards)
        self._counters.connected = core.connected()
        # After a restore from a backup, the run may have fewer voided tokens than before.
        self._counters.voided_tokens = min(self._counters.voided_tokens, reply.voided_tokens)
        self._counters.told(reply.run_tokens, reply.voided_tokens, restored=restored)
        self._counters.total_tokens = reply.settings.total_tokens
        self._counters.earlier_tokens, self._counters.earlier_steps = reply.earlier_tokens, reply.earlier_steps
        if self._said_away:
            log.info("connected to the core", learner=self._identity.name, epoch=reply.epoch)
            self._said_away.clear()

    def _placed(self, reply: pb.JoinReply, layout: Layout) -> list[ShardView]:
        """Returns the shards that the Join reply names. Reuses each shard whose address and fragments are the same.

        Raises LearnerError for an address that the learner must not connect to.
        """
        known = {(shard.address, frozenset(shard.tracks)): shard for shard in self.core.shards}
        shards = list[ShardView]()
        for number, place in enumerate(reply.shards):
            shard = known.get((place.address, frozenset(place.fragments)))
            address = place.address or self.core.link.address
            if not place.address and all(other.address for other in shards):
                link = self.core.link
            elif shard is not None and shard.link not in self._links and shard.link.address == address:
                link = shard.link
            else:
                link = self._dialled(address)
            if shard is None:
                shard = ShardView(place.address, link)
                owners = self._coordination.owners
                runs = [owners.run(layout.fragments[fragment]) for fragment in sorted(place.fragments)]
                shard.tracks = {run.fragment.index: FragmentTrack(run, shard) for run in runs}
            elif shard.link not in {link, *self._links}:
                self._retire(shard.link)
            shard.number, shard.link = number, link
            shards.append(shard)
        return shards

    async def _take_over(self, shards: list[ShardView]) -> None:
        """Sets the run's shards. Running sessions at these shards continue, unless the Join gave a new session."""
        core = self.core
        gone = [shard for shard in core.shards if shard not in shards]
        core.place(shards)
        there = [shard for shard, task in self._running.items() if not task.done()]
        moved = [shard for shard in shards if shard not in there or shard.session != core.session]
        await self._leave([*gone, *moved])
        for shard in gone:
            del self._sessions[shard]
            if shard.link not in self._links:
                self._retire(shard.link)
        for shard in moved:
            shard.joined(core.session)
            if shard not in self._sessions:
                parts = (self._exchange, self._counters, self._fetcher, self._sender)
                self._sessions[shard] = ShardSession(core, shard, *parts, self._dial_again, self._clock)

    # ------------------------------------------------------------------------------ sessions at the shards

    def _restored(self, reply: pb.JoinReply) -> None:
        """Handles a restore of the run to a checkpoint: drops later work and fetches every fragment whole."""
        log.warning("the run was restored to a checkpoint: dropping later work", generation=reply.generation)
        self._coordination.restored()
        self._exchange.adopted.clear()
        if not self._entered:
            self._exchange.start_over()
        for shard in self.core.shards:
            shard.lose(shard.session)  # a shard that has not rolled back yet still knows this session
            shard.adopted.clear()
        for track in self.core.tracks.values():
            track.whole = track.drop = True
            track.target = 0
            track.setbacks += 1
            track.restores += self._entered
            track.incoming = None
            self._sender.forget(track)

    async def _stay(self) -> None:
        """Runs a session at every shard until the learner must join again. Raises the error that ended a session."""
        for shard, session in self._sessions.items():
            if shard not in self._running:
                self._running[shard] = task = asyncio.create_task(session.live())
                task.add_done_callback(self._ended)
        entering = asyncio.create_task(self._enter())
        try:
            await first_ended([entering, *self._running.values()])
        finally:
            entering.cancel()
            ended = [shard for shard, task in self._running.items() if task.done()]
            await self._leave([*ended, *self.core.near()])
            await asyncio.gather(entering, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Stops the learner after an error that joining again cannot fix."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, grpc.aio.AioRpcError | LinkLost):
            self._stop(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def _leave(self, shards: Iterable[ShardView]) -> None:
        """Cancels the sessions at these shards and waits until they have ended."""
        tasks = [self._running.pop(shard) for shard in shards if shard in self._running]
        await end_all(tasks)

    async def _enter(self) -> None:
        """Lets training begin once all fragments have arrived. Then waits until cancelled."""
        if not self._entered:
            await self._fetcher.all_here()
            await self._coordination.all_prepared(len(self.core.tracks))
            assert self.core.layout is not None, "the learner must join first"
            self._entered = True
            self._on_ready(self.core.layout)
        await asyncio.Event().wait()

    # ------------------------------------------------------------------------------ links

    def _dialled(self, address: str) -> Link:
        """Returns a link to an address that the core sent. Raises LearnerError if the address is invalid."""
        security = self._identity.security
        return self._dial(checked_address(address, security), security, self._clock)

    def _dial_again(self, shard: ShardView) -> None:
        """Replaces a shard's dead link. If it is also the run's link, replaces that too."""
        old, shard.link = shard.link, self._redialled(shard.link)
        if self.core.link is old:
            self.core.link = shard.link

    def _redialled(self, old: Link) -> Link:
        """Returns a new link to the same address. The old link closes after its transfers end."""
        new = self._dial(old.address, self._identity.security, self._clock)
        self._links = [new if link is old else link for link in self._links]
        self._retire(old)
        return new

    async def _close(self) -> None:
        """Ends all transfers and closes all links."""
        await self._sender.close()
        await self._fetcher.close()
        for link in dict.fromkeys([*self._links, *(shard.link for shard in self.core.shards)]):
            await link.close()

    def _retire(self, link: Link) -> None:
        self._retired.add(retired := asyncio.create_task(close_gracefully(link)))
        retired.add_done_callback(self._retired.discard)

    # ------------------------------------------------------------------------------ called by the agent

    def submit(self, taken: Submission) -> None:
        """Starts to send a pseudo-gradient. Returns immediately."""
        self._sender.send(self.core.tracks[taken.fragment], taken)

    async def lease_units(
        self, request: Callable[[], pb.LeaseUnitsRequest], after_s: float
    ) -> tuple[pb.LeaseUnitsReply, int]:
        """Leases data units: see `unit_leasing`."""
        return await lease_units(self.core, request, after_s, self._rng)

    @property
    def began_run(self) -> bool:
        """Whether the run began with this learner's parameters."""
        return self._joiner.sent_initial

    async def say_goodbye(self) -> None:
        """Leaves every connected shard. Afterwards the caller must end `live`: the learner cannot join again."""
        self.core.said_goodbye = True
        await asyncio.gather(*(session.say_goodbye() for session in self._sessions.values()))
