"""Streaming calls end with their block, and count as open until then."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import grpc
import grpc.aio
import pytest
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.connections.calls import LinkLost, open_calls, open_stream, unary_reply

# gRPC shares connections by address within a process: a test would get another test's connection to a reused port.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


class Call:
    """A call that ends when the test ends it."""

    def __init__(self) -> None:
        self.cancelled, self._told = False, []

    def add_done_callback(self, callback) -> None:
        self._told.append(callback)

    def cancel(self) -> None:
        self.cancelled = True

    def end(self) -> None:
        for told in self._told:
            told(self)


@pytest.mark.parametrize("error", [None, KeyError, RuntimeError])
def test_a_call_ends_with_its_block_and_counts_until_it_has_ended(error):
    before, call = open_calls()["Report"], Call()
    with contextlib.suppress(*([error] if error else [])), open_stream("Report", call) as it:
        assert (it, open_calls()["Report"], call.cancelled) == (call, before + 1, False)
        if error:
            raise error
    assert call.cancelled
    assert open_calls()["Report"] == before + 1, "the call must count until gRPC ends it"
    call.end()
    assert open_calls()["Report"] == before


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_write_that_waits_for_a_connection_ends_with_its_call(end):
    """gRPC's own call would hang forever, as a front's Push once did."""

    async def written(address: str) -> None:
        channel = grpc.aio.insecure_channel(address, OWN_CONNECTION)
        with open_stream("Push", rpc.OuterStub(channel).Push()) as call:
            writing = asyncio.create_task(call.write(pb.PushRequest()))
            await asyncio.sleep(0)
            assert not writing.done()
            if end == "cancel":
                call.cancel()
            else:
                await channel.close()
            await asyncio.wait_for(writing, 10)

    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(LinkLost),
    ):
        asyncio.run(written(f"127.0.0.1:{silent.getsockname()[1]}"))


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_on_a_closed_connection_raises_link_lost(stream):
    async def main() -> None:
        connected, writers = asyncio.Event(), []

        def silent(_, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)  # the connection closes when its last reference is deleted
            connected.set()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        address = "{}:{}".format(*server.sockets[0].getsockname())
        channel = grpc.aio.insecure_channel(address, OWN_CONNECTION)
        stub = rpc.OuterStub(channel)

        async def wait() -> None:
            if not stream:
                await unary_reply(stub.Leave(pb.LeaveRequest()))
            with open_stream("Follow", stub.Follow(pb.FollowRequest())) as call:
                await call.read()

        waiting = asyncio.create_task(wait())
        await asyncio.wait_for(connected.wait(), 10)
        await channel.close()
        with pytest.raises(LinkLost):
            await asyncio.wait_for(waiting, 10)
        writers[0].close()
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_task_ends_as_cancelled_and_ends_its_call(stream):
    async def main() -> None:
        channel = grpc.aio.insecure_channel("127.0.0.1:1")
        calls = []

        async def wait() -> None:
            stub = rpc.OuterStub(channel)
            call = stub.Follow(pb.FollowRequest()) if stream else stub.Leave(pb.LeaveRequest())
            calls.append(call)
            if not stream:
                await unary_reply(call)
            with open_stream("Follow", call):
                await call.read()

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=10)
        assert waiting.cancelled()
        assert calls[0].done()
        await channel.close()

    asyncio.run(main())
