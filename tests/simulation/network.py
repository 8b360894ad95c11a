"""gRPC between simulated processes. Messages may be late, lost with their stream, repeated, or corrupted.

Messages of one stream keep their order, as over TCP. Messages of different calls may not. A call may end at its server
before its caller, or the reverse. The servicers and the callers' code are real. A caller is a learner or a front, and a
server is a core or a front.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
from atoll_wire.connections.link import Link
from atoll_wire.layout.frame_spans import Compression
from atoll_wire.messages import frame_messages
from atoll_wire.security.transport import LOCAL

from tests.simulation.loop import Process, VirtualLoop, here

CORE = "core"  # the core's address
KEEPALIVE_S = 4.0  # seconds after which a silent connection is abandoned
REPLAYED = {"Join", "Push", "Leave", "Report", "LeaseUnits"}
UNARY_REPLY = {"Join", "Leave", "LeaseUnits", "Initialise", "Report"}
Metadata = tuple[tuple[str, str], ...]
Status = tuple[grpc.StatusCode, str, Metadata]  # code, details, trailing metadata
LOST: Status = (grpc.StatusCode.UNAVAILABLE, "the connection was lost", ())


def compression_of(seed: int) -> Compression:
    """Returns which payloads the run of a seed compresses. The simulated network is never fast."""
    return random.Random(f"{seed} compression").choice((Compression.AUTO, Compression.AUTO, Compression.NEVER))


class Aborted(Exception):
    """Raised by `context.abort`."""


class Context:
    """The servicer's context of a call."""

    def __init__(self, metadata: Metadata = ()) -> None:
        self.status: Status = (grpc.StatusCode.OK, "", ())
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return "simulated"

    async def abort(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str], ...] = ()) -> None:
        self.status = (code, details, trailing)
        raise Aborted


@dataclass
class Weather:
    """The network's faults. Probabilities are per message, unless noted."""

    delay_s: float = 0.005
    long_delay: float = 0.01
    cut: float = 0.002
    replay: float = 0.01  # per call
    change: float = 0.001


@dataclass(frozen=True)
class Half:
    """The bytes of an incomplete message."""

    content: bytes


class Network:
    """The network with all open calls. servers: address -> its servicer and process, if one runs."""

    def __init__(self, loop: VirtualLoop, said: Callable[[Process, Any, Any], None]) -> None:
        """said: called with (caller's process, first request, reply) before each message of the core is sent."""
        self.loop, self.rng, self.weather = loop, loop.rng, Weather()
        self.observed = {CORE: said}  # address -> callback for each message of its server
        self.servers: dict[str, tuple[Any, Process]] = {}
        self.calls: dict[Call, None] = {}
        self.partitioned: dict[Process, float] = {}  # caller -> time at which it was cut off
        self.late_s: dict[Process, float] = {}  # learner -> additional delay of its messages
        self.held: list[tuple[Process, Callable[[], None]]] = []
        self.events = self.cuts = self.replays = self.changes = 0
        self.began: Callable[[Call], None] = lambda _: None  # called when a call's first message reaches its server

    def delay_s(self) -> float:
        if self.rng.random() < self.weather.long_delay:
            return self.rng.uniform(0.2, 3.0)
        return self.rng.expovariate(1 / self.weather.delay_s)

    def open(self, method: str, *, caller: Process | None = None, address: str = "") -> int:
        """Returns the number of calls that are open for their caller: by one caller, or to one address."""
        return sum(c.method == method and (c.learner is caller or c.address == address) for c in self.calls)

    def part(self, learner: Process) -> None:
        """Cuts a caller off. Its messages are held back, and its connections break if this lasts too long."""
        self.partitioned[learner] = self.loop.now

    def heal(self, learner: Process) -> None:
        since = self.partitioned.pop(learner)
        held, self.held = self.held, []
        for process, arrive in held:
            if process is not learner:
                self.held.append((process, arrive))
            elif self.loop.now - since < KEEPALIVE_S:
                arrive()
        for call in [each for each in self.calls if each.learner is learner]:
            if call.hung_up or self.loop.now - since >= KEEPALIVE_S:
                call.hung_up = True  # the held messages are lost
                call.cut(self.rng.uniform(0, 0.1))

    def died(self, address: str) -> None:
        """Ends a server's connections. Its callers notice a reset, or silence until the keepalive limit."""
        self.servers.pop(address, None)
        silent = self.rng.random() < 0.2
        for call in [call for call in self.calls if call.address == address]:
            after_s = self.rng.uniform(KEEPALIVE_S / 2, KEEPALIVE_S) if silent else self.rng.uniform(0.0, 0.2)
            call.end_of_server(after_s)

    def hang_up(self, address: str) -> None:
        """Ends a server's calls at both sides, because the server stops."""
        self.died(address)
        for call in [call for call in self.calls if call.address == address]:
            call.hang_up(0.0)


