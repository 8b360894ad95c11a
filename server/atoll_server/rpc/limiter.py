"""Applies the limits of `access.quotas` to every call of a core or a front, before the service receives the call.

gRPC reads the whole message of a unary call before any of Atoll's code runs. On a stream, gRPC buffers at most one
window until the server reads a message. The limiter therefore handles every call as a stream. It limits how many of a
caller's messages can be in memory, how fast messages may arrive and how long each may take to arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import prometheus_client
from atoll_wire import outer_pb2 as pb
from atoll_wire.messages import message_parts
from atoll_wire.process.clock import Clock
from atoll_wire.security.certificate import Role
from google.protobuf.message import DecodeError

from atoll_server.access.identity import Caller, caller_or_peer
from atoll_server.access.quotas import FRONT_FACTOR, CallSlots, NoSlotError, Quotas, RateBucket, or_raise, slots_of
from atoll_server.access.refusals import Refused, Status
from atoll_server.access.revocations import RevokedCertificates
from atoll_server.rpc.calls import Context, abort, may_end

LOOK_S = 0.05  # seconds between two checks for a free slot by a waiting call
FORGET_S, FORGET_ABOVE = 60.0, 4096  # above FORGET_ABOVE owners, the limiter forgets owners idle for FORGET_S
IN_PIECES = {"Join", "Push"}  # methods whose requests may arrive in pieces
OUT_IN_PIECES = {"Fetch", "Read"}  # methods whose replies are sent in pieces

Vouched = Callable[[Caller, pb.Session], Hashable]  # returns the key of a session's learner, or None if unknown
Ended = Callable[[str, str, str], None]  # called with (method, peer, reason) when the limiter ends a call


@dataclass(eq=False, slots=True)
class _Call:
    """An open call. why: the refusal with which the call must end; None while the call may continue."""

    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    why: Refused | None = None
    ended: bool = False  # whether the call's status is being sent or was sent

    def end(self, why: Refused) -> None:
        if self.why is None and not self.ended:
            self.why = why
            self.limit.reschedule(asyncio.get_running_loop().time())


class _Owner:
    """A peer's or learner's open calls and rates. many: factor for quotas. trusted: factor for memory limits."""

    def __init__(self, quotas: Quotas, many: int = 1, trusted: int = 1) -> None:
        self.quotas = quotas
        self.many = many
        self.trusted = trusted
        self.first: CallSlots[_Call] = CallSlots(quotas.first_calls * trusted)
        self.waiting = 0
        self.calls = RateBucket(quotas.calls_per_s * many, quotas.calls_burst * many)
        self.joins = RateBucket(quotas.joins_per_s * trusted, quotas.joins_burst * trusted)
        self.spoilt = RateBucket(quotas.spoilt_per_s * many, quotas.spoilt_burst * many)
        self.assembling = {"Push": asyncio.Semaphore(quotas.assembling * trusted), "Join": asyncio.Semaphore(trusted)}
        self._streams: dict[str, CallSlots[_Call]] = {}
        self._messages: dict[str, RateBucket] = {}
        self.used_at = 0.0

    def streams(self, method: str) -> CallSlots[_Call]:
        method = slots_of(method)
        if method not in self._streams:
            self._streams[method] = CallSlots(self.quotas.streams(method) * self.many)
        return self._streams[method]

    def messages(self, method: str) -> RateBucket:
        if method not in self._messages:
            per_s, burst = self.quotas.messages(method)
            self._messages[method] = RateBucket(per_s * self.many, burst * self.many)
        return self._messages[method]

    def idle(self) -> bool:
        return not (self.waiting or len(self.first) or any(map(len, self._streams.values())))


@dataclass(frozen=True, slots=True)
class _Method:
    """A gRPC method. path: for example, /atoll.v1.Outer/Push. handler: the service's handler."""

    path: str
    handler: Any

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def behaviour(self) -> Any:  # noqa: ANN401 - gRPC's
        of = self.handler
        kind = "_".join("stream" if many else "unary" for many in (of.request_streaming, of.response_streaming))
        return getattr(of, kind)


