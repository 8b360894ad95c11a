"""Requests the frames that a fetch needs next."""

from __future__ import annotations

import grpc.aio
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.frame_transfer import download
from atoll_wire.connections.link import Link

from atoll.transfers.call_errors import Remedy, remedy
from atoll.transfers.partial_fetch import FrameRequest, PartialFetch, UnsoundError


async def receive(
    link: Link, request: pb.FetchRequest | pb.ReadRequest, incoming: PartialFetch, ask: FrameRequest
) -> bool:
    """Fetches the requested frames. Returns False if the server sent other frames. Raises AioRpcError and LinkLost.

    request: a request for the update or the whole fragment that `ask` names.
    """
    aside = ask.version != incoming.version  # whether this is an update for frames of an older version
    try:
        return await download(link, request, ask.frames, incoming.took_update if aside else incoming.took)
    except UnsoundError:
        return False
    except grpc.aio.AioRpcError as error:
        if not aside or remedy(error) is not Remedy.FETCH_WHOLE:
            raise
        incoming.forget(ask.frames)
        return True
