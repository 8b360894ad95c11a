"""PURE: which sessions a shard has answered lately. It has to check any other session itself."""

from __future__ import annotations

from collections import OrderedDict

from atoll_wire import outer_pb2 as pb

KNOWN_S = 10.0  # after the core's last answer; a learner that follows is answered every second
MOST = 16_384


class KnownSessions:
    """A session counts as a whole: with another token, run or generation it is another."""

    def __init__(self) -> None:
        self._answered_at: OrderedDict[bytes, float] = OrderedDict()

    def answered(self, session: pb.Session, now: float) -> None:
        """The core took this session for a living one."""
        key = _key(session)
        self._answered_at[key] = now
        self._answered_at.move_to_end(key)
        if len(self._answered_at) > MOST:
            self._answered_at.popitem(last=False)

    def refused(self, session: pb.Session) -> None:
        """The core did not, or nobody knows any more."""
        self._answered_at.pop(_key(session), None)

    def clear(self) -> None:
        """Nobody is known any more."""
        self._answered_at.clear()

    def known(self, session: pb.Session, now: float) -> bool:
        """Whether the core would answer it, as far as can be told without asking."""
        at = self._answered_at.get(_key(session))
        return at is not None and now - at < KNOWN_S


def _key(session: pb.Session) -> bytes:
    return session.SerializeToString(deterministic=True)
