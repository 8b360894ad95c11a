"""Pages of receipts over several shards."""

from __future__ import annotations

import random

import pytest
from atoll_server.access.refusals import Refused
from atoll_server.operators.receipt_pages import format_position, joined_page, parse_position
from atoll_wire import outer_pb2 as pb


def receipt(shard: int, number: int, at: float) -> pb.LoggedReceipt:
    return pb.LoggedReceipt(shard=shard, number=number, accepted_at=at)


class Shard:
    """A shard's receipts, newest first."""

    def __init__(self, number: int, times: list[float]) -> None:
        self.number = number
        self.receipts = [receipt(number, n, at) for n, at in enumerate(sorted(times), 1)][::-1]

    def page(self, request: pb.ListReceiptsRequest) -> pb.ListReceiptsReply:
        before = parse_position(request.before).get(self.number, 0)
        found = [each for each in self.receipts if not before or each.number < before]
        return pb.ListReceiptsReply(receipts=found[: request.limit])


def test_pages_over_shards_of_different_rates_have_each_receipt_once_and_newest_first():
    drawn = random.Random(7)
    shards = [Shard(number, [drawn.random() for _ in range(count)]) for number, count in enumerate((40, 3, 0, 17))]
    found: list[pb.LoggedReceipt] = []
    before = ""
    while True:
        request = pb.ListReceiptsRequest(limit=7, before=before)
        page = joined_page({each.number: each.page(request) for each in shards}, [], request, 100)
        if not page.receipts:
            break
        assert len(page.receipts) <= 7
        found += page.receipts
        before = page.next
    assert len(found) == 60
    assert len({(each.shard, each.number) for each in found}) == 60
    assert [each.accepted_at for each in found] == sorted((each.accepted_at for each in found), reverse=True)


def test_a_shard_that_is_away_for_one_page_continues_where_it_was():
    both = [Shard(0, [1.0, 3.0]), Shard(1, [2.0, 4.0])]
    request = pb.ListReceiptsRequest(limit=2)
    first = joined_page({each.number: each.page(request) for each in both}, [], request, 100)
    assert [(each.shard, each.number) for each in first.receipts] == [(1, 2), (0, 2)]
    request = pb.ListReceiptsRequest(limit=2, before=first.next)
    second = joined_page({0: both[0].page(request)}, [1], request, 100)
    assert list(second.missing) == [1]
    request = pb.ListReceiptsRequest(limit=2, before=second.next)
    third = joined_page({each.number: each.page(request) for each in both}, [], request, 100)
    assert [(each.shard, each.number) for each in third.receipts] == [(1, 1)]


def test_a_page_has_at_most_the_cores_limit():
    request = pb.ListReceiptsRequest()
    assert (
        len(joined_page({0: Shard(0, [1.0, 2.0, 3.0]).page(pb.ListReceiptsRequest(limit=3))}, [], request, 2).receipts)
        == 2
    )


@pytest.mark.parametrize("text", ["x", "1", "1:", "1:2,", "1:2 ", ":3", "12345:1", "1:" + "9" * 20, "1:2\n"])
def test_a_malformed_position_is_refused(text):
    with pytest.raises(Refused, match="position of the receipts is invalid"):
        parse_position(text)


def test_a_position_survives_conversion_to_text():
    assert parse_position("") == {}
    assert parse_position(format_position({2: 7, 0: 19})) == {0: 19, 2: 7}
    assert parse_position("0:9999999999999999999")[0] < 1 << 63, "the position must fit into SQLite's integers"
