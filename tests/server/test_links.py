"""Links: fronts and learners' own links, their states and rates, and the time until work is discarded."""

from __future__ import annotations

import pytest
from atoll_server.access.refusals import Refused, Status
from atoll_server.links.link import RATE_S, SILENT_S, Link, MergePace, Traffic
from atoll_server.links.links import FORGET_S, MAX_FRONTS, RETURN_S, Front, LearnerTraffic, Links, duration
from atoll_server.telemetry import entries
from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import LinkState


def report(nonce: int = 1, region: str = "eu", **of: float) -> pb.FrontReport:
    return pb.FrontReport(nonce=nonce, region=region, **of)


def learner(name: str, heard_at: float | None = 0.0, up: int = 0, down: int = 0) -> LearnerTraffic:
    return LearnerTraffic(name, "eu", heard_at, up, down)


class World:
    """The links of a run. Its fronts report once per second. Learners a and b are behind front 1; c has its own link.

    outer_steps: of the run, which grow with each second.
    """

    def __init__(self) -> None:
        self.links = Links()
        self.now = self.outer_steps = 0.0
        self.recorded: list[entries.Entry] = []
        self.front = self.announce(1)
        for name in "ab":
            self.links.follows(name, 1)

    def announce(self, nonce: int, owner: str = "", host: str = "ipv4:10.0.0.1", region: str = "eu") -> Front:
        first = report(nonce, region)
        front = self.links.announced(first, owner, host, self.now)
        self.links.heard(front, first, self.now)
        return front

    def run(self, seconds: int, *silent: str, learners: str = "abc", rate: int = 1000) -> None:
        """silent: "front", and the learners with an own link that sends nothing."""
        for _ in range(seconds):
            self.now, self.outer_steps = self.now + 1.0, self.outer_steps + 0.1
            if "front" not in silent:
                carried = self.front.traffic.up + rate
                self.links.heard(self.front, report(bytes_up=carried, round_trip_s=0.08), self.now)
            present = [learner(name, self.heard(name, silent)) for name in learners]
            self.recorded += self.links.look(present, self.outer_steps, self.now)

    def heard(self, name: str, silent: tuple[str, ...]) -> float:
        link = self.links.own.get(name)
        return link.heard_at or 0.0 if name in silent and link is not None else self.now

    def pace(self, *live: str, outer_step_s: float | None = 10.0) -> MergePace:
        return MergePace(self.outer_steps, outer_step_s, 4, frozenset(live))


def test_learners_are_behind_their_front_and_others_have_their_own_link():
    world = World()
    world.run(3)
    front, own = world.links.all
    assert (front.name, front.region, front.front, front.learners) == ("eu", "eu", True, ("a", "b"))
    assert (own.name, own.front, own.learners) == ("c", False, ("c",))
    assert front.round_trip_s == 0.08
    world.links.measured("c", 0.03)
    world.links.follows("a", 0)
    world.run(1)
    assert front.learners == ("b",)
    assert [link.name for link in world.links.all] == ["eu", "a", "c"]
    assert world.links.own["c"].round_trip_s == 0.03


def test_a_link_is_unknown_until_its_first_message_and_silent_some_seconds_after_the_last():
    links = Links()
    links.look([learner("c", None)], 0.0, 100.0)
    (link,) = links.all
    assert link.state(100.0) is LinkState.UNKNOWN
    links.look([learner("c", 101.0)], 0.0, 101.0)
    assert link.state(101.0 + SILENT_S) is LinkState.CONNECTED
    assert link.state(101.5 + SILENT_S) is LinkState.SILENT


def test_rates_are_of_the_last_seconds_and_zero_while_nothing_flows():
    world = World()
    world.run(30)
    assert world.front.rates(world.now) == (1000.0, 0.0)
    assert world.front.traffic.moved_at == world.now
    moved_at = world.now
    world.run(int(RATE_S) + 1, rate=0)
    assert world.front.rates(world.now) == (0.0, 0.0), "a connected link without traffic has no rate"
    assert world.front.traffic.moved_at == moved_at
    world.run(10)
    world.run(int(SILENT_S) + 1, "front")
    assert world.front.rates(world.now) == (0.0, 0.0), "a silent link must not keep its last rate"


def test_a_process_that_begins_its_counts_again_has_no_negative_rate():
    traffic = Traffic()
    for second in range(20):
        traffic.saw(1_000_000 * second, 0, float(second))
    traffic.saw(10, 0, 20.0)
    assert traffic.rates(21.0) == (0.0, 0.0)


def test_the_time_until_work_is_discarded_counts_down_while_a_link_is_silent():
    world = World()
    world.run(10)
    assert world.front.budget_s(world.pace("a", "b", "c"), world.now) == pytest.approx(30.0), (
        "one of four steps is for the arrival"
    )
    world.run(20, "front")
    assert world.front.budget_s(world.pace("c"), world.now) == pytest.approx(10.0)
    assert world.front.budget_s(world.pace("c", outer_step_s=100.0), world.now) == pytest.approx(100.0), (
        "at the current pace"
    )
    world.run(20, "front")
    assert world.front.budget_s(world.pace("c"), world.now) == 0.0
    world.run(1)
    assert world.front.budget_s(world.pace("a", "b", "c"), world.now) == pytest.approx(30.0), "the link is back"


def test_a_connected_link_has_its_whole_budget_however_short_outer_steps_are():
    world = World()
    world.run(10)
    soon = MergePace(world.outer_steps + 50.0, 0.01, 4, frozenset("abc"))
    assert world.front.budget_s(soon, world.now) == pytest.approx(0.03)


