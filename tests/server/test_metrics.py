"""A scrape of a thousand learners is fast and limited, and does not block the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from atoll_server.front.metrics import MAX_NAMES, FrontMetrics
from atoll_server.operators.gauges import reading
from atoll_server.processes.core import Core
from atoll_server.run.troubles import troubles
from atoll_server.settings import CoreSettings
from atoll_server.telemetry.metrics import SAMPLED, Metrics
from atoll_wire.layout.frame_spans import Codec
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

LEARNERS = 1000
REGIONS = 8


async def core_with_learners(directory) -> Core:
    core = Core(CoreSettings(listen=("127.0.0.1:0",), directory=directory), {})
    await core.start()
    for number in range(LEARNERS):
        name = f"learner-{number}"
        entry = core.run.registry.join(
            name, f"region-{number % REGIONS}", 1 + number, 0, 1.0, b"", b"token", core.run.clock.wall(), 0.0
        )
        entry.account.loss = 2.5
        entry.account.current.steps = number
    return core


def read(core: Core) -> None:
    """Reads the run, as the core does once per second."""
    now = core.clock.monotonic()
    states = core.watch.look(troubles(core.run, "", now), now)
    core.metrics.read = reading(core.run, core.settings, core.facts(), states, 0, now)


def test_a_scrape_of_a_thousand_learners_takes_less_than_a_tenth_of_a_second(tmp_path):
    async def measured() -> tuple[float, float, bytes]:
        core = await core_with_learners(tmp_path)
        reading_s = min(_timed(lambda: read(core)) for _ in range(5))
        scrape_s = min(_timed(lambda: generate_latest(core.metrics.registry)) for _ in range(5))
        text = generate_latest(core.metrics.registry)
        await core.stop()
        return reading_s, scrape_s, text

    reading_s, scrape_s, text = asyncio.run(measured())
    print(f"the loop reads in {1e3 * reading_s:.1f} ms, a scrape takes {1e3 * scrape_s:.1f} ms, {len(text):,} bytes")
    assert scrape_s < 0.1
    assert reading_s < 0.05, "the loop does this once per second"
    samples = [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]
    of_one = [sample.name for sample in samples if sample.labels.get("learner") == "learner-7"]
    assert len(of_one) == 8, of_one
    assert not any(name.endswith("_bucket") for name in of_one), "histograms must have no label learner"
    assert Counter(
        sample.labels["region"] for sample in samples if sample.name == "atoll_learner_info"
    ) == dict.fromkeys((f"region-{number}" for number in range(REGIONS)), LEARNERS // REGIONS)


def test_regions_without_learners_share_one_series_and_no_sum_falls():
    metrics = Metrics()
    for number in range(1000):
        metrics.moved(f"r{number}", "up", Codec.INT4, 1)
        metrics.moved(f"r{number}", "down", Codec.FLOAT32, 2)
        metrics.fold({"r0", f"r{number}"}, REGIONS)
    for name in ("atoll_wan_bytes", "atoll_payload_bytes"):
        text = generate_latest(metrics.registry).decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        totals = [sample for sample in families[name].samples if sample.name.endswith("_total")]
        assert sum(sample.value for sample in totals) == 3000
        assert len({sample.labels["region"] for sample in totals}) <= REGIONS + 1
        assert ("r0", 1) in {(sample.labels["region"], sample.value) for sample in totals}, "r0 must be used"


def test_unknown_names_add_no_series_to_a_fronts_metrics():
    metrics = FrontMetrics("eu")
    for number in range(10 * MAX_NAMES):
        metrics.learner(f"unknown-{number}", "up").inc(1)
    metrics.vouched("honest")
    metrics.learner("honest", "up").inc(7)
    text = generate_latest(metrics.registry).decode()
    assert 'atoll_front_learner_bytes_total{direction="up",learner="honest"} 7.0' in text
    assert f'learner="others"}} {10.0 * MAX_NAMES}' in text
    assert "unknown" not in text


def test_documented_metrics_have_fixed_names_and_kinds(tmp_path):
    async def text() -> str:
        core = await core_with_learners(tmp_path)
        read(core)
        await core.stop()
        return generate_latest(core.metrics.registry).decode()

    families = {family.name: family for family in text_string_to_metric_families(asyncio.run(text()))}
    assert families["atoll_goodput_ratio"].type == "gauge"
    assert families["atoll_learner_inner_steps"].type == "counter"
    steps = {s.labels["learner"]: s.value for s in families["atoll_learner_inner_steps"].samples}
    assert steps["learner-123"] == 123
    assert {s.labels["fate"] for s in families["atoll_contributions"].samples} >= {"accepted", "merged", "refused"}
    for name, _, _, meaning in SAMPLED:
        assert meaning, name


def _timed(work) -> float:
    """Returns the CPU seconds of this thread, which do not depend on other processes."""
    began = time.thread_time()
    work()
    return time.thread_time() - began
