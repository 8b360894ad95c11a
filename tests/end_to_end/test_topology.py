"""Fronts and links in the status: a dead front or a cut link does not look like dead learners."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from atoll_wire import outer_pb2 as pb

from tests.end_to_end.relay import Relay
from tests.end_to_end.world import Core, Trainee, core, eventually, front

PACE_S = 0.02


pytestmark = pytest.mark.ci  # each test waits for silences


def links(it: Core) -> dict[str, pb.LinkStatus]:
    return {each.name: each for each in it.status().links}


def eu_link(it: Core) -> pb.LinkStatus:
    """Returns the link of front eu, or an empty message if the core does not know it."""
    return links(it).get("eu", pb.LinkStatus())


def states(it: Core) -> dict[str, str]:
    return {each.learner: each.state for each in it.status().learners}


def events(it: Core) -> list[str]:
    """Returns the texts of all events but those of the learner "near"."""
    with it.operator() as stub:
        told = stub.ListEvents(pb.ListEventsRequest()).events
    return [each.text for each in told if each.learner != "near"]


@contextlib.contextmanager
def training(**addresses: str) -> Iterator[dict[str, Trainee]]:
    """Context manager for learners that train until the block ends. addresses: by learner."""
    over: list[bool] = []
    trainees = {
        name: Trainee(address, name, lambda _: bool(over), region="eu", pace_s=PACE_S)
        for name, address in addresses.items()
    }
    for trainee in trainees.values():
        trainee.start()
    try:
        yield trainees
    finally:
        over.append(True)
        for trainee in trainees.values():
            trainee.done()


def test_a_dead_front_is_named_with_the_learners_behind_it(tmp_path):
    with (
        core(tmp_path / "home") as it,
        front(tmp_path / "eu", it.address, "--region", "eu") as eu,
        training(near=it.address, far=eu.address),
    ):
        eventually(lambda: eu_link(it).learners == ["far"] and eu_link(it).up_bytes_per_s > 0)
        eventually(lambda: states(it) == {"near": "live", "far": "live"})
        eventually(lambda: eu_link(it).HasField("budget_s"))
        eventually(lambda: all(links(it)[name].round_trip_s > 0 for name in ("near", "eu")))
        before = links(it)
        eu.kill()
        eventually(lambda: eu_link(it).state == "silent" and states(it)["far"] == "cut_off")
        after, status = eu_link(it), it.status()
        eventually(lambda: any(text.startswith("front eu is cut off") for text in events(it)))  # recorded each second
        eu.start()
        eventually(lambda: eu_link(it).state == "connected" and states(it)["far"] == "live")
        assert eu_link(it).learners == ["far"]
        assert "eu-2" not in links(it), "the new process must take the place of the dead front"
        eventually(lambda: any(text.startswith("front eu is connected again after") for text in events(it)))
        told = events(it)
        eu.stop()
        eventually(lambda: "eu" not in links(it))
    assert before["eu"].front
    assert before["eu"].region == "eu"
    assert 0 < before["eu"].round_trip_s < 1
    assert 0 < before["eu"].byte_s < 10
    assert before["near"].state == "connected"
    assert not before["near"].front
    assert before["near"].round_trip_s > 0
    assert after.up_bytes_per_s == after.down_bytes_per_s == 0.0
    assert after.trouble.startswith("front eu cut off for")
    assert "1 learner behind it can keep training" in after.trouble
    assert {each.learner: each.state for each in status.learners}["near"] == "live"
    assert "front eu is cut off; learners behind it: 1" in told
    assert not [text for text in told if text.startswith("has reported no step")], "its learner may be training"


def test_a_cut_link_is_named_until_it_is_back(tmp_path):
    with core(tmp_path / "home") as it:
        relay = Relay(it.address)
        with front(tmp_path / "eu", relay.address, "--region", "eu") as eu, training(near=it.address, far=eu.address):
            eventually(lambda: states(it) == {"near": "live", "far": "live"})
            eventually(lambda: eu_link(it).learners == ["far"] and eu_link(it).budget_s > 0)
            relay.stall()
            eventually(lambda: eu_link(it).state == "silent")
            cut = eu_link(it)
            eventually(lambda: eu_link(it).state == "connected", timeout_s=40)
            eventually(lambda: states(it)["far"] == "live", timeout_s=40)
            back = eu_link(it)
    assert cut.budget_s == 0.0, "the core has merged more than four outer steps"
    assert cut.trouble.endswith("their oldest work no longer counts")
    assert not back.trouble
    assert back.budget_s > 0


def test_a_front_announces_itself_to_a_restarted_core(tmp_path):
    with core(tmp_path / "home") as it, front(tmp_path / "eu", it.address, "--region", "eu") as eu:
        eventually(lambda: "eu" in links(it))
        it.kill()
        eventually(lambda: eu.metrics().total("atoll_front_core_up") == 0)
        it.start()
        eventually(lambda: eu_link(it).state == "connected")
        eventually(lambda: eu.metrics().total("atoll_front_core_up") == 1)
