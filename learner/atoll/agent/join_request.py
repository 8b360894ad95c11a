"""Joins a run: sends the learner's identity and model, and the initial parameters if the core asks for them."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import open_stream, tolerate_ended_call, unary_reply
from atoll_wire.contract import JOIN_S, PROTOCOL, tensor_message
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import Layout, LayoutError, TensorSpec, plan
from atoll_wire.process.clock import Clock
from atoll_wire.security.certificate import CertificateError, Role, check_role
from atoll_wire.security.transport import LOCAL, TransportSecurity, TransportSecurityError

from atoll.agent.core_view import CoreView
from atoll.errors import NONSENSE, LearnerError
from atoll.stats import Counters
from atoll.transfers.places import checked_places

log = structlog.get_logger()

CODECS = frozenset(int(kind) for kind in Codec)
SHORTEST_RETRY_S = 0.5
CHUNK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Identity:
    """A learner's name, region and servers. addresses: HOST:PORT of each server; the servers are tried in turn."""

    name: str
    region: str
    addresses: Sequence[str]
    connect_timeout_s: float
    security: TransportSecurity = LOCAL

    def problem(self) -> LearnerError | None:
        """Returns an error if the addresses or certificates are unusable, else None."""
        if not self.addresses:
            return LearnerError("the list of servers is empty: give at least one HOST:PORT")
        try:
            self.security.check(self.addresses)
            check_role(self.security.tls, Role.LEARNER, self.name)
        except (TransportSecurityError, CertificateError) as error:
            return LearnerError(str(error), error.exit_status)
        return None


def own_name(region: str) -> str:
    """Returns the default name, REGION.HOSTNAME. A restarted container or pod keeps its name."""
    return ".".join(filter(None, (region, socket.gethostname())))


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model, as a Join describes it. save: a function that writes the initial parameters to a file."""

    tensors: tuple[TensorSpec, ...]
    frozen_digest: bytes
    save: Callable[[Path], None]


class Joiner:
    """Joins a run, for the first time or again. A process that joins again keeps its incarnation."""

    def __init__(
        self, identity: Identity, model: ModelDescription, core: CoreView, counters: Counters, clock: Clock
    ) -> None:
        self._clock = clock
        self._identity = identity
        self._model = model
        self._core = core
        self._counters = counters
        self._nonce = secrets.randbits(63) | 1
        self.sent_initial = False  # whether the core has accepted this learner's initial parameters

    async def join(self) -> pb.JoinReply:
        """Joins and waits until the run has parameters.

        Raises AioRpcError if the core refuses or does not answer, LearnerError if its reply is invalid, and LinkLost.
        """
        proof, confirming = b"", False
        while True:
            request = self._request(proof)
            with self._core.link.quick.use() as connection:
                reply: pb.JoinReply = await unary_reply(connection.stub.Join(request, timeout=JOIN_S))
            if reply.state == pb.JoinReply.STATE_CONFIRM:
                if confirming:  # second request: another process joined with this name in between
                    await asyncio.sleep(SHORTEST_RETRY_S)
                proof, confirming = reply.token, True
                continue
            if reply.state == pb.JoinReply.STATE_READY:
                return reply
            if reply.state == pb.JoinReply.STATE_INITIALISE:
                await self._initialise(reply)
            elif reply.state == pb.JoinReply.STATE_WAIT:
                log.info("another learner is sending the initial parameters", learner=self._identity.name)
                await asyncio.sleep(reply.retry_s if SHORTEST_RETRY_S < reply.retry_s < JOIN_S else SHORTEST_RETRY_S)
            else:
                raise LearnerError(f"the core answered Join with the unknown state {reply.state}: {NONSENSE}")

    def session(self, reply: pb.JoinReply) -> pb.Session:
        """Returns the session that every later call sends."""
        return pb.Session(
            run=reply.run,
            learner=self._identity.name,
            incarnation=reply.incarnation,
            generation=reply.generation,
            token=reply.token,
        )

    def _request(self, proof: bytes) -> pb.JoinRequest:
        return pb.JoinRequest(
            protocol=PROTOCOL,
            run=self._core.session.run,
            learner=self._identity.name,
            region=self._identity.region,
            nonce=self._nonce,
            tensors=[tensor_message(t) for t in self._model.tensors],
            frozen_digest=self._model.frozen_digest,
            incarnation=self._core.session.incarnation,
            proof=proof,
            process_age_s=process_age_s(self._clock),
        )

    async def _initialise(self, reply: pb.JoinReply) -> None:
        """Sends the initial parameters as a safetensors file: a header, then chunks."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "first.safetensors"
            await asyncio.to_thread(self._model.save, path)
            header = pb.InitialiseHeader(
                session=self.session(reply),
                size_bytes=path.stat().st_size,
                sha256=await asyncio.to_thread(_sha256, path),
            )
            log.info("sending the initial parameters", learner=self._identity.name, size_bytes=header.size_bytes)
            with (
                self._core.link.carriers.use() as connection,
                open_stream("Initialise", connection.stub.Initialise()) as call,
            ):
                with tolerate_ended_call(), path.open("rb") as file:
                    await call.write(pb.InitialiseRequest(header=header))
                    while chunk := file.read(CHUNK_BYTES):
                        await call.write(pb.InitialiseRequest(chunk=chunk))
                    await call.done_writing()
                await call
            self.sent_initial = True
            self._counters.bytes_whole += header.size_bytes


def process_age_s(clock: Clock) -> float:
    """Returns the seconds since this process started."""
    return clock.wall() - psutil.Process().create_time()


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def planned(tensors: Sequence[TensorSpec], reply: pb.JoinReply, codecs: Collection[int]) -> Layout:
    """Returns the run's layout. Raises LearnerError if the core's layout differs. codecs: the allowed codecs."""
    if reply.settings.codec not in codecs:
        raise LearnerError(f"the core asks for the unexpected codec {reply.settings.codec}: {NONSENSE}")
    try:
        layout = plan(tensors, reply.settings.fragments)
    except LayoutError as error:
        raise LearnerError(f"the core sent an invalid layout ({error}): {NONSENSE}") from error
    if layout.fingerprint != reply.fingerprint:
        raise LearnerError(f"the core computed a different layout of the model: {NONSENSE}")
    checked_places(reply.shards, len(layout.fragments))
    return layout
