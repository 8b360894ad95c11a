"""An outage of the core: events, gaps and rates, with a core that this test plays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc.aio
from atoll_dashboard.feed.history_file import HistoryFile
from atoll_dashboard.feed.run_feed import RunFeed
from atoll_dashboard.feed.run_rates import MIN_LONG_S
from atoll_wire import outer_pb2 as pb

BEGAN = 1_795_737_600.0  # 00:00:00 UTC
OUTAGE_S = 73


class PlayedCore:
    """A core with one learner, which trains on 100 tokens per second and sends 1 kB per second."""

    address = "core:7070"

    def __init__(self) -> None:
        self.now = BEGAN
        self.error: Exception | None = None
        self.reported_at = BEGAN
        self.state = "live"
        self.uptime_s = 100.0
        self.epoch, self.generation = 1, 1

    async def tls_fault(self, _error: grpc.aio.AioRpcError) -> str:
        return ""

    async def status(self) -> pb.StatusReply:
        if self.error is not None:
            raise self.error
        reply = pb.StatusReply(
            run="r", generation=self.generation, epoch=self.epoch, at=self.now, uptime_s=self.uptime_s
        )
        steps = int(self.reported_at - BEGAN)
        reply.learners.add(
            learner="a", region="eu", state=self.state, tokens=100 * steps, loss=2.5, wire=pb.WireBytes(up=1000 * steps)
        )
        return reply

    async def rounds(self, _last: int, *, brief: bool) -> list[pb.Round]:
        return []

    async def events(self, log: int, after: int) -> pb.ListEventsReply:
        found = [] if (log, after) == (7, 1) else [pb.Event(number=1, at=BEGAN, kind="core", text="the core started")]
        return pb.ListEventsReply(log=7, events=found)


def failed(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no route")


def run(feed: RunFeed, core: PlayedCore, seconds: range, *, reports: bool = True) -> None:
    """Polls the core once per second."""
    for second in seconds:
        core.now = BEGAN + second
        core.reported_at = core.now if reports else core.reported_at
        asyncio.run(feed._look())


def away(feed: RunFeed, core: PlayedCore, seconds: range, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
    core.error = failed(code)
    run(feed, core, seconds, reports=False)
    core.error = None


def told(feed: RunFeed) -> list[tuple[str, str]]:
    return [(each.kind, each.text) for each in feed.events]


def test_an_outage_is_a_gap_with_two_events_and_without_a_spike():
    core = PlayedCore()
    feed = RunFeed(core, 0.09)
    run(feed, core, range(61))
    away(feed, core, range(61, 133))
    axis = feed.time_axis(feed.rates.history)
    assert axis["gaps"][0][0] == BEGAN + 60, "a gap that has not ended must reach to now"
    assert axis["gaps"][0][1] == axis["now"]
    assert told(feed) == [("core", "the core started"), ("unreachable", "core unreachable since 00:01:00 UTC")]
    run(feed, core, range(133, 135), reports=False)  # the learner reports 2 s after the core is back
    run(feed, core, range(135, 160))
    assert told(feed)[2:] == [("reachable", f"core reachable again after {OUTAGE_S} s")]
    assert feed.time_axis(feed.rates.history)["gaps"] == [(BEGAN + 60, BEGAN + 133)]
    tokens = [value for value in feed.rates.history.column("tokens") if value]
    assert max(tokens) <= 100.0 + 1e-9
    assert feed.run().tokens_per_s == 100.0


def test_a_gap_lasts_until_the_learners_report_to_a_restarted_core():
    core = PlayedCore()
    feed = RunFeed(core, 0.09)
    run(feed, core, range(31))
    away(feed, core, range(31, 40))
    core.state, core.uptime_s = "joining", 2.0
    run(feed, core, range(40, 43), reports=False)
    assert feed.time_axis(feed.rates.history)["gaps"][-1][0] == BEGAN + 30
    core.state = "live"
    run(feed, core, range(43, 50))
    assert feed.rates.history.gaps == [(BEGAN + 30, BEGAN + 43)]
    assert 0.0 not in feed.rates.history.column("tokens")[2:]
    away(feed, core, range(50, 60))
    core.state, core.uptime_s = "silent", 11.0
    run(feed, core, range(60, 61))
    assert feed.rates.history.gaps[-1] == (BEGAN + 49, BEGAN + 60), "a learner that died must not hide the run"


def rates_of(feed: RunFeed) -> set[float | None]:
    """Returns the rates that the header, the region and the learner show."""
    run, (region,), (learner,) = feed.run(), feed.regions(), feed.learners(None, "", "")
    tokens = {run.tokens_per_s, region.tokens_per_s, learner.tokens_per_s}
    return tokens | {run.wire.up_bytes_per_s, region.up_bytes_per_s}


def test_rates_are_unknown_after_the_start_of_the_dashboard_and_after_a_restore():
    core = PlayedCore()
    feed = RunFeed(core, 0.09)
    for second in range(300):
        if second == 150:
            core.generation, core.epoch, core.uptime_s = 2, 2, 0.0
        run(feed, core, range(second, second + 1))
        assert rates_of(feed) == ({None} if second % 150 < 10 else {100.0, 1000.0}), second
    assert set(feed.rates.history.column("tokens")) == {None, 100.0}


def test_rates_are_unknown_until_the_learners_report_to_a_restarted_core():
    core = PlayedCore()
    feed = RunFeed(core, 0.09)
    run(feed, core, range(100))
    away(feed, core, range(100, 100 + OUTAGE_S))
    core.epoch = 2
    for second in range(173, 260):
        core.uptime_s = second - 172.0
        core.state = "joining" if second < 176 else "live"
        run(feed, core, range(second, second + 1), reports=second >= 178)
        now = feed.run()
        assert now.tokens_per_s == feed.regions()[0].tokens_per_s == (None if second < 176 else 100.0), second
        assert now.wire.up_bytes_per_s == feed.regions()[0].up_bytes_per_s
        assert now.wire.up_bytes_per_s is None if second < 183 else now.wire.up_bytes_per_s > 500.0, second
    assert now.wire.up_bytes_per_s == 1000.0


def test_a_refused_call_is_not_called_an_unreachable_core():
    core = PlayedCore()
    feed = RunFeed(core, 0.09)
    run(feed, core, range(3))
    away(feed, core, range(3, 5), grpc.StatusCode.PERMISSION_DENIED)
    assert told(feed)[-1] == ("unreachable", "no data from the core since 00:00:02 UTC")


def test_histories_and_events_survive_a_restart_of_the_dashboard(tmp_path):
    core = PlayedCore()
    feed = RunFeed(core, 0.09, HistoryFile(tmp_path / "history"))
    feed.open_file()
    run(feed, core, range(30))
    feed.close_file()
    before = feed.rates.history.column("tokens")
    feed = RunFeed(core, 0.09, HistoryFile(tmp_path / "history"))
    feed.open_file()
    assert feed.rates.history.column("tokens") == before
    run(feed, core, range(90, 120))
    assert feed.rates.history.column("tokens")[:30] == before
    assert set(feed.rates.history.column("tokens")[30:]) == {None, 100.0}, "an unknown rate is not 0"
    assert feed.rates.history.gaps == [(BEGAN + 29, BEGAN + 90)]
    assert told(feed) == [
        ("core", "the core started"),
        ("unreachable", "no data since 00:00:29 UTC: the dashboard was not running"),
    ]
    assert [each.number for each in feed.events] == [1, 2]
    assert feed.now_json()
    feed.close_file()


def test_costs_are_projected_only_from_ten_minutes_of_data():
    core = PlayedCore()
    feed = RunFeed(core, 0.09)
    run(feed, core, range(0, 600, 5))
    cost = feed.run().cost
    assert (cost.per_day, cost.gb_per_month) == (None, None)
    assert cost.known_in_s == MIN_LONG_S - 595
    run(feed, core, range(600, 601))
    cost = feed.run().cost
    assert cost.known_in_s == 0.0
    assert cost.gb_per_month == 1000 * 30 * 86400 / 1e9


def test_the_feed_without_a_core_has_an_axis():
    feed = RunFeed(SimpleNamespace(), 0.09)
    assert feed.time_axis(feed.rates.history)["gaps"] == []