def test_nothing_is_discarded_while_nothing_is_merged_without_the_learners_behind_a_link():
    world = World()
    world.run(10)
    assert world.front.budget_s(world.pace("a", "b"), world.now) is None, "no other learner is live"
    assert world.front.budget_s(world.pace("a", outer_step_s=None), world.now) is None, "nothing is merged"
    assert world.front.budget_s(world.pace("a", "b", "c"), world.now) is not None


def test_a_run_that_allows_no_staleness_has_no_budget():
    link = Link("c", "eu", front=False, learners=("c",))
    assert link.budget_s(MergePace(7.0, 10.0, 0, frozenset({"d"})), 0.0) == 0.0


def test_a_silent_front_with_learners_is_a_trouble_that_says_how_long_it_may_last():
    world = World()
    world.run(10)
    assert world.front.trouble(world.pace("a", "b", "c"), world.now) == ""
    world.run(20, "front")
    text = world.front.trouble(world.pace("c"), world.now)
    assert text == (
        "front eu cut off for 20 s; 2 learners behind it can keep training; "
        "their work counts if the link is back within 10 s"
    )
    assert "no work is lost" in world.front.trouble(world.pace(), world.now)
    world.run(20, "front")
    assert "no longer counts" in world.front.trouble(world.pace("c"), world.now)
    world.run(1, "front", learners="c")
    assert world.front.trouble(world.pace("c"), world.now) == "", "no learner is affected"


def test_changes_of_a_front_are_recorded_once():
    world = World()
    world.run(10)
    world.run(20, "front")
    world.run(5)
    assert world.recorded == [
        entries.FrontConnected("eu", "eu", 0.0),
        entries.FrontSilenced("eu", 2),
        entries.FrontConnected("eu", "eu", 21.0),
    ]


def test_a_learner_behind_a_silent_front_is_cut_off_until_it_had_time_to_reconnect():
    world = World()
    world.run(10)
    heard_at = world.now
    assert not world.links.cut_off("a", heard_at, world.now), "it reports, so its training loop is stuck"
    world.run(2, "front")
    assert world.links.cut_off("a", heard_at, world.now), "its front fell silent with it"
    assert not world.links.cut_off("a", heard_at - 3.0, world.now), "its front was heard for longer than the learner"
    assert not world.links.cut_off("c", heard_at, world.now), "it is not behind the front"
    world.run(2, "front")
    world.run(6, "front")
    world.run(1)
    assert world.links.cut_off("a", heard_at, world.now), "it needs some seconds to reconnect"
    assert not world.links.cut_off("a", world.now, world.now), "it has reconnected"
    world.run(int(RETURN_S))
    assert not world.links.cut_off("a", heard_at, world.now), "it does not come back with its front"


def test_a_process_that_starts_where_a_front_fell_silent_takes_its_place():
    world = World()
    world.run(10)
    world.run(10, "front")
    assert world.announce(2) is world.front
    world.links.follows("a", 2)
    world.run(1)
    assert world.front.learners == ("a", "b"), "b has not reconnected yet"
    assert world.announce(3).name == "eu-2", "the first front is connected"
    assert world.announce(4, host="ipv4:10.0.0.9").name == "eu-3"
    assert world.announce(5, owner="other").name == "eu-4", "another certificate"
    assert world.announce(6, region="", owner="cert").name == "cert"
    assert world.announce(7, region="").name == "front"


def test_a_front_that_leaves_is_forgotten_and_so_is_a_silent_front_without_learners():
    world = World()
    world.run(10)
    other = world.announce(2, host="ipv4:10.0.0.9")
    world.links.heard(other, report(2, leaving=True), world.now)
    assert list(world.links.fronts) == ["eu"]
    world.run(int(FORGET_S) + 1, "front")
    assert list(world.links.fronts) == ["eu"], "learners are behind it"
    world.run(1, "front", learners="c")
    assert not world.links.fronts
    assert world.links.front_of("a") is None


@pytest.mark.parametrize("wrong", [report(0), report(1, "x" * 65), report(1, "a\nb")])
def test_malformed_reports_are_refused(wrong):
    with pytest.raises(Refused) as refused:
        Links().announced(wrong, "", "", 0.0)
    assert refused.value.status is Status.INVALID_ARGUMENT


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
def test_an_impossible_round_trip_is_unknown(seconds):
    world = World()
    world.links.heard(world.front, report(round_trip_s=seconds), 1.0)
    assert world.front.round_trip_s == 0.0


def test_the_number_of_fronts_is_limited_and_unused_silent_fronts_make_room():
    links = Links()

    def announce(number: int, now: float) -> None:
        first = report(number, f"region {number}")
        links.heard(links.announced(first, "", "", now), first, now)

    for number in range(1, MAX_FRONTS + 1):
        announce(number, float(number) / MAX_FRONTS)
    with pytest.raises(Refused) as refused:
        announce(MAX_FRONTS + 1, 2.0)
    assert refused.value.status is Status.RESOURCE_EXHAUSTED
    announce(MAX_FRONTS + 1, 20.0)
    assert len(links.fronts) == MAX_FRONTS
    assert "region 1" not in links.fronts


@pytest.mark.parametrize(("seconds", "text"), [(38.2, "38 s"), (372, "6.2 min"), (7201, "2.0 h"), (36000, "10.0 h")])
def test_durations_have_one_unit(seconds, text):
    assert duration(seconds) == text
