"""Reads pages of receipts, newest first, from one shard or from all shards.

A position contains the number of the last receipt read from each shard, such as "0:120,1:87". The next page can
therefore continue exactly, although each shard numbers its own receipts.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Mapping
from contextlib import closing

from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import FATE_NAMES

from atoll_server.access.refusals import Refused, Status
from atoll_server.checkpoints.restore import LEDGER
from atoll_server.ledger import shard_ledger
from atoll_server.ledger.rows import ContributionRow, FateRow
from atoll_server.processes.core_process import CoreProcess
from atoll_server.shard.contributions import receipt_of
from atoll_server.uploads.admission import MAX_NUMBER

POSITION = re.compile(r"(\d{1,4}:\d{1,19}(,\d{1,4}:\d{1,19})*)?")


def parse_position(text: str) -> dict[int, int]:
    """Returns the number of the last receipt read from each shard. Raises Refused if the text is invalid."""
    if not POSITION.fullmatch(text):
        text = "the position of the receipts is invalid: use the `next` of an earlier reply"
        raise Refused(Status.INVALID_ARGUMENT, text)
    pairs = (each.split(":") for each in text.split(",") if each)
    return {int(shard): min(int(number), MAX_NUMBER) for shard, number in pairs}


def format_position(position: Mapping[int, int]) -> str:
    return ",".join(f"{shard}:{number}" for shard, number in sorted(position.items()))


def shard_page(core: CoreProcess, request: pb.ListReceiptsRequest) -> pb.ListReceiptsReply:
    """Returns a page of receipts of this process's shard. Reads from the disk, so call this function in a thread.

    Raises Refused for an invalid position.
    """
    shard, most = core.run.number, core.settings.limits.receipts
    before = parse_position(request.before)
    wanted = (request.learner, FATE_NAMES.get(request.fate), before.get(shard, 0), min(request.limit or most, most))
    with closing(core.disk.connect(core.settings.directory / LEDGER)) as db:
        db.execute("PRAGMA query_only=TRUE")
        rows = shard_ledger.receipts(db, *wanted)
    found = [logged_receipt(shard, *row) for row in rows]
    return pb.ListReceiptsReply(receipts=found, next=_after(before, found))


def joined_page(
    replies: Mapping[int, pb.ListReceiptsReply], missing: list[int], request: pb.ListReceiptsRequest, most: int
) -> pb.ListReceiptsReply:
    """Returns a page of all shards' receipts, newest first. replies: keyed by shard number. most: limit on a page."""
    limit = min(request.limit or most, most)
    pages = (replies[shard].receipts for shard in sorted(replies))
    found = list(heapq.merge(*pages, key=lambda each: -each.accepted_at))[:limit]
    return pb.ListReceiptsReply(receipts=found, next=_after(parse_position(request.before), found), missing=missing)


def _after(before: dict[int, int], found: list[pb.LoggedReceipt]) -> str:
    """Returns the position after a page. before: the position at which the page began."""
    return format_position(before | {each.shard: each.number for each in found})


def logged_receipt(shard: int, number: int, row: ContributionRow, fate: FateRow) -> pb.LoggedReceipt:
    """Returns a contribution's ledger rows as a message.

    number: number that increases with each contribution to the shard.
    """
    return pb.LoggedReceipt(
        number=number,
        receipt=receipt_of(fate),
        tokens=row.tokens,
        steps=row.steps,
        base_version=row.base_version,
        size_bytes=row.size_bytes,
        norm=math.sqrt(math.fsum(row.norms_sq)),
        clipped=row.scale,
        accepted_at=row.accepted_at,
        shard=shard,
    )