class CallLimiter(grpc.aio.ServerInterceptor):
    """Applies quotas to all calls of a server. limited: counter of refusals and waits, by limit."""

    def __init__(
        self, quotas: Quotas, vouched: Vouched, limited: prometheus_client.Counter, ended: Ended, clock: Clock,
        revoked: RevokedCertificates,
    ) -> None:  # fmt: skip
        self.quotas = quotas
        self.clock = clock
        self._vouched = vouched
        self._limited = limited
        self._ended = ended
        self._revoked = revoked
        self._owners: dict[Hashable, _Owner] = {}
        self._forgot_at = 0.0
        self._handlers: dict[str, Any] = {}  # by path

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,  # noqa: ANN401 - gRPC's
    ) -> Any:  # noqa: ANN401 - gRPC's
        """Implements gRPC's hook: wraps a method's handler, so that its calls pass through the limiter."""
        path = handler_call_details.method
        if path not in self._handlers:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            method = _Method(path, handler)

            async def through(_: Any, context: Context) -> None:  # noqa: ANN401 - gRPC's reader
                await self._pass(method, context)

            self._handlers[path] = grpc.stream_stream_rpc_method_handler(through)
        return self._handlers[path]

    async def _pass(self, method: _Method, context: Context) -> None:
        call = _Call()
        may_end(call.end)
        places = list[CallSlots[_Call]]()
        try:
            if (why := await self._carried_out(method, context, call, places)) is not None:
                call.ended = True
                self._ended(method.name, context.peer(), why.detail)
                await abort(context, why)  # the call keeps its slots until then, so that stalled calls stay limited
        finally:
            for place in places:
                place.leave(call)

    async def _carried_out(
        self, method: _Method, context: Context, call: _Call, places: list[CallSlots[_Call]]
    ) -> Refused | None:
        """Runs a call. Returns the refusal that must end the call, or None. The refusal does not reference the call."""
        who = caller_or_peer(context)
        peer = self._peer(who, context)
        inward = _Inward(self, method, context, peer)
        outward = _Outward(self, context, method, call, inward)
        try:
            with self._revoked.calling(who, call.end):
                async with call.limit:
                    request = await self._first(method, peer, call, inward)
                    inward.owner = self._whose(who, peer, request)
                    pool = inward.owner.streams(method.name)
                    self._enter(pool, call, method)
                    places.append(pool)
                    await self._run(method, request, inward, outward)
        except TimeoutError:
            if call.why is None:
                raise
            return call.why
        except Refused as refused:
            return Refused(refused.status, refused.detail)
        return None

    # ------------------------------------------------------------------------------ before the first message

    async def _first(self, method: _Method, peer: _Owner, call: _Call, inward: _Inward) -> Any:  # noqa: ANN401
        async with self._turn(peer, call):
            try:
                async with asyncio.timeout(self.quotas.first_message_s):
                    request = await inward.read()
            except TimeoutError as error:
                if call.why is not None:
                    raise
                text = f"the call's first message did not arrive within {self.quotas.first_message_s:.0f} s: call again"
                raise self.over("first_message", text) from error
        if request is None and not method.handler.request_streaming:
            raise Refused(Status.INVALID_ARGUMENT, "the call has no message: send one message")
        return request

    @asynccontextmanager
    async def _turn(self, peer: _Owner, call: _Call) -> AsyncIterator[None]:
        """Returns a context manager that occupies one of the peer's slots for calls without a first message."""
        if peer.waiting >= self.quotas.first_waiting * peer.trusted:
            text = f"{peer.waiting} calls of this caller already wait to start (the limit): call later, or less often"
            raise self.over("first_message", text)
        peer.waiting += 1
        try:
            await self.paced(peer.calls, "calls_per_s", "calls")
            while True:
                try:
                    oldest = peer.first.enter(call, self.clock.monotonic(), self.quotas.fresh_s)
                    break
                except NoSlotError:
                    await asyncio.sleep(LOOK_S)
        finally:
            peer.waiting -= 1
        try:
            if oldest is not None:
                most = self.quotas.first_calls * peer.trusted
                text = f"{most} calls are open without a first message: send each call's first message immediately"
                oldest.end(self.over("first_message", text))
            yield
        finally:
            peer.first.leave(call)

    def _whose(self, who: Caller, peer: _Owner, request: Any) -> _Owner:  # noqa: ANN401 - a message
        """Returns the session's learner as owner if the caller may act for this learner, otherwise the peer."""
        session = _session(request)
        if session is None:
            return peer
        try:
            who.speaks_for(session.learner)
        except Refused:
            return peer
        key = self._vouched(who, session)
        return peer if key is None else self._owner(("learner", key))

    # ------------------------------------------------------------------------------ while it runs

    async def _run(self, method: _Method, request: Any, inward: _Inward, outward: _Outward) -> None:  # noqa: ANN401
        if inward.owner is not inward.peer:
            await self.paced(inward.owner.calls, "calls_per_s", "calls")
        if method.name == "LeaseUnits":
            await self.paced(inward.owner.messages(method.name), "messages_per_s", "requests for data units")
        if method.name in {"Push", "Initialise"}:  # after wrong checksums, new calls must wait
            await self.paced(inward.owner.spoilt, "spoilt_per_s", "calls with wrong checksums", 0.0)
        handler = method.handler
        asked = inward.requests(request) if handler.request_streaming else request
        answer = method.behaviour(asked, outward)
        if not handler.response_streaming:
            await outward.write(await answer)
        elif hasattr(answer, "__aiter__"):
            async with aclosing(answer) as replies:
                async for reply in replies:
                    await outward.write(reply)
        else:
            await answer  # the handler writes its replies itself

    def _enter(self, pool: CallSlots[_Call], call: _Call, method: _Method) -> None:
        try:
            oldest = pool.enter(call, self.clock.monotonic())
        except NoSlotError:
            text = f"{len(pool)} {method.name} calls of this caller are still open (the limit): try again in a minute"
            raise self.over("streams", text) from None
        if oldest is not None:
            fix = f"keep fewer open{or_raise(method.name)}"
            text = f"a newer {method.name} call ended this one (limit: {len(pool) - 1} per caller): {fix}"
            oldest.end(self.over("streams", text))

    async def paced(self, bucket: RateBucket, limit: str, what: str, cost: float = 1.0) -> None:
        """Waits until the bucket allows `cost`. Raises Refused if the wait would exceed `max_wait_s`."""
        wait_s = bucket.take(self.clock.monotonic(), cost)
        if wait_s > self.quotas.max_wait_s:
            bucket.take(self.clock.monotonic(), -cost)
            raise self.over(limit, f"{what} arrive faster than the limit: wait {wait_s:.0f} s, and send fewer")
        if wait_s:
            self._limited.labels(limit).inc()
            await asyncio.sleep(wait_s)

    def over(self, limit: str, text: str) -> Refused:
        """Counts a call that reached a limit and returns its refusal. limit: the metric's label. text: the message."""
        self._limited.labels(limit).inc()
        return Refused(Status.RESOURCE_EXHAUSTED, text)

    def _peer(self, who: Caller, context: Context) -> _Owner:
        """Returns the owner that counts the calls of the caller's peer.

        Fronts and addresses without a certificate get larger quotas, since each may act for many learners.
        """
        many = FRONT_FACTOR if who.role in {None, Role.FRONT} else 1
        key = ("peer", who.role, who.name or context.peer().rpartition(":")[0])
        return self._owner(key, many, FRONT_FACTOR if who.role is Role.FRONT else 1)

    def _owner(self, key: Hashable, many: int = 1, trusted: int = 1) -> _Owner:
        now = self.clock.monotonic()
        if len(self._owners) > FORGET_ABOVE and now > self._forgot_at + FORGET_S:
            self._forgot_at = now
            for other, owner in list(self._owners.items()):
                if owner.idle() and now > owner.used_at + FORGET_S:
                    del self._owners[other]
        if key not in self._owners:
            self._owners[key] = _Owner(self.quotas, many, trusted)
        owner = self._owners[key]
        owner.used_at = now
        return owner


