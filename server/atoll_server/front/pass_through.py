"""Passes operators' calls and the probes of `atoll doctor` on to the core without decoding their messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost, open_stream, tolerate_ended_call
from atoll_wire.connections.link import CORE_AWAY, is_atoll_status, is_connection_lost
from atoll_wire.contract import AUTHORIZATION

from atoll_server.access.audit_log import AuditLog
from atoll_server.access.identity import caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.rpc.calls import Context, abort, discard_rest, end
from atoll_server.upstream.core_connection import CoreConnection

PassThrough = Callable[[AsyncIterator[bytes], Context], AsyncIterator[bytes]]


def pass_on(
    server: grpc.aio.Server, core_connection: CoreConnection, region: str, audit_log: AuditLog, *, near: bool
) -> None:
    """Adds the Operator and Doctor services to a front's server. The front passes their calls on to the core.

    near: whether only processes on this machine can call the front. If other machines can call it, operators must send
    a token, since the core does not see their certificates. A core may allow every caller on its own machine. Without
    the token, such a core would also allow every caller in the front's network.
    """
    marks = {"Operator": b"", "Doctor": pb.ProbeReply(via=[region or "a front"]).SerializeToString()}
    for name, mark in marks.items():
        handlers: dict[str, Any] = {}
        for method in pb.DESCRIPTOR.services_by_name[name].methods:
            path, token_needed = f"/atoll.v1.{name}/{method.name}", name == "Operator" and not near
            passing = _passing(core_connection, path, mark, audit_log, token_needed=token_needed)
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(passing)  # a unary call is a short stream
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"atoll.v1.{name}", handlers),))


def _passing(
    core_connection: CoreConnection, path: str, mark: bytes, audit_log: AuditLog, *, token_needed: bool
) -> PassThrough:
    """Returns a handler that passes a method's calls on. path: path of the method, such as /atoll.v1.Operator/Status.

    mark: an encoded message that the handler appends to each reply; protobuf merges concatenated messages.
    """
    method = path.rpartition("/")[2]

    async def passing(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        try:
            caller(context)
            shown = tuple((key, value) for key, value in context.invocation_metadata() or () if key == AUTHORIZATION)
            if token_needed and not shown:
                text = "operators need a token to use this front: give --token-file, or connect to the core directly"
                raise Refused(Status.PERMISSION_DENIED, text)
            with core_connection.link.carriers.use() as connection:
                channel: Any = connection.channel
                with open_stream(method, channel.stream_stream(path)(metadata=shown)) as call:
                    sending = asyncio.create_task(_send(requests, call))
                    try:
                        async for reply in call:
                            yield reply + mark
                    finally:
                        sending.cancel()
                        await asyncio.gather(
                            sending, return_exceptions=True
                        )  # `sending` reads the requests until then; the rest is discarded below
        except Refused as refused:
            audit_log.refused("refused", context.peer(), status=refused.status.value, detail=refused.detail)
            await abort(context, refused)
        except grpc.aio.AioRpcError as error:
            if is_connection_lost(error):
                why = error.details() or "no details"
                await _end_without_core(context, core_connection.address, why, await core_connection.tls_fault())
            await end(context, error.code(), error.details() or "", meant=is_atoll_status(error))
        except LinkLost:
            await _end_without_core(context, core_connection.address, "the connection was closed")
        finally:
            await discard_rest(requests)

    return passing


async def _end_without_core(context: Context, address: str, why: str, fault: str = "") -> NoReturn:
    """Ends a call that the core did not answer.

    The status names the core's address. fault: the fault of TLS, if any.
    """
    fix = f"check the link between the front and {address}, and that the core runs there"
    text = f"the core at {address} does not answer the front ({why}): {fix}"
    text = f"the front cannot call the core: {fault}" if fault else text
    await end(context, grpc.StatusCode.UNAVAILABLE, text, meant=False, more=((CORE_AWAY, address.encode()),))


async def _send(requests: AsyncIterator[bytes], call: Any) -> None:  # noqa: ANN401 - gRPC's
    with tolerate_ended_call():
        async for request in requests:
            await call.write(request)
        await call.done_writing()