class Pipe:
    """Messages in one direction, in order.

    deliver: called with each message on its arrival, unless the learner is cut off.
    """

    def __init__(self, network: Network, learner: Process, deliver: Callable[[Any], None]) -> None:
        self._network, self._learner, self._deliver, self._last = network, learner, deliver, 0.0

    def send(self, message: Any) -> None:
        loop = self._network.loop
        delay_s = self._network.delay_s() + self._network.late_s.get(self._learner, 0.0)
        self._last = max(self._last + 1e-6, loop.now + delay_s)

        def arrive() -> None:
            if self._learner in self._network.partitioned:
                self._network.held.append((self._learner, arrive))
                return
            self._network.events += 1
            self._deliver(message)

        loop.after(self._last - loop.now, arrive)


class Box:
    """A queue of messages without a limit."""

    def __init__(self) -> None:
        self._kept: deque[Any] = deque()
        self._news: asyncio.Future[None] | None = None

    def put(self, message: Any) -> None:
        self._kept.append(message)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def get(self) -> Any:
        while not self._kept:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._kept.popleft()


END = object()


class Call:
    """One RPC. It has the methods of all four kinds of grpc.aio calls that callers use."""

    def __init__(self, network: Network, learner: Process, address: str, method: str, timeout_s: float | None) -> None:
        self.network, self.learner, self.address, self.method = network, learner, address, method
        self._inbox, self._server_inbox = Box(), Box()
        self._status: asyncio.Future[Status] = network.loop.create_future()
        self._up = Pipe(network, learner, self._arrived)
        self._down = Pipe(network, learner, self._replied)
        self._server: asyncio.Task[None] | None = None
        self._sent: list[Any] = []
        self._told: list[Callable[[Call], None]] = []  # called when the call ends
        self._first: Any = None
        self._broken = False  # later messages are lost
        self._cancelled = False  # by the caller; gRPC then raises CancelledError
        self.hung_up = False  # the server knows that the caller is gone
        self.metadata: Metadata = ()
        self.read_by_its_caller = True  # if False and limited, the server's writes block
        self._connected = network.servers[address][1] if address in network.servers else None
        network.calls[self] = None
        if self._connected is None:
            network.loop.after(network.delay_s(), self._finish, LOST)
        if timeout_s is not None:
            late = (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded", ())
            network.loop.after(timeout_s, self._finish, late)

    # ------------------------------------------------------------------------------ the caller's side

    def send(self, message: Any) -> None:
        """Sends a message. The stream may break. The network may change the message, which checksums must detect."""
        network = self.network
        if not self._broken and network.rng.random() < network.weather.cut:
            network.cuts += 1
            self.cut(network.delay_s())
        if self._broken:
            return
        message = self._read(message)
        self._sent.append(message)
        self._up.send(self._changed(message))

    async def write(self, message: Any) -> None:
        if self._status.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        self.send(message)

    async def done_writing(self) -> None:
        if not self._status.done():
            self.end_of_requests()

    async def read(self) -> Any:
        message = await self._inbox.get()
        if message is END:
            self._inbox.put(END)
            self._raise_status()
            return grpc.aio.EOF
        return message

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def __await__(self) -> Iterator[Any]:
        return self._reply().__await__()

    async def _reply(self) -> Any:
        try:
            reply = await self.read()
        finally:
            if not self._status.done():
                self.cancel()
        return reply

    def done(self) -> bool:
        return self._status.done()

    @property
    def first(self) -> Any:
        """The first message that the server received."""
        return self._first

    @property
    def lost(self) -> bool:
        """Whether the call ended for its caller because the connection was lost."""
        return self._status.done() and not self._cancelled and self._status.result()[0] is LOST[0]

    def add_done_callback(self, callback: Callable[[Call], None]) -> None:
        self._told.append(callback)
        if self.done():
            callback(self)

    def cancel(self) -> None:
        """Cancels the call. The server learns of it later, or never if the caller dies first."""
        if not self._status.done():
            self._cancelled = True
            self._finish((grpc.StatusCode.CANCELLED, "cancelled", ()))

    async def code(self) -> grpc.StatusCode:
        return (await self._status)[0]

    async def details(self) -> str:
        return (await self._status)[1]

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    trailing_metadata = initial_metadata

    def _raise_status(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        code, details, trailing = self._status.result()
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)

    def _replied(self, message: Any) -> None:
        if self.learner.alive and not self._status.done():
            if isinstance(message, tuple):
                self._finish(message)
            else:
                self._inbox.put(message)

    def _finish(self, status: Status) -> None:
        """Ends the call for the caller."""
        if self._status.done():
            return
        self._status.set_result(status)
        self._inbox.put(END)
        self.network.calls.pop(self, None)
        for told in self._told:
            told(self)
        if self.network.rng.random() < 0.8:
            self.hang_up(self.network.delay_s())
        else:
            self.hang_up(KEEPALIVE_S * self.network.rng.random())

    # ------------------------------------------------------------------------------ the connection

    def cut(self, after_s: float) -> None:
        """Breaks the connection. Each side notices at its own time."""
        self._broken = True
        self.network.loop.after(after_s, self._finish, LOST)
        self.hang_up(after_s * 2)

    def hang_up(self, after_s: float) -> None:
        """Cancels the servicer's task, as gRPC does when a peer is gone."""

        def cancel() -> None:
            self.hung_up = True
            if self._server is not None:
                self._server.cancel()

        self.network.loop.after(after_s, cancel)

    def end_of_server(self, after_s: float) -> None:
        """Ends the call because the server's process died. The caller notices at its own time."""
        self.network.loop.after(after_s, self._finish, LOST)

    def _changed(self, message: Any) -> Any:
        """Sometimes flips a bit in a payload."""
        network = self.network
        message = self._read(message)
        if not isinstance(message, list) or network.rng.random() >= network.weather.change:
            return message
        spoilt = network.rng.randrange(len(message))
        if not (content := bytearray(message[spoilt].payload)):
            return message
        network.changes += 1
        content[network.rng.randrange(len(content))] ^= 1 << network.rng.randrange(8)
        return [*message[:spoilt], replace(message[spoilt], payload=bytes(content)), *message[spoilt + 1 :]]

    def _read(self, message: Any) -> Any:
        """Parses a message that was serialised without protobuf."""
        if isinstance(message, bytes):
            return (
                frame_messages.push_request(message) if self.method == "Push" else frame_messages.fetch_reply(message)
            )
        return message

    # ------------------------------------------------------------------------------ the server's side

    def _arrived(self, message: Any) -> None:
        server = self.network.servers.get(self.address)
        if server is None or server[1] is not self._connected or self.hung_up:
            return  # late, or for the server's previous process: the connection is closed
        if self._server is None and message is END:
            return  # the request was lost, so the call never began
        if self._server is None:
            self._first = message
            self._server = server[1].start(self._serve(server[0]), name=self.method)
            self.network.began(self)
        self._server_inbox.put(message)

    async def _serve(self, service: Any) -> None:
        entrance = getattr(service, "entrance", None)
        context: Any = Context(self.metadata) if entrance is None else entrance.context(self)
        method = getattr(service, self.method)
        try:
            if entrance is not None:
                await entrance.serve(self, context)
            elif self.method in {"Join", "Leave", "LeaseUnits", "TakeCheckpoint"}:
                self.reply_with(await method(await self._server_inbox.get(), context))
            elif self.method in {"Initialise", "Report"}:
                self.reply_with(await method(self._requests(), context))
            else:
                request = self._requests() if self.method in {"Push", "Attach"} else await self._server_inbox.get()
                async with aclosing(method(request, context)) as replies:
                    async for reply in replies:
                        self.reply_with(reply)
        except Aborted:
            pass
        except Exception as error:
            context.status = (grpc.StatusCode.UNKNOWN, repr(error), ())
            self.network.loop.unhandled.append({"message": f"{self.method} raised", "exception": error})
        if not self._broken:
            self._down.send(context.status)

    async def request(self) -> Any:
        """Returns the next received message, or None at the end."""
        message = await self._server_inbox.get()
        if message is END:
            self._server_inbox.put(END)
        return None if message is END else message

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self.request()) is not None:
            yield message

    @property
    def served(self) -> bool:
        """Whether the server is working on the call."""
        return self._server is not None and not self._server.done()

    def reply_with(self, reply: Any) -> None:
        process = here()
        if process is not None and process.alive:
            if (said := self.network.observed.get(self.address)) is not None:
                said(self.learner, self._first, reply)
            if not self._broken and self.network.rng.random() < self.network.weather.cut:
                self.network.cuts += 1
                self.cut(self.network.delay_s())
            if not self._broken:
                self._down.send(self._changed(reply))

    def end_of_requests(self) -> None:
        if not self._broken:
            self._up.send(END)

    def replay_later(self) -> None:
        """Repeats the requests in a later call that no caller waits for."""
        network = self.network
        if self.method not in REPLAYED or network.rng.random() >= network.weather.replay:
            return

        def again() -> None:
            if self.address in network.servers and self._sent:
                network.replays += 1
                ghost = Call(network, Process(self.learner.name), self.address, self.method, 30.0)
                ghost.learner.alive = False
                for message in self._sent:
                    ghost._up.send(message)
                ghost.end_of_requests()

        network.loop.after(network.rng.uniform(0.05, 6.0), again)


