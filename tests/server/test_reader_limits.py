"""A stalled reader keeps few versions in memory, and must then fetch the newest version."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack
from types import SimpleNamespace

from atoll_server.access.reader_limits import MAX_OF_ONE, ReaderLimits
from atoll_server.access.refusals import Status
from atoll_server.rpc.calls import may_end
from atoll_server.shard import readers as shard_readers


class Readers:
    def __init__(self, most_old: int) -> None:
        self.versions, self.stack, self.ended = ReaderLimits(most_old), ExitStack(), list[str]()

    def read(self, learner: str, thing: int, version: int) -> None:
        def end(why):
            assert why.status is Status.UNAVAILABLE
            self.ended.append(f"{learner}/{thing}/{version}")

        self.stack.enter_context(self.versions.read(learner, thing, version, end))


def test_a_learner_reads_two_versions_of_a_fragment_and_the_older_ones_end():
    it = Readers(100)
    for version in range(40):
        it.read("still", 0, version)
    assert it.ended[:3] == ["still/0/0", "still/0/0", "still/0/1"], "each read must end, even if ended before"
    assert set(it.ended) == {f"still/0/{version}" for version in range(40 - MAX_OF_ONE)}


def test_limits_do_not_affect_other_readers_and_fragments():
    it = Readers(100)
    for learner in "abcdef":
        it.read(learner, 0, ord(learner))
        it.read("a", ord(learner), 1)
    assert it.ended == []


def test_few_old_versions_are_kept_and_the_oldest_end_first():
    it = Readers(2)
    for learner, version in (("a", 1), ("b", 2), ("b2", 2), ("c", 3)):
        it.read(learner, 0, version)
        assert it.ended == []
        it.versions.passed(0)
    assert it.ended == ["a/0/1"]
    it.read("d", 0, 4)
    it.ended.clear()
    it.versions.passed(0)
    assert it.ended == ["a/0/1", "b/0/2", "b2/0/2"]


def test_readers_of_the_newest_version_have_no_limit():
    it = Readers(0)
    for learner in "abc":
        it.read(learner, 0, 7)
    assert it.ended == []
    assert it.versions.reads(7)
    it.stack.close()
    assert not it.versions.reads(7)


class Held:
    """A fragment whose merges make new states."""

    def __init__(self, index: int) -> None:
        self.index, self.lock = index, asyncio.Lock()
        self.merge()

    def merge(self) -> None:
        self.state = SimpleNamespace(theta_pub=object())


def test_stalled_readers_end_no_read_of_a_learner():
    async def story() -> list[str]:
        ended, readers, held = list[str](), shard_readers.Readers(SimpleNamespace(failed=False)), map(Held, range(20))
        async with AsyncExitStack() as stack:
            for fragment in held:
                name = "reader" if fragment.index else "learner"
                may_end(lambda _, name=name: ended.append(name))
                mine = readers.newest_for_readers(fragment) if fragment.index else readers.newest(fragment, name)
                state = await stack.enter_async_context(mine)
                assert readers.any_of(state), "a merge must not change a state that is read"
                fragment.merge()
                readers.passed(fragment.index)
        return ended

    ended = asyncio.run(story())
    assert set(ended) == {"reader"}, "readers must end only other readers' reads"
    assert len(ended) >= 19 - shard_readers.MAX_OLD_OF_READERS