class _Inward:
    """Reads the messages of one call, within the owner's quotas."""

    def __init__(self, gate: CallLimiter, method: _Method, context: Context, peer: _Owner) -> None:
        self._gate = gate
        self._method = method
        self._context = context
        self.peer = self.owner = peer
        most = peer.quotas.joining_bytes if method.name == "Join" else peer.quotas.frame_bytes
        self._pieces = message_parts.MessageAssembler(most)

    async def read(self) -> Any:  # noqa: ANN401 - a message
        """Returns the next message, assembled from its pieces, or None at the end of the stream. Raises Refused."""
        try:
            raw = await self._raw()
            if raw is None:
                return None
            read = self._method.handler.request_deserializer
            return raw if read is None else read(raw)
        except DecodeError as error:
            name = self._method.name
            large = ", or raise the server's --quota-joining-bytes" if name == "Join" else ""
            text = f"the message is invalid for {name} ({error}): use the same version of Atoll on both sides{large}"
            raise Refused(Status.INVALID_ARGUMENT, text) from error

    async def _raw(self) -> bytes | None:
        raw = await self._next()
        if raw is None or self._method.name not in IN_PIECES:
            return raw
        if (whole := self._pieces.take(raw)) is not None:
            return whole
        async with self.owner.assembling[self._method.name]:  # the next pieces are read only within this limit
            while whole is None:
                raw = await self._next()
                if raw is None:
                    raise DecodeError("its last piece did not arrive")
                whole = self._pieces.take(raw)
            if self._method.name == "Join":  # the peer's next Join must wait as well
                await self._gate.paced(self.peer.joins, "joins_per_s", "large Joins")
        return whole

    async def _next(self) -> bytes | None:
        raw = await self._context.read()
        return None if raw is grpc.aio.EOF else raw

    async def requests(self, first: Any) -> AsyncIterator[Any]:  # noqa: ANN401 - messages
        """Yields `first` and then the call's other messages, no faster than the quotas allow."""
        request = first
        while request is not None:
            yield request
            name = self._method.name
            await self._gate.paced(self.owner.messages(name), "messages_per_s", f"messages to {name}")
            request = await self.read()