class Stub:
    """One caller's channel, with the methods of `OuterStub` and `RegistryStub`, and one of `OperatorStub`."""

    def __init__(self, network: Network, learner: Process, address: str) -> None:
        self._network, self._learner, self._address = network, learner, address
        self._calls: list[Call] = []

    def _call(self, method: str, *requests: Any, timeout: float | None = None, ends: bool = True) -> Call:
        call = Call(self._network, self._learner, self._address, method, timeout)
        self._calls = [*(each for each in self._calls if not each.done()), call]
        for request in requests:
            call.send(request)
        if ends:
            call.end_of_requests()
        call.replay_later()
        return call

    def Join(self, request: Any, timeout: float | None = None) -> Call:
        return self._call("Join", request, timeout=timeout)

    def Leave(self, request: Any, timeout: float | None = None) -> Call:
        return self._call("Leave", request, timeout=timeout)

    def LeaseUnits(self, request: Any, timeout: float | None = None) -> Call:
        return self._call("LeaseUnits", request, timeout=timeout)

    def Follow(self, request: Any) -> Call:
        return self._call("Follow", request)

    def Fetch(self, request: Any, timeout: float | None = None) -> Call:
        return self._call("Fetch", request, timeout=timeout)

    def Push(self) -> Call:
        return self._call("Push", ends=False)

    def Report(self) -> Call:
        return self._call("Report", ends=False)

    def Initialise(self) -> Call:
        return self._call("Initialise", ends=False)

    def Attach(self) -> Call:
        return self._call("Attach", ends=False)

    def FetchInitial(self, request: Any) -> Call:
        return self._call("FetchInitial", request)

    def TakeCheckpoint(self, request: Any, timeout: float, metadata: Metadata) -> Call:
        call = self._call("TakeCheckpoint", request, timeout=timeout)
        call.metadata = metadata
        return call

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()


class SimulatedLink(Link):
    """The product's link, with simulated connections."""

    def __init__(self, network: Network, learner: Process, address: str) -> None:
        self._network, self._learner = network, learner
        super().__init__(address, LOCAL, network.loop.clock)

    def _dial(self, options: object) -> tuple[Any, Any]:
        stub = Stub(self._network, self._learner, self.address)
        return stub, stub

    async def tls_fault(self) -> str:
        """Returns an empty text, because simulated connections have no TLS."""
        return ""

    def answered(self, after_s: float) -> None:
        """Does nothing, because one connection is enough at such short round trips."""
