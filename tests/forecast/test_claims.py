"""The paper's tables, each from one set of parameters, and the arithmetic, checked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from atoll_forecast.paper import figures, goodput, hardware
from atoll_forecast.paper.claims import bandwidth_claims, goodput_claims, hardware_claims, scavenging_claims
from atoll_forecast.planning import bandwidth
from atoll_server.settings import RunSettings


def test_table_1_from_one_set_of_parameters():
    ours = goodput.table(figures.CHIPS, (2, 4, 8, 16), goodput.Failures())
    assert sum(map(len, ours.values())) == 30
    assert goodput.rmse(ours, figures.GOODPUT) <= 2.5
    at_most_3 = {"dp": 27, "elastic": 58, "8": 88}  # at 1.2 million chips
    for name, theirs in at_most_3.items():
        assert ours[name][3] == pytest.approx(theirs, abs=3)


@pytest.mark.parametrize(
    "name",
    [
        "goodput",
        "bandwidth",
        pytest.param("scavenging", marks=pytest.mark.ci),
        pytest.param("hardware", marks=pytest.mark.ci),
    ],
)
def test_records_equal_the_commands_output(name):
    """Otherwise, docs/benchmarks/paper.md would state figures that the commands no longer print."""
    if name == "goodput":
        recorded, said = _record(name)["goodput"], goodput_claims(goodput.Failures(), hours=30.0)
        assert {n: pytest.approx(row, rel=1e-6) for n, row in recorded.items()} == said
        return
    (recorded,) = _record(name).values()
    claims = {"bandwidth": bandwidth_claims, "scavenging": scavenging_claims, "hardware": hardware_claims}[name]()
    assert [(c["name"], pytest.approx(c["ours"], rel=1e-6)) for c in recorded] == [(c.name, c.ours) for c in claims]


def _record(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parents[2] / f"records/forecast/{name}.json").read_text())


def test_failures_by_hand():
    """Without elasticity, each failure outside a pause begins one, so goodput is mean / (mean + pause)."""
    found = goodput.simulate(600_000, 1, goodput.Failures(), elastic=False, hours=400)
    between_s = goodput.YEAR_S / 600_000
    assert found.goodput == pytest.approx(between_s / (between_s + 76), rel=0.03)
    assert found.uptime == pytest.approx(found.goodput)


def test_without_failures_goodput_is_one():
    found = goodput.simulate(1000, 2, goodput.Failures(per_chip_year=1e-9))
    assert (found.goodput, found.uptime) == (1.0, 1.0)


def test_one_learner_in_many_nearly_always_trains():
    assert goodput.simulate(2_400_000, 4, goodput.Failures()).uptime > 0.994


def test_two_point_four_million_chips_take_seconds():
    import time

    began = time.process_time()
    goodput.simulate(2_400_000, 8, goodput.Failures())
    assert time.process_time() - began < 5


def test_bandwidth_is_within_4_percent_of_the_papers_and_atolls_is_less():
    claims = bandwidth_claims()
    for claim in claims:
        if claim.theirs is not None:
            assert claim.ours == pytest.approx(claim.theirs, rel=0.04)
    theirs = {claim.name: claim.ours for claim in claims}
    assert theirs["Atoll, int4, a fragment in two steps"] < 0.43
    assert theirs["Atoll, int4, a fragment per step"] < 0.84


@pytest.mark.parametrize(("sites", "utilisation"), [(2, 0.9), (8, 0.95), (4, 0.5)])
def test_a_step_over_the_computed_link_has_the_given_utilisation(sites, utilisation):
    model = bandwidth.Model()
    rate = bandwidth.data_parallel_bits_s(model, sites, utilisation)
    step_s = bandwidth.data_parallel_step_s(model, rate, sites)
    assert model.step_s / step_s == pytest.approx(utilisation, rel=0.01)


def test_extra_compute_is_all_used():
    for claim in scavenging_claims(steps=200):
        assert claim.ours == pytest.approx(claim.theirs, abs=0.05)


def test_only_waiting_for_a_slow_learner_costs_pace():
    waited, bare, graceful = hardware_claims(steps=600)
    assert waited.ours == pytest.approx(waited.theirs, abs=1.5)
    assert bare.ours > 95, "late work must be merged when it arrives"
    assert graceful.ours == pytest.approx(100, abs=4)


def test_lockstep_by_hand():
    assert hardware.lockstep([1.0, 0.5], jitter=0, overlap=0, steps=100) == pytest.approx(0.75)
    assert hardware.lockstep([1.0, 1.0], jitter=0, overlap=2, steps=100) == 1.0


def test_the_grace_window_includes_slow_learners():
    speeds = [1.0] * 7 + [0.82]
    settings = RunSettings().changed(quorum={"learners": 1})
    graceful = hardware.mixed(speeds, settings, jitter=0.1, steps=200)
    bare = hardware.mixed(speeds, settings.changed(grace_ratio=0), jitter=0.1, steps=200)
    assert graceful.shares > bare.shares + 1
    assert 1.0 >= graceful.goodput > bare.goodput
