"""A follower's view of a run: what to fetch, and when its fragments are a consistent cut."""

from __future__ import annotations

import numpy as np
import pytest
from atoll.errors import FollowerError
from atoll.follower.cuts import FragmentValues
from atoll.follower.model_view import FollowedFragment, ModelView
from atoll_wire import outer_pb2 as pb
from atoll_wire.layout.layout import MergeKind, TensorSpec, plan
from atoll_wire.model_file.model_file import RunId

LAYOUT = plan([TensorSpec("a", (8,), "float32", MergeKind.AVERAGE)], 2)


def view() -> ModelView:
    made = ModelView()
    made.begins(RunId("run", 1))
    made.fragments = {each.index: FollowedFragment(each.whole, None) for each in LAYOUT.fragments}
    made.places = [frozenset({0, 1})]
    return made


def reply(log: int, *versions: tuple[int, int, int], shard: int = 0) -> pb.WatchReply:
    return pb.WatchReply(
        shard=shard,
        log=log,
        versions=[pb.PublishedVersion(fragment=f, version=v, crc32c=c, frames=1) for f, v, c in versions],
    )


def fetched(fragment: FollowedFragment, version: int, checksum: int) -> None:
    fragment.values = FragmentValues(version, checksum, np.zeros(fragment.run.length, np.float32))
    fragment.whole = False


def test_a_cut_needs_the_versions_that_the_shard_announced_first():
    it = view()
    one, two = it.fragments.values()
    assert not one.behind(), "no shard has announced a version"
    it.heard(reply(7, (0, 3, 30), (1, 4, 40)))
    assert one.behind()
    assert not one.ready()
    fetched(one, 3, 30)
    assert one.ready()
    assert not one.behind()
    assert not two.ready()
    it.heard(reply(7, (0, 4, 41)))
    assert one.behind()
    assert one.ready(), "a cut may contain older versions"


@pytest.mark.parametrize(
    ("version", "checksum", "whole"),
    [(5, 50, False), (5, 51, True), (4, 40, True), (6, 60, False)],
    ids=["same", "other values", "older", "newer"],
)
def test_a_fragment_starts_over_if_a_new_process_of_its_shard_has_another_history(version, checksum, whole):
    it = view()
    one = it.fragments[0]
    it.heard(reply(7, (0, 5, 50), (1, 1, 10)))
    fetched(one, 5, 50)
    restarts = one.restarts
    it.heard(reply(8, (0, version, checksum), (1, 1, 10)))
    assert one.whole is whole
    assert one.restarts == restarts + 1, "a running fetch with frames of the old history must restart"
    assert one.ready() is ((version, checksum) == (5, 50))
    assert (one.target, one.floor) == (version, version)


def test_a_new_generation_starts_over_and_another_run_is_refused():
    it = view()
    one = it.fragments[0]
    it.heard(reply(7, (0, 5, 50), (1, 1, 10)))
    fetched(one, 5, 50)
    it.begins(RunId("run", 2))
    assert not one.ready()
    assert not one.behind(), "the new generation's versions are still unknown"
    it.heard(reply(7, (0, 5, 50), (1, 1, 10)))
    assert one.behind()
    with pytest.raises(FollowerError, match="the server now has run other, but this follower follows run"):
        it.begins(RunId("other", 1))


@pytest.mark.parametrize(
    "odd",
    [reply(7, (0, 1, 1), shard=1), reply(7, (0, 1, 1)), reply(7, (0, 1, 1), (1, 1, 1), (2, 1, 1))],
    ids=["shard", "lacking", "unknown"],
)
def test_an_invalid_reply_is_refused(odd):
    with pytest.raises(FollowerError, match="use the same version of Atoll on both sides"):
        view().heard(odd)
