"""Creates the replies of Fetch and Read, which contain the frames of a published update or of a whole fragment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.messages import frame_messages
from atoll_wire.messages.frame_messages import Sent

from atoll_server.access.refusals import Refused, Status
from atoll_server.merging.merge import FragmentState
from atoll_server.shard.fragment import Fragment
from atoll_server.shard.publications import Publication
from atoll_server.shard.shard import Shard

OnSent: TypeAlias = Callable[[int, int], None]  # called with the number of bytes and parameters of each payload


async def published(shard: Shard, fragment: Fragment, request: pb.FetchRequest | pb.ReadRequest) -> Publication:
    """Returns the requested update. Raises Refused if the shard no longer has the update."""
    if isinstance(request, pb.FetchRequest) and request.header_only:
        publication = shard.cache.get(fragment.index, request.version)
    else:
        publication = await shard.publication(fragment, request.version, fast=request.fast)
    if publication is None:
        text = f"update {request.version} of fragment {fragment.index} is not available: fetch the whole fragment"
        raise Refused(Status.NOT_FOUND, text)
    return publication


def update_header(
    shard: Shard, fragment: Fragment, publication: Publication, receipts: Iterable[pb.Receipt]
) -> pb.FetchReply:
    """Returns the first reply of an update."""
    header = pb.FetchHeader(
        fragment=fragment.index,
        version=publication.version,
        codec=int(shard.context.run.codec),  # type: ignore[arg-type]
        frames=len(publication.messages),
        size_bytes=publication.size_bytes,
        crc32c=publication.crc32c,
        receipts=receipts,
    )
    return pb.FetchReply(header=header)


async def update_frames(
    fragment: Fragment, publication: Publication, wanted: Sequence[int], sent: OnSent
) -> AsyncGenerator[Sent, None]:
    """Yields the wanted frames of an update."""
    spans = fragment.place.frames
    while wanted:
        count = frame_messages.count_fitting(publication.sizes[index] for index in wanted)
        some, wanted = wanted[:count], wanted[count:]
        yield b"".join(publication.messages[index] for index in some)
        for index in some:
            sent(publication.sizes[index], spans[index].length)


async def whole_header(fragment: Fragment, state: FragmentState, receipts: Iterable[pb.Receipt]) -> pb.FetchReply:
    """Returns the first reply of a whole fragment."""
    header = pb.FetchHeader(
        fragment=fragment.index,
        version=state.version,
        codec=pb.CODEC_FLOAT32,
        frames=len(fragment.place.frames),
        size_bytes=4 * fragment.place.length,
        crc32c=await asyncio.to_thread(frame_codec.vector_crc32c, state.theta_pub),
        receipts=receipts,
    )
    return pb.FetchReply(header=header)


async def whole_frames(
    fragment: Fragment,
    state: FragmentState,
    wanted: Sequence[int],
    sent: OnSent,
    encoding: asyncio.Semaphore | None,
    *,
    compressed: bool,
) -> AsyncGenerator[Sent, None]:
    """Yields the wanted frames of a whole fragment. encoding: limit on the frames that are encoded at the same time."""
    encode = partial(frame_codec.encode_frame, codec=Codec.FLOAT32, compressed=compressed)
    spans = fragment.place.frames
    for span in (spans[index] for index in wanted):
        if encoding is not None:
            await encoding.acquire()
        try:
            payload = await asyncio.to_thread(encode, state.theta_pub, span)
        finally:
            if encoding is not None:
                encoding.release()
        sent(len(payload), span.length)
        yield frame_messages.encode(span.index, crc32c(payload), payload)