class _Outward:
    """The gRPC context that a service receives. Splits large replies and ends calls whose caller does not read."""

    def __init__(self, gate: CallLimiter, context: Context, method: _Method, call: _Call, inward: _Inward) -> None:
        self._gate = gate
        self._context = context
        self._method = method
        self._call = call
        self._inward = inward

    async def write(self, message: Any) -> None:  # noqa: ANN401 - a message
        """Sends a message. Raises Refused if the caller reads nothing for `stalled_s` seconds."""
        write = self._method.handler.response_serializer
        raw = message if write is None else write(message)
        for piece in message_parts.split(raw) if self._method.name in OUT_IN_PIECES else (raw,):
            try:
                async with asyncio.timeout(self._gate.quotas.stalled_s):
                    await self._context.write(piece)
            except TimeoutError as error:
                if self._call.why is not None:
                    raise
                text = f"the caller read nothing of the reply for {self._gate.quotas.stalled_s:.0f} s: call again"
                raise self._gate.over("stalled", text) from error

    async def abort(self, *status: Any) -> None:  # noqa: ANN401 - gRPC's
        """Ends the call with a status. DATA_LOSS counts against the sender's quota for wrong checksums."""
        self._call.ended = True
        if status[0] is grpc.StatusCode.DATA_LOSS:
            self._inward.owner.spoilt.take(self._gate.clock.monotonic())
        await self._context.abort(*status)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the rest is gRPC's
        return getattr(self._context, name)


def _session(request: Any) -> pb.Session | None:  # noqa: ANN401 - a message
    """Returns the session in a call's first message, or None if the message contains no session."""
    if isinstance(request, pb.PushRequest | pb.InitialiseRequest):
        request = request.header
    session = getattr(request, "session", None)
    return session if isinstance(session, pb.Session) and session.learner else None
