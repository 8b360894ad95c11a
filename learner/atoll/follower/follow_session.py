"""Reads the published model from cores and fronts.

A session first reads the run's description. It then watches for new versions and fetches them.

A reader has no session in the run. An unreachable shard stalls only its own fragments.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import grpc.aio
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.arrival_estimator import ArrivalEstimator
from atoll_wire.connections.calls import LinkLost, open_stream, unary_reply
from atoll_wire.connections.link import Link, close_gracefully, is_atoll_status, is_connection_lost
from atoll_wire.contract import JOIN_S, PROTOCOL, token_metadata
from atoll_wire.errors import ExitStatus
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import Layout, LayoutError, plan
from atoll_wire.model_file.fixed_values import FixedValues
from atoll_wire.model_file.model_file import RunId
from atoll_wire.process.clock import Clock
from atoll_wire.process.tasks import run_until_first_ends
from atoll_wire.security.certificate import CertificateError, Role, check_role
from atoll_wire.security.transport import LOCAL, TransportSecurity, TransportSecurityError

from atoll.errors import NONSENSE, FollowerError
from atoll.follower.cuts import Cut, CutExchange
from atoll.follower.fixed_fetch import FixedFetch
from atoll.follower.fragment_fetches import FragmentFetches
from atoll.follower.model_view import FollowedFragment, ModelView
from atoll.transfers.call_errors import Remedy, backoff_s, detail, one_line, remedy
from atoll.transfers.places import checked_address, checked_places

log = structlog.get_logger()

SHORTEST_WAIT_S, LONGEST_WAIT_S = 4.0, 60.0  # bounds on the wait for a silent server; see ArrivalEstimator
WATCH_S = 0.5  # seconds between checks for a silent server and for new certificates
HELD_S = 2.0  # after a connection that lasted this many seconds, back-off restarts from its shortest wait


@dataclass(frozen=True, slots=True)
class Source:
    """The servers that a follower reads from. addresses: HOST:PORT of cores and fronts, which are tried in turn.

    connect_timeout_s: longest wait for the first model, in seconds. token: an operator's token, for cores that require
    a token from callers without certificates.
    """

    addresses: Sequence[str]
    connect_timeout_s: float
    security: TransportSecurity = LOCAL
    token: str = ""

    def check(self) -> None:
        """Raises FollowerError if the addresses or certificates are unusable."""
        if not self.addresses:
            raise FollowerError("the list of servers is empty: give at least one HOST:PORT")
        try:
            self.security.check(self.addresses)
            if self.security.tls is not None and not self.token:
                check_role(self.security.tls, Role.READER)
        except (TransportSecurityError, CertificateError) as error:
            raise FollowerError(str(error), error.exit_status) from error


@dataclass(slots=True, eq=False)
class Upstream:
    """One address that serves shards. address: HOST:PORT, or empty for the address that sent the run's description.

    session: the run and its generation, as a new object after each Describe call. connected: set while the server
    answers.
    """

    address: str
    link: Link
    session: pb.Session = field(default_factory=pb.Session)
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    arrivals: ArrivalEstimator = field(default_factory=lambda: ArrivalEstimator(SHORTEST_WAIT_S, LONGEST_WAIT_S))


class FollowSession:
    """Follows one run. Use it on one event loop only.

    exchange: receives the cuts. stop: ends the follower with an error. dial: creates links; None for real links.
    """

    def __init__(
        self,
        source: Source,
        exchange: CutExchange,
        stop: Callable[[Exception], None],
        clock: Clock,
        dial: Callable[[str, TransportSecurity, Clock], Link] | None = None,
    ) -> None:
        self._source = source
        self._exchange = exchange
        self._clock = clock
        self._dial = dial or partial(Link, metadata=token_metadata(source.token))
        self._rng = random.Random()  # noqa: S311 - jitter
        self._links = [self._dial(address, source.security, clock) for address in source.addresses]
        self._turn = 0  # index of the address in use
        self._retired: set[asyncio.Task[None]] = set()
        self._upstreams: dict[str, Upstream] = {}  # by address
        self._view = ModelView()
        self._fetches = FragmentFetches(self._view, self._offer, self._lost, stop)
        self._restart = asyncio.Event()  # set when the run's description must be read again
        self._fixed_fetch: FixedFetch | None = None
        self._fixed: FixedValues | None = None
        self._layout: Layout | None = None
        self._offered: Cut | None = None
        self._said_away: set[str] = set()  # causes of this outage that were logged

    async def live(self) -> None:
        """Follows the run until cancelled. Raises FollowerError if a retry cannot help."""
        short, began = 0, self._clock.monotonic()  # short: number of consecutive short connections
        try:
            while True:
                described_at = self._clock.monotonic()
                try:
                    await self._describe()
                    described_at = self._clock.monotonic()
                    await self._stay()
                except grpc.aio.AioRpcError as error:
                    await self._note(error, self._clock.monotonic() - began)
                except LinkLost:
                    pass  # another link has replaced this link
                if self._clock.monotonic() - described_at > HELD_S:
                    short, began = 0, self._clock.monotonic()
                await asyncio.sleep(backoff_s(short, self._rng))
                short += 1
                if not self._restart.is_set():
                    self._turn = (self._turn + 1) % len(self._links)
                if self._links[self._turn].stale:
                    self._redial(self._links[self._turn])
        finally:
            self._view.leaving = True
            await self._fetches.end()
            for link in {*self._links, *(upstream.link for upstream in self._upstreams.values())}:
                await link.close()
            for task in self._retired:
                task.cancel()

    async def _note(self, error: grpc.aio.AioRpcError, waited_s: float) -> None:
        """Logs once per outage why the server cannot be read. Raises FollowerError if a retry cannot help."""
        link = self._links[self._turn]
        address, fault = link.address, await link.tls_fault() if is_connection_lost(error) else ""
        self._exchange.cause = fault or (detail(error) if is_atoll_status(error) else "")
        if remedy(error) in {Remedy.STOP, Remedy.GIVE_UP}:
            status = ExitStatus.REFUSED if remedy(error) is Remedy.STOP else ExitStatus.FAILED
            raise FollowerError(f"the model cannot be read from {address}: {detail(error)}", status)
        if self._offered is None and waited_s > self._source.connect_timeout_s:
            text = f"no model arrived from {address} within {waited_s:.0f} s"
            if self._exchange.cause:
                status = ExitStatus.FAILED if fault else ExitStatus.UNREACHABLE
                raise FollowerError(f"{text}: {self._exchange.cause}", status)
            fix = "start a core and a learner, or correct the server address"
            raise FollowerError(f"{text} ({one_line(error)}): {fix}", ExitStatus.UNREACHABLE)
        if (cause := fault or "away") not in self._said_away:
            self._said_away.add(cause)
            text = "waiting for the server: the model stays unchanged"
            log.warning(text, server=address, error=fault or one_line(error))

    # ------------------------------------------------------------------------------ describing

    async def _describe(self) -> None:
        """Reads the run's description, and its fixed values if they are not known yet. Raises AioRpcError, LinkLost and
        FollowerError."""
        self._restart.clear()
        link, began = self._links[self._turn], self._clock.monotonic()
        with link.quick.use() as connection:
            request = pb.DescribeRequest(protocol=PROTOCOL)
            reply: pb.DescribeReply = await unary_reply(connection.stub.Describe(request, timeout=JOIN_S))
        link.answered(self._clock.monotonic() - began)
        run = RunId(reply.run, reply.generation)
        self._view.begins(run)
        if self._fixed is None:
            if self._fixed_fetch is None or self._fixed_fetch.size_bytes != reply.fixed_bytes:
                self._fixed_fetch = FixedFetch(reply.fixed_bytes)
            self._fixed = await self._fixed_fetch.fetch(link, run)
            self._fixed_fetch = None
        self._layout = _planned(self._fixed, reply)
        self._view.settings = reply.settings
        self._place(reply, self._layout, link)
        if self._said_away:
            self._said_away.clear()
            log.info("connected to the server", server=link.address)

    def _place(self, reply: pb.DescribeReply, layout: Layout, near: Link) -> None:
        """Sets the address of each fragment. Keeps the connections to addresses that still serve fragments."""
        upstreams = {"": Upstream("", near)}
        for place in reply.shards:
            if place.address not in upstreams:
                known = self._upstreams.get(place.address)
                link = self._dialled(place.address) if known is None else known.link
                upstreams[place.address] = Upstream(place.address, link)
            for index in place.fragments:
                upstream = upstreams[place.address]
                fragment = self._view.fragments.get(index)
                if fragment is None:
                    run = layout.fragments[index].whole
                    fragment = self._view.fragments[index] = FollowedFragment(run, upstream)
                fragment.shard = upstream
        for address, old in self._upstreams.items():
            old.connected.set()  # calls that wait for the old address continue at the fragment's new address
            if address and address not in upstreams:
                self._retire(old.link)
        for upstream in upstreams.values():
            upstream.session = pb.Session(run=reply.run, generation=reply.generation)
        self._view.places = [frozenset(place.fragments) for place in reply.shards]
        self._upstreams = upstreams

    def _lost(self, session: pb.Session) -> None:
        """Makes the session read the run's description again, because a server does not know this generation."""
        if any(session is upstream.session for upstream in self._upstreams.values()):
            for upstream in self._upstreams.values():
                upstream.connected.clear()
            self._restart.set()

    # ------------------------------------------------------------------------------ watching

    async def _stay(self) -> None:
        """Watches all addresses until the run's description must be read again. Raises AioRpcError and LinkLost."""
        watches = [self._keep_watching(each) for each in self._upstreams.values()]
        try:
            await run_until_first_ends(self._restart.wait(), *watches)
        finally:
            for upstream in self._upstreams.values():
                upstream.connected.clear()

    async def _keep_watching(self, upstream: Upstream) -> None:
        """Watches one address until the run's description must be read again."""
        failures = 0
        while True:
            why = "the server ended the call"
            try:
                await self._watch(upstream)
            except grpc.aio.AioRpcError as error:
                if remedy(error) is Remedy.JOIN_AGAIN:
                    self._lost(upstream.session)
                    return
                if not upstream.address or remedy(error) is not Remedy.TRY_AGAIN:
                    raise
                why = one_line(error)
            except LinkLost as error:
                why = str(error)
            failures = 0 if upstream.connected.is_set() else failures
            upstream.connected.clear()
            if not upstream.address:
                return
            if not failures:
                log.warning("lost the connection to a shard", server=upstream.link.address, error=why)
            await asyncio.sleep(backoff_s(failures, self._rng))
            failures += 1
            if upstream.link.stale:
                upstream.link = self._redial(upstream.link)

    async def _watch(self, upstream: Upstream) -> None:
        """Watches one address until the call ends or the server is silent. Raises AioRpcError and LinkLost."""
        await run_until_first_ends(self._receive(upstream), self._silence(upstream))

    async def _receive(self, upstream: Upstream) -> None:
        request = pb.WatchRequest(run=upstream.session.run, generation=upstream.session.generation)
        with (
            upstream.link.quick.use() as connection,
            open_stream("Watch", connection.stub.Watch(request)) as call,
        ):
            async for reply in call:
                upstream.arrivals.saw(self._clock.monotonic())
                upstream.connected.set()
                if reply.log:
                    for fragment in self._view.heard(reply):
                        self._fetches.begin(fragment)
                    self._offer()

    async def _silence(self, upstream: Upstream) -> None:
        """Waits until the server has been silent for too long or the certificates were replaced. Then replaces the
        link."""
        upstream.arrivals.again(self._clock.monotonic())
        while not upstream.arrivals.overdue(self._clock.monotonic()) and not upstream.link.stale:
            await asyncio.sleep(WATCH_S)
            await upstream.link.rest()
        upstream.connected.clear()  # before the old link closes, so that no new call uses that link
        upstream.link = self._redial(upstream.link)

    def _offer(self) -> None:
        """Passes the current versions to the user's thread if they are a new consistent cut."""
        fragments, run, fixed, layout = self._view.fragments, self._view.run, self._fixed, self._layout
        if run is None or fixed is None or layout is None or not all(each.ready() for each in fragments.values()):
            return
        values = {index: each.values for index, each in fragments.items() if each.values is not None}
        cut = Cut(run, layout, fixed, values)
        if not cut.same_as(self._offered):
            self._offered = cut
            self._exchange.offer(cut)

    # ------------------------------------------------------------------------------ links

    def _dialled(self, address: str) -> Link:
        """Returns a link to an address that the server named. Raises LearnerError if the address or TLS is invalid."""
        security = self._source.security
        return self._dial(checked_address(address, security), security, self._clock)

    def _redial(self, old: Link) -> Link:
        """Returns a new link to the same address. The old link closes after its transfers end."""
        new = self._dial(old.address, self._source.security, self._clock)
        self._links = [new if link is old else link for link in self._links]
        self._retire(old)
        return new

    def _retire(self, link: Link) -> None:
        self._retired.add(retired := asyncio.create_task(close_gracefully(link)))
        retired.add_done_callback(self._retired.discard)


def _planned(fixed: FixedValues, reply: pb.DescribeReply) -> Layout:
    """Returns the run's layout. Raises FollowerError if the server's layout differs."""
    if reply.settings.codec not in {int(kind) for kind in Codec}:
        raise FollowerError(f"the run uses the unknown codec {reply.settings.codec}: {NONSENSE}")
    try:
        layout = plan(fixed.tensors, reply.settings.fragments)
    except LayoutError as error:
        raise FollowerError(f"the server sent an invalid layout ({error}): {NONSENSE}") from error
    if layout.fingerprint != reply.fingerprint:
        raise FollowerError(f"the server computed a different layout of the model: {NONSENSE}")
    checked_places(reply.shards, len(layout.fragments))
    return layout
