"""Checks the places of a run's shards, because a core or front, which is another process, sent them."""

from __future__ import annotations

from collections.abc import Collection

from atoll_wire import outer_pb2 as pb
from atoll_wire.security.transport import TransportSecurity, TransportSecurityError

from atoll.errors import NONSENSE, LearnerError

LONGEST_ADDRESS = 262  # characters: a DNS name of 253, brackets, and a port


def checked_places(places: Collection[pb.ShardPlace], fragments: int) -> None:
    """Raises LearnerError unless each fragment is in exactly one shard. At most one shard may have no fragments.

    fragments: number of the run's fragments.
    """
    owned = sorted(fragment for place in places for fragment in place.fragments)
    if owned != list(range(fragments)) or sum(not place.fragments for place in places) > 1:
        raise LearnerError(
            f"the core sent an invalid division of {fragments} fragments among {len(places)} shards: {NONSENSE}"
        )


def checked_address(address: str, security: TransportSecurity) -> str:
    """Returns `address`, a shard's. Raises LearnerError if it is invalid, or if this process must not call it."""
    if not address.isprintable() or len(address) > LONGEST_ADDRESS:
        raise LearnerError(f"the core sent the shard address {address[:80]!a}, which is invalid: {NONSENSE}")
    try:
        security.check([address])
    except TransportSecurityError as error:
        raise LearnerError(f"this process cannot call a shard of the run: {error}") from error
    return address
