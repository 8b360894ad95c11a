"""Regions with their fronts and links, as the dashboard's API reports them."""

from __future__ import annotations

from typing import Any

import pytest
from atoll_dashboard.feed.run_feed import LINKS, CoreAnswers, RunFeed
from atoll_dashboard.models import conversion
from atoll_wire import outer_pb2 as pb

SILENT = pb.LinkStatus(
    name="ap", region="ap", front=True, state="silent", heard_s=38.0, round_trip_s=0.08, byte_s=40.0,
    learners=["p", "q"], budget_s=372.0, trouble="front ap cut off for 38 s",
)  # fmt: skip
OTHER = pb.LinkStatus(name="ap-2", region="ap", front=True, state="connected", up_bytes_per_s=5.0)
OWN = pb.LinkStatus(name="c", region="us", state="connected", heard_s=0.5)


def feed(*links: pb.LinkStatus) -> RunFeed:
    """Returns the feed of a run whose learners p and c have sent bytes for a minute."""
    core: Any = None
    found = RunFeed(core, 0.09)
    for second in range(60):
        learners = [
            pb.LearnerStatus(learner=name, region=region, state="live", wire=pb.WireBytes(up=24_000 * second))
            for name, region in (("p", "ap"), ("c", "us"))
        ]
        status = pb.StatusReply(run="r", at=1000.0 + second, learners=learners, links=links)
        found.rates.take(status)
        found.seen = CoreAnswers(status, [], 0.0, conversion.links_by_region(status.links))
    return found


def test_a_link_is_reported_as_the_core_reports_it():
    assert conversion.link(SILENT).model_dump() == {
        "name": "ap", "front": True, "state": "silent", "heard_age_s": 38.0, "round_trip_s": 0.08, "byte_age_s": 40.0,
        "up_bytes_per_s": 0.0, "down_bytes_per_s": 0.0, "learners": 2,
        "learner_names": ["p", "q"], "budget_s": 372.0, "trouble": "front ap cut off for 38 s",
    }  # fmt: skip
    assert conversion.link(OTHER).budget_s is None, "no limit"
    many = conversion.link(pb.LinkStatus(learners=[f"l{number:02}" for number in reversed(range(90))]))
    assert (many.learners, many.learner_names) == (90, [f"l{number:02}" for number in range(16)])
    assert conversion.link(pb.LinkStatus(state="a newer state")).state == "unknown"


def test_a_region_whose_links_are_all_silent_has_no_rate():
    found = feed(SILENT, OWN)
    regions = {each.region: each for each in found.regions()}
    assert regions["ap"].up_bytes_per_s == 0.0, "the rate of the last minute must not stay"
    assert regions["us"].up_bytes_per_s == pytest.approx(24_000)
    assert found.run().wire.up_bytes_per_s == pytest.approx(24_000)
    regions = {each.region: each for each in feed(SILENT, OTHER, OWN).regions()}
    assert regions["ap"].up_bytes_per_s == pytest.approx(24_000)


def test_a_region_shows_fronts_first_then_links_that_are_not_connected():
    own = [pb.LinkStatus(name=f"l{number:02}", region="ap", state="connected") for number in range(20)]
    own[7].state = "silent"
    (region,) = [each for each in feed(*own, OTHER, SILENT).regions() if each.region == "ap"]
    assert [link.name for link in region.links[:4]] == ["ap", "ap-2", "l07", "l00"]
    assert len(region.links) == LINKS


def test_a_front_without_learners_has_a_region():
    alone = pb.LinkStatus(name="eu", region="eu", front=True, state="connected")
    assert [each.region for each in feed(alone).regions()] == ["ap", "eu", "us"]
