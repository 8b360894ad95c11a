"""Several gRPC event loops in one process, as with several learners in a notebook."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
from atoll.transfers.event_loop import ignore_known_grpc_errors


class AnswersLate(grpc.GenericRpcHandler):
    def service(self, _: object) -> grpc.RpcMethodHandler:
        async def answer(request: bytes, _: object) -> bytes:
            await asyncio.sleep(0.05)
            return request

        return grpc.unary_unary_rpc_method_handler(answer)


async def call_and_close(address: str) -> None:
    """Leaves calls open, whose answers arrive after the loop has closed."""
    asyncio.get_running_loop().set_exception_handler(ignore_known_grpc_errors)
    channel = grpc.aio.insecure_channel(address)
    calls = [channel.unary_unary("/any/Method")(b"") for _ in range(5)]
    await asyncio.sleep(0.02)
    assert len(calls) == 5


async def serve_loops_that_close(loops: int) -> None:
    asyncio.get_running_loop().set_exception_handler(ignore_known_grpc_errors)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((AnswersLate(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    for _ in range(loops):
        await asyncio.to_thread(lambda: asyncio.run(call_and_close(address)))
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.unary_unary("/any/Method")(b"")  # by now, gRPC has passed on the events of the closed loops
    await server.stop(None)


def test_events_for_a_loop_that_has_closed_are_not_reported(caplog):
    asyncio.run(serve_loops_that_close(10))
    assert "PollerCompletionQueue" not in caplog.text
