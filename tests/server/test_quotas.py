"""One caller's quotas: rates, slots, and their total memory."""

from __future__ import annotations

import pytest
from atoll_server.access.quotas import CallSlots, NoSlotError, Quotas, RateBucket
from atoll_server.rpc.open_calls import METHODS
from atoll_wire.connections.link import MAX_UPLOADS
from atoll_wire.connections.parallel_connections import MAX_CONNECTIONS, SLOTS
from atoll_wire.messages.message_parts import MESSAGE_BYTES
from grpc_health.v1 import health_pb2


def test_half_sent_messages_of_one_learner_hold_96_mib_at_most():
    methods = [*METHODS.values(), *(each.name for each in health_pb2.DESCRIPTOR.services_by_name["Health"].methods)]
    assert {"Push", "Initialise", "Probe", "Status", "Watch"} < set(methods)
    assert Quotas().half_sent_bytes(MESSAGE_BYTES, methods) <= 96 << 20


def test_a_learner_may_use_all_its_connections():
    assert Quotas().pushes >= SLOTS * MAX_CONNECTIONS + MAX_UPLOADS
    assert Quotas().fetches >= SLOTS * MAX_CONNECTIONS


def test_a_rate_allows_a_burst_and_then_a_number_per_second():
    bucket = RateBucket(10.0, 5.0)
    assert [bucket.take(100.0) for _ in range(5)] == [0.0] * 5
    assert bucket.take(100.0) == pytest.approx(0.1)
    assert bucket.take(100.0) == pytest.approx(0.2)
    assert bucket.take(100.4) == pytest.approx(0.0)
    assert not bucket.full(100.4)
    assert bucket.full(101.0)


def test_a_new_call_replaces_the_oldest_one():
    pool: CallSlots[str] = CallSlots(2)
    assert pool.enter("a", 0.0) is None
    assert pool.enter("b", 1.0) is None
    assert pool.enter("c", 2.0) == "a"
    pool.leave("a")
    assert pool.enter("d", 3.0) == "b"


def test_calls_that_never_end_are_replaced_only_a_few_times():
    pool: CallSlots[int] = CallSlots(8)
    for call in range(8):
        pool.enter(call, 0.0)
    assert [pool.enter(call, 1.0) for call in (8, 9)] == [0, 1]
    with pytest.raises(NoSlotError):
        pool.enter(10, 2.0)
    pool.leave(0)
    assert pool.enter(10, 3.0) == 2


def test_a_young_call_keeps_its_place():
    pool: CallSlots[str] = CallSlots(1)
    pool.enter("a", 10.0)
    with pytest.raises(NoSlotError):
        pool.enter("b", 10.5, young_s=1.0)
    assert pool.enter("b", 11.0, young_s=1.0) == "a"
