"""The thread beside training: one event loop that joins, follows, fetches, sends and reports.

It owns the network and everything that is known of the core. The training thread meets it only in the Handover;
what takes time (coding, hashing, files) runs in a worker thread. While the core is away it tries again with
jittered back-off, and training goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import psutil
import structlog
from atoll_wire import codec
from atoll_wire import outer_pb2 as pb
from atoll_wire.layout import Layout, MergeKind, TensorSpec, plan

from atoll.adoption import F32
from atoll.errors import LearnerError
from atoll.fetching import Fetcher
from atoll.handover import Handover, Taken
from atoll.sending import Sender
from atoll.standing import Line, Standing
from atoll.stats import Counters
from atoll.transport import CALL_S, Cure, Link, backoff_s, cure, one_line

log = structlog.get_logger()

PROTOCOL = 1
JOIN_S = 60.0  # a core may have to read a whole model before it answers
REPORT_S, LONGEST_REPORT_S = 0.25, 1.0
PATIENCE_STEPS = 4.0  # a round that finds no step boundary for so many steps is declined
CHUNK_BYTES = 1 << 20
KINDS = {MergeKind.AVERAGE: pb.MERGE_KIND_AVERAGE, MergeKind.DIRECTION: pb.MERGE_KIND_DIRECTION}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this learner is and where it dials. addresses: tried in turn."""

    name: str
    region: str
    addresses: Sequence[str]
    connect_timeout_s: float


@dataclass(frozen=True, slots=True)
class FirstModel:
    """What the agent needs to know of the model. save: writes the first parameters to a file."""

    tensors: tuple[TensorSpec, ...]
    frozen_digest: bytes
    save: Callable[[Path], None]


