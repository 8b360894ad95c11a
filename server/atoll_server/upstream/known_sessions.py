"""PURE: sessions that a shard accepted recently. The front asks the shard about all other sessions."""

from __future__ import annotations

from collections import OrderedDict

from atoll_wire import outer_pb2 as pb

KNOWN_S = 10.0  # seconds; a learner with a Follow call receives a message from the shard every second
MOST = 16_384


class KnownSessions:
    """Sessions that a shard accepted recently. A different token, run or generation means a different session."""

    def __init__(self) -> None:
        self._answered_at: OrderedDict[bytes, float] = OrderedDict()

    def answered(self, session: pb.Session, now: float) -> None:
        """Records that the shard accepted this session. now: monotonic seconds."""
        key = _key(session)
        self._answered_at[key] = now
        self._answered_at.move_to_end(key)
        if len(self._answered_at) > MOST:
            self._answered_at.popitem(last=False)

    def refused(self, session: pb.Session) -> None:
        """Removes a session that the shard refused or whose state is unknown."""
        self._answered_at.pop(_key(session), None)

    def clear(self) -> None:
        self._answered_at.clear()

    def known(self, session: pb.Session, now: float) -> bool:
        """Returns whether the shard accepted this session within the last KNOWN_S seconds."""
        at = self._answered_at.get(_key(session))
        return at is not None and now - at < KNOWN_S


def _key(session: pb.Session) -> bytes:
    return session.SerializeToString(deterministic=True)
