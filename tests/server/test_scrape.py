"""A thousand learners on one scrape: quick, bounded, and beside the loop that owns the state."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from atoll_server.core import Core
from atoll_server.gauges import read
from atoll_server.metrics import READ
from atoll_server.settings import CoreSettings
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

LEARNERS = 1000
REGIONS = 8


async def core_with_learners(directory) -> Core:
    core = Core(CoreSettings(listen=("127.0.0.1:0",), directory=directory), {})
    await core.start()
    for number in range(LEARNERS):
        name = f"learner-{number}"
        entry = core.roster.join(
            name, f"region-{number % REGIONS}", number, 0, 1.0, b"", b"token", core.clock.now(), 0.0
        )
        entry.loss = 2.5
        entry.account.current.steps = number
    return core


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
    assert reading_s < 0.05, "once a second, of the loop's time"
    samples = [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]
    of_one = [sample.name for sample in samples if sample.labels.get("learner") == "learner-7"]
    assert len(of_one) == 8, of_one
    assert not any(name.endswith("_bucket") for name in of_one), "histograms never by learner"
    assert Counter(
        sample.labels["region"] for sample in samples if sample.name == "atoll_learner_info"
    ) == dict.fromkeys((f"region-{number}" for number in range(REGIONS)), LEARNERS // REGIONS)


def test_fixed_names_and_kinds_are_as_promised(tmp_path):
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
    for name, _, _, meaning in READ:
        assert meaning, name


def _timed(work) -> float:
    """Of this thread's processor: others have the machine too."""
    began = time.thread_time()
    work()
    return time.thread_time() - began