class Agent:
    """Started once, stopped once. `ready`: the first anchors are here, or why not."""

    def __init__(self, identity: Identity, model: FirstModel, handover: Handover, counters: Counters) -> None:
        self._identity, self._model, self._handover, self.counters = identity, model, handover, counters
        self._nonce = secrets.randbits(63) | 1
        self._rng = random.Random(self._nonce)  # noqa: S311 - jitter
        self._loop: asyncio.AbstractEventLoop | None = None
        self._standing: Standing | None = None
        self._sender: Sender | None = None
        self._fetcher: Fetcher | None = None
        self._main: asyncio.Task[None] | None = None
        self._said_away = False
        self.ready: Future[Layout] = Future()
        self.failure: LearnerError | None = None
        self._thread = threading.Thread(target=self._run, name=f"atoll {identity.name}", daemon=True)

    # ------------------------------------------------------------------------------ called by the training thread

    def start(self) -> None:
        """Begins to dial."""
        self._thread.start()

    def anchors(self) -> list[tuple[int, F32]]:
        """Version and anchor of each fragment, once ready."""
        assert self._standing is not None, "ready comes first"
        return [(line.version, line.anchor) for line in self._standing.lines]

    def submit(self, taken: Taken) -> None:
        """Hands a pseudo-gradient over to be sent."""
        self._handover.submitted()
        self._call(self._submit, taken)

    def leave(self, timeout_s: float) -> None:
        """Says good-bye if the core is there, and ends the thread."""
        self._call(self._leave)
        self._thread.join(timeout_s)

    def _call(self, function: Callable[..., None], *args: Taken) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    # ------------------------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except asyncio.CancelledError:
            pass  # the training thread left
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        known = isinstance(error, LearnerError)
        self.failure = (
            error if isinstance(error, LearnerError) else LearnerError(f"the learner's agent failed: {error!r}")
        )
        self.counters.last_error = str(self.failure)
        log.error(
            "learner stopped", learner=self._identity.name, error=str(self.failure), exc_info=None if known else error
        )
        if not self.ready.done():
            self.ready.set_exception(self.failure)

    async def _live(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        await asyncio.to_thread(codec.warm_up)
        links = [Link(address) for address in self._identity.addresses]
        self._standing = Standing(links[0])
        self._sender = Sender(
            self._standing, self._handover, self.counters, self._stop, lambda line: self._fetcher_().begin(line)
        )
        self._fetcher = Fetcher(self._standing, self._handover, self.counters, self._stop, self._sender)
        attempt, started = 0, time.monotonic()
        try:
            while True:
                try:
                    await self._join_and_fetch()
                    attempt = 0
                    await self._stay()
                except grpc.aio.AioRpcError as error:
                    self._note(error, attempt, time.monotonic() - started)
                self._standing.connected.clear()
                self.counters.connected = False
                await asyncio.sleep(backoff_s(attempt, self._rng))
                attempt += 1
                self._standing.link = links[attempt % len(links)]
        finally:
            for link in links:
                await link.close()

    def _note(self, error: grpc.aio.AioRpcError, attempt: int, waited_s: float) -> None:
        """Says why the core is away; raises LearnerError when trying again is of no use."""
        self.counters.last_error = one_line(error)
        address, name = self._standing.link.address if self._standing else "", self._identity.name
        entered = self.ready.done()
        duplicate = error.code() is grpc.StatusCode.ALREADY_EXISTS
        if cure(error) is Cure.STOP or (cure(error) is Cure.GIVE_UP and not duplicate) or (duplicate and attempt > 5):
            raise LearnerError(f"learner {name!r} cannot go on: {error.details()}")
        if not entered and waited_s > self._identity.connect_timeout_s:
            raise LearnerError(
                f"no core at {address} within {waited_s:.0f} s ({one_line(error)}): start one, or check --server"
            )
        if not self._said_away:
            self._said_away = True
            self.counters.reconnects += entered
            text = "core is away: training goes on" if entered else "waiting for the core"
            log.warning(text, learner=name, server=address, error=one_line(error))

    def _stop(self, error: Exception) -> None:
        """A part of the agent found that going on is of no use."""
        self._fail(error)
        if self._main is not None:
            self._main.cancel()

    # ------------------------------------------------------------------------------ joining

    async def _join_and_fetch(self) -> None:
        standing = self._standing
        assert standing is not None
        reply = await self._join()
        layout = plan(self._model.tensors, reply.settings.fragments)
        if layout.fingerprint != reply.fingerprint:
            raise LearnerError("the core lays the model out differently: use the same atoll version on both sides")
        if not standing.lines:
            standing.layout = layout
            standing.lines = [Line(f.index, np.empty(0, np.float32)) for f in layout.fragments]
        elif reply.generation != standing.session.generation:
            for line in standing.lines:
                line.whole, line.drop, line.target = True, True, 0
                self._sender_().forget(line)
        standing.settings = reply.settings
        standing.session = pb.Session(
            run=reply.run, learner=self._identity.name, incarnation=reply.incarnation,
            generation=reply.generation, token=reply.token,
        )  # fmt: skip
        self._tokens(reply.run_tokens)
        standing.lost.clear()
        standing.connected.set()
        self.counters.connected = True
        if self._said_away:
            log.info("the core is back", learner=self._identity.name, epoch=reply.epoch)
            self._said_away = False
        for line, version in zip(standing.lines, reply.versions, strict=True):
            self._fetcher_().heard_of(line, version)
        if not self.ready.done():
            await self._fetcher_().all_here()
            self.ready.set_result(layout)

    def _sender_(self) -> Sender:
        assert self._sender is not None, "the loop runs"
        return self._sender

    def _fetcher_(self) -> Fetcher:
        assert self._fetcher is not None, "the loop runs"
        return self._fetcher

    async def _join(self) -> pb.JoinReply:
        """Joins until the run has parameters, sending them if this learner is the one."""
        standing = self._standing
        assert standing is not None
        while True:
            request = pb.JoinRequest(
                protocol=PROTOCOL, run=standing.session.run, learner=self._identity.name, region=self._identity.region,
                nonce=self._nonce, tensors=[_tensor(t) for t in self._model.tensors],
                frozen_digest=self._model.frozen_digest, incarnation=standing.session.incarnation,
                process_age_s=time.time() - psutil.Process().create_time(),
            )  # fmt: skip
            reply: pb.JoinReply = await standing.link.control.Join(request, timeout=JOIN_S)
            if reply.state == pb.JoinReply.STATE_READY:
                return reply
            if reply.state == pb.JoinReply.STATE_INITIALISE:
                await self._initialise(reply)
            else:
                log.info("another learner sends the first parameters", learner=self._identity.name)
                await asyncio.sleep(reply.retry_s)

    async def _initialise(self, reply: pb.JoinReply) -> None:
        standing = self._standing
        assert standing is not None
        session = pb.Session(
            run=reply.run, learner=self._identity.name, incarnation=reply.incarnation,
            generation=reply.generation, token=reply.token,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "first.safetensors"
            await asyncio.to_thread(self._model.save, path)
            digest = await asyncio.to_thread(_sha256, path)
            size = path.stat().st_size
            log.info("sending the first parameters", learner=self._identity.name, size_bytes=size)

            async def requests() -> AsyncIterator[pb.InitialiseRequest]:
                yield pb.InitialiseRequest(header=pb.InitialiseHeader(session=session, size_bytes=size, sha256=digest))
                with path.open("rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        yield pb.InitialiseRequest(chunk=chunk)

            await standing.link.data.Initialise(requests())
            self.counters.bytes_whole += size

    # ------------------------------------------------------------------------------ staying

    async def _stay(self) -> None:
        """Follows and reports until either breaks or something else finds the core gone."""
        assert self._standing is not None
        tasks = {asyncio.create_task(work) for work in (self._follow(), self._report(), self._standing.lost.wait())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        standing, fetcher = self._standing, self._fetcher_()
        assert standing is not None
        request = pb.FollowRequest(session=standing.session, epoch=standing.epoch, sequence=standing.sequence)
        async for happening in standing.link.control.Follow(request):
            standing.epoch, standing.sequence = happening.epoch, happening.sequence
            match happening.WhichOneof("what"):
                case "current":
                    self._tokens(happening.current.run_tokens)
                    for line, version in zip(standing.lines, happening.current.versions, strict=True):
                        fetcher.heard_of(line, version)
                    for opened in happening.current.open:
                        self._opened(opened)
                case "opened":
                    self._opened(happening.opened)
                case "published":
                    self._tokens(happening.published.run_tokens)
                    fetcher.heard_of(standing.lines[happening.published.fragment], happening.published.version)
                case "receipt":
                    self._sender_().decided(happening.receipt)
                case "shutting_down":
                    return

    def _opened(self, opened: pb.RoundOpened) -> None:
        assert self._standing is not None
        if self._standing.lines[opened.fragment].flight is not None:
            self._decline(opened.fragment, opened.cycle, "its contribution is in flight")
        else:
            self._handover.ask(opened.fragment, opened.cycle)

    def _decline(self, fragment: int, cycle: int, reason: str) -> None:
        self._handover.declined.append(pb.Declined(fragment=fragment, cycle=cycle, reason=reason))

    def _tokens(self, run_tokens: int) -> None:
        if run_tokens > self.counters.run_tokens:
            self.counters.run_tokens, self.counters.run_tokens_at = run_tokens, self.counters.tokens

    async def _report(self) -> None:
        assert self._standing is not None
        call = self._standing.link.control.Report()
        told, told_at, first = -1, 0.0, True
        while not call.done():
            for due in self._handover.withdraw(max(1.0, PATIENCE_STEPS * self.counters.step_time_s)):
                self._decline(due.fragment, due.cycle, "no inner step while it was open")
            now = time.monotonic()
            news = bool(self._handover.adopted or self._handover.declined) or self.counters.steps != told
            if news or now - told_at >= LONGEST_REPORT_S:
                progress = self.progress()
                if first:
                    progress.session.CopyFrom(self._standing.session)
                    first = False
                told, told_at = progress.steps, now
                try:
                    await call.write(progress)
                except asyncio.InvalidStateError:
                    break  # the call ended meanwhile; awaiting it says why
            await asyncio.sleep(REPORT_S)
        await call

    def progress(self) -> pb.Progress:
        """Everything since the incarnation began, and what was adopted and declined since the last message."""
        progress = self.counters.progress()
        for queue, target in ((self._handover.declined, progress.declined), (self._handover.adopted, progress.adopted)):
            while queue:
                target.append(queue.popleft())  # type: ignore[arg-type]
        return progress

    def _submit(self, taken: Taken) -> None:
        assert self._standing is not None
        self._sender_().send(self._standing.lines[taken.fragment], taken)

    def _leave(self) -> None:
        assert self._loop is not None
        self._goodbye = self._loop.create_task(self._say_goodbye())

    async def _say_goodbye(self) -> None:
        standing = self._standing
        if standing is not None and standing.connected.is_set():
            request = pb.LeaveRequest(session=standing.session, last=self.progress())
            try:
                await standing.link.control.Leave(request, timeout=CALL_S)
            except grpc.aio.AioRpcError as error:
                log.warning("good-bye was not heard", learner=self._identity.name, error=one_line(error))
        if self._main is not None:
            self._main.cancel()


def _tensor(tensor: TensorSpec) -> pb.Tensor:
    return pb.Tensor(
        name=tensor.name, shape=tensor.shape, dtype=tensor.dtype, kind=KINDS[tensor.kind], tied_names=tensor.tied_names
    )


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
