"""Consistent cuts of the published model, and their exchange between the follower's thread and the user's thread.

The fragments of a consistent cut may have any versions, but all fragments of a shard must have the same history. A cut
therefore belongs to one generation of the run and contains no fragment from before a restore.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from atoll_wire.codec.block_kernels import F32
from atoll_wire.layout.layout import Layout
from atoll_wire.model_file.fixed_values import FixedValues
from atoll_wire.model_file.model_file import RunId

from atoll.errors import FollowerError


@dataclass(frozen=True, slots=True, eq=False)
class FragmentValues:
    """One version of a fragment. checksum: CRC-32C of the values. theta_pub: the published parameters, float32
    (fragment.length,), which are never changed in place."""

    version: int
    checksum: int
    theta_pub: F32


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A consistent state of the whole published model. fragments: the values of each fragment, by number."""

    run: RunId
    layout: Layout
    fixed: FixedValues
    fragments: Mapping[int, FragmentValues]

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment."""
        return tuple(self.fragments[each.index].version for each in self.layout.fragments)

    def same_as(self, other: Cut | None) -> bool:
        """Returns whether both cuts have the same content."""
        return (
            other is not None
            and self.run == other.run
            and all(values is other.fragments.get(index) for index, values in self.fragments.items())
        )


class CutExchange:
    """Passes the newest cut to the user's thread. An error ends the exchange.

    cause: the reason why the server could not be read, with the fix. It is empty if the server did not answer.
    """

    def __init__(self) -> None:
        self.cause = ""
        self._changed = threading.Condition()
        self._newest: Cut | None = None
        self._error: FollowerError | None = None

    def offer(self, cut: Cut) -> None:
        """Replaces the newest cut."""
        with self._changed:
            self._newest = cut
            self._changed.notify_all()

    def end(self, error: FollowerError) -> None:
        """Makes the user's thread raise this error in its current and later calls. Only the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def newest(self) -> Cut | None:
        """The newest cut, or None before the first cut. Raises FollowerError if the exchange has ended."""
        with self._changed:
            return self._taken()

    def wait(self, after: Cut | None, timeout_s: float | None, version: int | None = None) -> Cut | None:
        """Waits for a cut that differs from `after`. Returns None after the timeout.

        timeout_s: None means no limit. version: if given, waits instead for a cut in which every fragment has at least
        this version. Raises FollowerError if the exchange has ended.
        """

        def found() -> bool:
            if (cut := self._taken()) is None:
                return False
            return min(cut.versions) >= version if version is not None else not cut.same_as(after)

        with self._changed:
            return self._newest if self._changed.wait_for(found, timeout_s) else None

    def _taken(self) -> Cut | None:
        if self._error is not None:
            raise self._error
        return self._newest
