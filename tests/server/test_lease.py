"""Who may send the first parameters: one at a time, for as long as it brings something, and then another's turn."""

from __future__ import annotations

from atoll_server.goodput import Account
from atoll_server.initial import RENEWING_BYTES, WAITS_S, Lease, Turns
from atoll_server.roster import Entry


def entry(name: str = "a") -> Entry:
    return Entry(name, "", 1, [1], Account(0.0, 0.0), b"token")


def test_a_lease_is_renewed_by_what_no_upload_brought_before_and_by_nothing_else():
    lease = Lease(entry(), 60.0)
    for at in range(50):  # byte by byte
        lease.came(at, 100.0 + at)
    assert lease.until == 60.0
    lease.came(RENEWING_BYTES, 110.0)
    assert lease.until == 110.0
    for _ in range(50):  # the same again, from its beginning
        lease.came(RENEWING_BYTES // 2, 500.0)
        lease.came(2 * RENEWING_BYTES - 1, 500.0)
    assert lease.until == 110.0
    lease.came(2 * RENEWING_BYTES, 170.0)
    assert (lease.over(170.0), lease.over(170.1)) == (False, True)


def test_a_lease_ends_with_its_holder():
    for change in ({"evicted": "it lies"}, {"token": b""}):
        lease = Lease(entry(), 60.0)
        assert not lease.over(1.0)
        for name, value in change.items():
            setattr(lease.entry, name, value)
        assert lease.over(1.0)


def test_whoever_had_it_least_often_is_next():
    turns = Turns()
    assert turns.of("a", 0.0), "nobody else waits"
    turns.took("a")
    assert turns.of("a", 0.0)
    turns.waits("b", 60.0)
    assert not turns.of("a", 60.0), "it had its turn"
    assert turns.of("b", 60.0)
    turns.took("b")
    turns.waits("a", 120.0)
    assert turns.of("b", 120.0)
    turns.took("b")
    assert not turns.of("b", 121.0)
    assert turns.of("b", 121.0 + WAITS_S), "the other one does not ask any more"
