"""Who reads a fragment's published parameters while merges go on: what is read is left as it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from atoll_server.merge import FragmentState


class Readers:
    """Of all fragments. states: the durable ones; locks: held by whoever merges."""

    def __init__(self, states: Sequence[FragmentState], locks: Sequence[asyncio.Lock]) -> None:
        self._states, self._locks = states, locks
        self._reading: Counter[int] = Counter()  # each theta_pub, by its identity

    @contextlib.asynccontextmanager
    async def newest(self, fragment: int) -> AsyncIterator[FragmentState]:
        """A fragment's newest durable version; while it lasts its theta_pub, and nothing else of it, stays as it is."""
        async with self._locks[fragment]:
            state = self._states[fragment]
            self._reading[id(state.theta_pub)] += 1
        try:
            yield state
        finally:
            self._reading -= Counter([id(state.theta_pub)])

    def any_of(self, state: FragmentState) -> bool:
        """Whether somebody reads it: a merge writes the next one to memory of its own."""
        return id(state.theta_pub) in self._reading
