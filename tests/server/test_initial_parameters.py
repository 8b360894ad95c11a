"""One learner at a time may send the initial parameters, while it makes progress. Then another has its turn."""

from __future__ import annotations

from atoll_server.learners.goodput import TimeAccount
from atoll_server.learners.learner_registry import RegistryEntry
from atoll_server.run.initial_parameters import RENEWING_BYTES, WAITS_S, Lease, LeaseTurns


def entry(name: str = "a") -> RegistryEntry:
    return RegistryEntry(name, "", 1, [1], TimeAccount(0.0, 0.0), 1)


def test_only_new_bytes_renew_a_lease():
    lease = Lease(entry(), 60.0)
    for at in range(50):  # byte by byte
        lease.came(at, 100.0 + at)
    assert lease.until == 60.0
    lease.came(RENEWING_BYTES, 110.0)
    assert lease.until == 110.0
    for _ in range(50):  # the same bytes again, from the beginning
        lease.came(RENEWING_BYTES // 2, 500.0)
        lease.came(2 * RENEWING_BYTES - 1, 500.0)
    assert lease.until == 110.0
    lease.came(2 * RENEWING_BYTES, 170.0)
    assert (lease.over(170.0), lease.over(170.1)) == (False, True)


def test_a_lease_ends_with_its_holder():
    for change in ({"evicted": "it lies"}, {"session": 0}):
        lease = Lease(entry(), 60.0)
        assert not lease.over(1.0)
        for name, value in change.items():
            setattr(lease.entry, name, value)
        assert lease.over(1.0)


def test_the_name_with_the_fewest_turns_is_next():
    turns = LeaseTurns()
    assert turns.of("a", 0.0), "alone, a name must keep its turn"
    turns.took("a", 600.0)
    assert turns.of("a", 0.0)
    turns.waits("b", 60.0)
    assert not turns.of("a", 60.0), "a's turn must be over"
    assert turns.of("b", 60.0)
    turns.took("b", 600.0)
    turns.waits("a", 120.0)
    assert turns.of("b", 120.0)
    turns.took("b", 600.0)
    assert not turns.of("b", 121.0)
    assert turns.of("b", 121.0 + WAITS_S), "a must lose its turn, because it no longer asks"


def test_a_turn_ends_while_another_waits_even_if_bytes_arrived():
    lease = Lease(entry(), 60.0, turn_ends=600.0)
    for minute in range(60):  # one MiB per minute
        lease.came((minute + 1) * RENEWING_BYTES, 60.0 * minute + 61.0)
        assert not lease.over(60.0 * minute), "without others, the lease must not end"
        assert lease.over(60.0 * minute, wanted=True) is (minute > 10)


def test_each_turn_of_a_name_is_twice_as_long_so_that_a_slow_learner_is_through_at_last():
    turns, now, need_s = LeaseTurns(), 0.0, 3000.0  # x needs this long; y would keep the lease forever
    turns.waits("x", now)
    lease_s = turns.took("y", 600.0)
    for _ in range(4):
        turns.waits("x", now)
        now += lease_s
        turns.waits("x", now)
        assert turns.wanted("y", now)
        assert turns.of("x", now)
        lease_s = turns.took("x", 600.0)
        if lease_s >= need_s:
            break
        now += lease_s
        turns.waits("y", now)
        assert turns.wanted("x", now)
        lease_s = turns.took("y", 600.0)
    assert lease_s >= need_s
    assert now <= 5 * need_s
    assert not turns.wanted("x", now + WAITS_S + 1)
