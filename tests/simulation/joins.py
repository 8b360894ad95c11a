"""The product's limiter in front of a simulated core. Messages are serialised, and callers have certificates."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import grpc
import grpc.aio
from atoll_server.access.quotas import Quotas
from atoll_server.access.revocations import RevokedCertificates
from atoll_server.processes.core import Core
from atoll_server.rpc.limiter import CallLimiter
from atoll_server.service.server import _limited, _vouched
from atoll_wire import outer_pb2 as pb
from atoll_wire.messages import frame_messages
from atoll_wire.security.certificate import SCHEME
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from google.protobuf.message_factory import GetMessageClass

from tests.simulation.network import Call, Context, Half

QUICK = Quotas(first_message_s=2.0, stalled_s=3.0)  # short, because a storm ends within a minute
REPLIES = {
    method.name: frame_messages.fetch_reply
    if method.name == "Fetch"
    else GetMessageClass(method.output_type).FromString
    for method in pb.DESCRIPTOR.services_by_name["Outer"].methods
}


@dataclass(frozen=True)
class _Details:
    method: str


class _Recorder:
    """A server that only records its handlers."""

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        (self.handlers,) = handlers


class Entrance:
    """Accepts calls to a core's services, like its gRPC server."""

    def __init__(self, core: Core, service: Any) -> None:
        recorder = _Recorder()
        frame_messages.serve(service, recorder)  # type: ignore[arg-type]
        self._service: Callable[[Any], Any] = recorder.handlers.service
        limited = partial(_limited, core)
        self.gate = CallLimiter(
            QUICK,
            lambda who, session: _vouched(core, who, session),
            core.metrics.limited,
            limited,
            core.clock,
            RevokedCertificates(None),
        )

    def context(self, call: Call) -> Gated:
        """Returns a call's context as the limiter sees it."""
        return Gated(call)

    async def serve(self, call: Call, context: Gated) -> None:
        """Serves one call until it ends."""
        handler = await self.gate.intercept_service(
            self._found, _Details(f"/atoll.v1.{frame_messages.OUTER}/{call.method}")
        )
        await handler.stream_stream(None, context)

    async def _found(self, details: Any) -> Any:
        return self._service(details)


class Gated(Context):
    """A call's context, with messages as bytes."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def auth_context(self) -> dict[str, list[bytes]]:
        name = self._call.learner.name.partition("#")[0]
        role = "front" if name.startswith("front") else "learner"
        uri = f"{SCHEME}{role}/{name}".encode()
        return {
            "transport_security_type": [b"ssl"],
            "x509_subject_alternative_name": [uri],
            "x509_pem_cert": [_certificate()],
        }

    async def read(self) -> Any:
        message = await self._call.request()
        return grpc.aio.EOF if message is None else _raw(message)

    async def write(self, message: bytes) -> None:
        """Sends a message. Waits forever if the caller does not read."""
        if not self._call.read_by_its_caller:
            await asyncio.get_running_loop().create_future()
        self._call.reply_with(REPLIES[self._call.method](message))


def _raw(message: Any) -> bytes:
    if isinstance(message, list):
        return b"".join(frame_messages.encode(frame.index, frame.crc32c, bytes(frame.payload)) for frame in message)
    return message.content if isinstance(message, Half) else message.SerializeToString()


@cache
def _certificate() -> bytes:
    """Returns a certificate that all callers show. The product reads only its serial number and fingerprint."""
    key, name = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)), x509.Name([])
    began = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, began, began + datetime.timedelta(days=1))
    return builder.sign(key, None).public_bytes(serialization.Encoding.PEM)
