"""Plans: the load of links, the overlap that hides transfers, and files for the chart and Compose."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from atoll_forecast.commands import _region
from atoll_forecast.planning.deployment import compose_override, helm_values
from atoll_forecast.planning.job import Job, Region
from atoll_forecast.planning.planner import LEARNER_BYTES, LINK_SHARE, SHARD_BYTES, plan, trip_steps
from atoll_forecast.planning.shards import WAITING_BYTES, Sharding, backup_bytes, disk_bytes, sharding
from atoll_forecast.planning.tables import plan_json, plan_tables
from atoll_server.links.links import duration
from atoll_server.memory_budget import needed_bytes
from atoll_wire.errors import UsageError
from rich.console import Console

ROOT = Path(__file__).parents[2]
KINDS, PLACES = ("front", "learner"), ("eu", "us", "ap")
WIDE = Region("eu", 1, 1e9, 0.03, 0.1)


def atoll(*arguments: object) -> tuple[int, str, str]:
    command = [Path(sys.executable).with_name("atoll"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def files(directory: Path) -> list[Path]:
    return [directory / name for name in ("values.yaml", "compose.yaml", "plan.json")]


def test_a_wide_link_leaves_the_defaults():
    made = plan(Job(25e6, 1.0, (WIDE, Region("us", 1, 1e9, 0.1))))
    assert (made.settings.inner_steps, made.settings.fragments, made.settings.overlap_steps) == (24, 24, 4.0)
    assert made.staleness == 0
    assert made.contributions == 1
    assert made.atoll.utilisation > 0.99
    assert not made.warnings


def test_rates_and_money_by_hand():
    made = plan(Job(1e9, 2.0, (Region("eu", 3, 1e9, 0.03, 0.1),)))
    (carried,) = made.carried
    assert carried.down_bits_s == pytest.approx(3.15 * 1e9 / 48, rel=1e-3)
    assert carried.up_bits_s == pytest.approx(3 * carried.down_bits_s, rel=1e-3)
    assert carried.month_gb == pytest.approx(4 * carried.down_bits_s / 8e9 * 30 * 86_400, rel=1e-3)
    assert made.atoll.month_price == pytest.approx(0.1 * carried.month_gb)
    steps = 30 * 86_400 / 2.0 * made.atoll.utilisation
    assert made.atoll.thousand_steps == pytest.approx(1000 / steps)


def test_an_unknown_price_is_not_zero(tmp_path):
    made = plan(Job(1e9, 2.0, (WIDE, Region("us", 1, 1e9, 0.1))))
    assert [each.region.costs(1000.0) for each in made.carried] == [100.0, None]
    assert made.atoll.month_price is None
    assert "pricePerGb" not in helm_values(Job(1e9, 2.0, ()), made)
    out = tmp_path / "plan.json"
    atoll("plan", "--parameters", "1e9", "--step-s", "2", "--region", "us:1:1000:30", "--json", out)
    found = json.loads(out.read_text())
    assert found["links"][0]["month_price"] is None
    assert found["methods"][0]["month_price"] is None


@pytest.mark.ci
def test_the_cores_link_carries_the_traffic_of_all_regions():
    regions = tuple(Region(f"r{number}", 8, 1e10, 0.06) for number in range(10))
    free = plan(Job(7e9, 2.0, regions))
    assert free.core.up_bits_s == pytest.approx(10 * free.carried[0].up_bits_s)
    assert free.core.down_bits_s == pytest.approx(10 * free.carried[0].down_bits_s)
    held = plan(Job(7e9, 2.0, regions, core_bits_s=5e9))
    assert held.works
    assert held.settings.inner_steps > 2 * free.settings.inner_steps
    assert held.core.share <= LINK_SHARE
    slow = plan(Job(7e9, 2.0, regions, core_bits_s=1e8))
    assert not slow.works
    assert any("the core needs " in warning for warning in slow.warnings)


@pytest.mark.parametrize("mbit", [20, 60, 400])
def test_a_narrow_link_gets_more_inner_steps_until_it_suffices(mbit):
    made = plan(Job(124e6, 1.0, (Region("far", 2, mbit * 1e6, 0.1),)))
    assert made.works
    assert made.carried[0].share <= LINK_SHARE
    smaller = made.settings.inner_steps - 1
    if smaller >= 24:
        up = 2 * 3.15 * 124e6 / smaller
        assert up / (mbit * 1e6) > LINK_SHARE


def test_a_long_round_trip_gets_more_overlap():
    near, far = (plan(Job(25e6, 0.1, (Region("r", 1, 1e9, trip),))) for trip in (0.01, 0.4))
    assert near.works
    assert far.works
    assert far.settings.overlap_steps > near.settings.overlap_steps
    assert far.settings.overlap_steps > trip_steps(Job(25e6, 0.1, ()), Region("r", 1, 1e9, 0.4), 24)


@pytest.mark.parametrize("trip_s", [0.16, 0.25, 0.3, 1.0])
def test_a_round_trip_of_many_steps_gets_more_inner_steps(trip_s):
    """Otherwise, a fragment's rounds would overlap, and learners would answer only every second round."""
    regions = (Region("near", 1, 1e9, 0.01), Region("far", 1, 1e9, trip_s))
    made = plan(Job(1.05e6, 0.012, regions))
    assert made.works
    assert made.settings.inner_steps >= made.settings.overlap_steps > trip_s / 0.012
    assert made.contributions > 0.95
    assert not any("merge" in warning for warning in made.warnings)


@pytest.mark.ci
@pytest.mark.parametrize("fragments", [200, 256])
def test_many_fragments_get_as_many_inner_steps_as_learners_need_to_answer(fragments):
    made = plan(Job(1e9, 2.0, (Region("a", 2, 1e9, 0.06), Region("b", 2, 1e9, 0.06))), fragments)
    assert made.works
    assert made.contributions > 0.95
    assert "fragments" in made.why


def test_more_inner_steps_than_were_measured_give_a_warning():
    made = plan(Job(1e9, 2.0, (Region("a", 4, 5e7, 0.06),)))
    assert any(f"H = {made.settings.inner_steps}: " in warning for warning in made.warnings)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (Job(1e9, 1.0, (WIDE,), between_failures_s=10.0), "goodput is"),
        (Job(1e13, 1e5, (WIDE,)), "each of 24 shards needs 4,812 GiB, but --shard-memory is 512 GiB"),
    ],
)
def test_impossible_jobs_are_refused(job, said):
    made = plan(job)
    assert not made.works
    assert any(said in warning for warning in made.warnings)


def test_a_model_too_large_for_one_core_gets_as_few_shards_as_hold_it(tmp_path):
    job = Job(70e9, 60.0, (WIDE, Region("us", 1, 1e9, 0.1)))
    for limit_gib, shards, share in ((1024, 1, 1.0), (512, 2, 0.5), (256, 4, 0.25), (128, 8, 0.125)):
        made = plan(job, shard_bytes=limit_gib * 2**30)
        assert made.works
        assert (made.sharding.shards, made.sharding.share) == (shards, share)
        assert made.sharding.memory_bytes == needed_bytes(share * 70e9) <= limit_gib * 2**30
        fewer = -(-24 // max(1, shards - 1)) / 24  # the largest shard's share, with one shard fewer
        assert shards == 1 or needed_bytes(fewer * 70e9) > limit_gib * 2**30
    values, _, out = files(tmp_path)
    words = ["--parameters", "70B", "--step-s", "60", "--shard-memory", "256GiB", "--values", values, "--json", out]
    code, said, error = atoll("plan", *words)
    assert (code, error) == (0, "")
    assert "25% of the parameters in the largest" in said
    core = yaml.safe_load(values.read_text())["core"]
    assert core["shards"] == json.loads(out.read_text())["settings"]["shards"] == 4
    assert int(core["resources"]["limits"]["memory"].removesuffix("Gi")) > needed_bytes(70e9 / 4) / 2**30


def test_shards_of_uneven_numbers_of_fragments_are_planned_by_the_largest():
    assert sharding(1e12, 24, 1 << 50, 0.0).shards == 1
    disk, backups = 60.0 * 5e9 + 4.0 * 24e9, 144.0 * 5e9 + 4.0 * 24e9
    assert sharding(24e9, 24, needed_bytes(5e9), 0.0) == Sharding(5, 5 / 24, needed_bytes(5e9), disk, backups)


def test_a_hopeless_link_is_named():
    made = plan(Job(12e9, 0.1, (Region("moon", 1, 1e6, 2.5),)))
    assert any("moon" in warning for warning in made.warnings)
    assert any("reach a merge in time" in warning for warning in made.warnings)


def test_an_infeasible_plan_writes_no_files(tmp_path):
    values, compose, out = files(tmp_path)
    words = ["--parameters", "12e9", "--step-s", "3", "--region", "slow:1:10:30", "--region", "b:1:1000:40"]
    code, said, error = atoll("plan", *words, "--values", values, "--compose", compose, "--json", out)
    assert code == 1
    assert "region slow needs 252% of its link" in said
    assert "goodput" not in said, "an infeasible plan must not promise goodput"
    assert error == "error: the plan is infeasible: the warnings above say what to change\n"
    assert not values.exists()
    assert not compose.exists()
    assert json.loads(out.read_text())["works"] is False


def test_step_boundaries_of_a_large_model_get_more_inner_steps():
    regions = (Region("a", 1, 2e9, 0.08), Region("b", 1, 2e9, 0.08))
    made = plan(Job(12e9, 3.0, regions))
    assert made.settings.inner_steps == 104  # 1.3 ns per parameter x 12e9 / 3 s / 5 %
    assert 0.95 < made.atoll.utilisation < 0.955
    assert made.atoll.utilisation > made.others[1].utilisation, "DiLoCo waits while it sends"
    assert not any("step boundaries" in warning for warning in made.warnings)
    assert any("step boundaries" in warning for warning in plan(Job(12e9, 0.1, regions)).warnings)


def test_more_contributions_than_a_core_was_measured_with_give_a_warning():
    made = plan(Job(1e6, 0.1, (Region("a", 1000, 1e11, 0.03),)))
    assert any("10000 contributions per second" in warning for warning in made.warnings)
    assert made.disk_bytes == pytest.approx((48 + 12 + 4 + 0.5 * 1000 * 4) * 1e6)  # the sum in k8s/atoll/values.yaml


def test_long_steps_are_planned_as_quickly_as_short_ones():
    short, long = (plan(Job(1e8 * s, 1.0 * s, (Region("a", 2, 1e8, 0.03 * s),))) for s in (1.0, 5000.0))
    assert short.settings == long.settings
    assert short.contributions == long.contributions == 1


def test_merges_while_learners_leave_are_not_part_of_a_plan():
    """README's example hardly uses its links, and needs no warning."""
    regions = (Region("eu", 2, 1e9, 0.03), Region("us", 4, 5e8, 0.09), Region("ap", 1, 2e8, 0.16))
    made = plan(Job(1e9, 2.0, regions))
    assert made.works
    assert made.contributions > 0.95
    assert not made.warnings
    assert made.core.share == 0, "the rate of the core's link is unknown"


def test_failures_cost_atoll_one_learner_and_stop_other_methods():
    made = plan(
        Job(1e9, 1.0, tuple(Region(f"r{i}", 1, 1e9, 0.03) for i in range(4)), between_failures_s=4 * 3600, repair_s=600)
    )
    alone = 4 * 3600 / (4 * 3600 + 600 + (13 + 4) * 1.0)
    assert made.atoll.goodput == pytest.approx(made.atoll.utilisation * alone)
    for other in made.others:
        assert other.goodput == pytest.approx(other.utilisation * 3600 / (3600 + 600))
        assert other.goodput < made.atoll.goodput


def test_a_lost_region_leaves_the_others():
    made = plan(Job(1e9, 1.0, (WIDE, Region("us", 3, 1e9, 0.1))))
    assert {loss.region: loss.pace for loss in made.losses} == {"eu": 0.75, "us": 0.25}
    outer_step_s = made.settings.inner_steps * 1.0
    assert [loss.budget_s for loss in made.losses] == [(made.settings.max_staleness - 1) * outer_step_s] * 2


def test_a_plan_for_one_region_states_how_long_an_outage_may_last():
    job = Job(1e9, 1.0, (WIDE,))
    made = plan(job)
    [lost] = made.losses
    assert (lost.region, lost.pace) == ("eu", 0.0)
    assert lost.budget_s == (made.settings.max_staleness - 1) * made.settings.inner_steps
    screen = Console(width=100, record=True, file=io.StringIO())
    screen.print(*plan_tables(job, made))
    [row] = re.findall(r"work is discarded after\n(.*)", screen.export_text())
    assert row.split()[:2] == ["eu", "0%"]
    assert row.endswith(duration(lost.budget_s))


def test_the_chart_accepts_the_written_values(tmp_path):
    job = Job(1e9, 1.0, (WIDE, Region("us", 3, 50e6, 0.1)))
    made = plan(job)
    values = yaml.safe_load(helm_values(job, made))
    known = yaml.safe_load((ROOT / "k8s/atoll/values.yaml").read_text())

    def within(given: dict, chart: dict) -> None:
        for name, value in given.items():
            assert name in chart
            if isinstance(value, dict) and chart[name]:
                within(value, chart[name])

    within(values, known)
    assert values["core"]["settings"]["innerSteps"] == made.settings.inner_steps
    memory = int(values["front"]["resources"]["limits"]["memory"].removesuffix("Gi")) * 1024
    assert values["front"]["cacheMib"] + 1700 < memory, "a front with a full cache must fit into its memory"
    assert int(values["learner"]["resources"]["limits"]["memory"].removesuffix("Gi")) >= LEARNER_BYTES + 8


@pytest.mark.parametrize("parameters", [1e9, 12e9, 405e9])
def test_the_table_the_json_and_the_charts_values_have_the_same_disks(parameters):
    job = Job(parameters, 30.0, (Region("eu", 4, 1e10, 0.03), Region("us", 4, 1e10, 0.1)))
    made = plan(job)
    core = yaml.safe_load(helm_values(job, made))["core"]
    console = Console(width=200, record=True, file=io.StringIO())
    for table in plan_tables(job, made):
        console.print(table)
    text, written = console.export_text(), plan_json(job, made)
    for size, key, told in (
        (core["storage"]["size"], "shard_disk_bytes", "of memory, {} GiB of disk"),
        (core["backup"]["storage"]["size"], "shard_backup_bytes", "its backups +{} GiB of disk"),
    ):
        gib = int(size.removesuffix("Gi"))
        assert gib == math.ceil(written[key] / 2**30)
        assert re.search(told.format(gib), text), text
    memory = int(core["backup"]["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert memory > 20 * parameters / made.settings.fragments, "a backup's check holds a whole fragment"
    assert made.works


def test_compose_knows_every_variable_in_the_file():
    job = Job(1e9, 1.0, (WIDE,))
    ours = yaml.safe_load(compose_override(job, plan(job)))["services"]
    theirs = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    assert set(ours) == {
        name for name in theirs if name == "core" or name in {f"{k}-{r}" for k in KINDS for r in PLACES}
    }
    for name, service in ours.items():
        said = atoll(name.partition("-")[0], "--help")[1]
        assert set(service) <= {"environment", "mem_limit"}
        assert all(variable in said for variable in service.get("environment", {}))
        assert int(service["mem_limit"].removesuffix("m")) > 1024


def test_the_command_prints_and_writes(tmp_path):
    values, compose, out = files(tmp_path)
    words = ["--parameters", "1e9", "--step-s", "1", "--region", "eu:2:500:30:0.09", "--between-failures-h", "24"]
    code, said, error = atoll("plan", *words, "--values", values, "--compose", compose, "--json", out)
    assert (code, error) == (0, "")
    assert "H = 26" in said
    found = json.loads(out.read_text())
    assert atoll("plan", *words, "--values", "-")[1] == values.read_text(), "- is stdout"
    for printed in (["--json", "-"], ["-o", "json"], ["-o", "jsonl"]):
        assert json.loads(atoll("plan", *words, *printed)[1]) == found
    assert found["links"][0]["up_bits_s"] == pytest.approx(2 * 3.15e9 / 26, rel=1e-3)
    assert [method["name"] for method in found["methods"]] == ["Atoll", "data-parallel", "DiLoCo, H = 500"]
    assert yaml.safe_load(values.read_text())
    assert yaml.safe_load(compose.read_text())


@pytest.mark.parametrize("option", ["--values", "--compose"])
def test_a_file_that_cannot_be_written_is_refused_before_the_plan_is_made(tmp_path, option):
    path = tmp_path / "none" / "file.yaml"
    code, said, error = atoll("plan", "--parameters", "1e9", "--step-s", "1", "--region", "eu:2:500:30", option, path)
    assert (code, said) == (1, "")
    assert error == f"error: {path} cannot be written (No such file or directory): give another path\n"


@pytest.mark.parametrize(
    "region",
    [
        "eu",
        "eu:1:2",
        "eu:one:100:30",
        ":1:100:30",
        "eu:0:100:30",
        "eu:1:0:30",
        "eu:1:100:-1",
        "eu:1:9:9:9:9",
        "eu.west:1:9:9",
        "[/]:1:9:9",
        "eu:1:inf:9",
        "eu:1:nan:9",
        "eu:1:9:9:inf",
        "eu:99999:9:9",
    ],
)
def test_an_invalid_region_is_named(region):
    with pytest.raises(UsageError) as refused:
        _region(region)
    assert len(str(refused.value).splitlines()) == 1
    assert f'--region "{region}"' in str(refused.value)


def test_the_command_names_an_invalid_region():
    code, _, error = atoll("plan", "--parameters", "1e9", "--step-s", "1", "--region", "eu")
    assert code == 2
    assert error.startswith('error: --region "eu" is invalid: ')
    assert len(error.splitlines()) == 1


def test_tables_of_figures_fit_80_columns():
    regions = tuple(Region(f"region-{number}", 4, 1e9, 0.09, 0.09) for number in range(3))
    job = Job(12e9, 3.0, regions, between_failures_s=86400.0)
    _, *tables = plan_tables(job, plan(job))  # the reasons in the first table wrap
    for table in tables:
        screen = Console(width=300, file=io.StringIO())
        screen.print(table)
        assert max(map(len, screen.file.getvalue().splitlines())) <= 80, table.title


def test_standard_output_has_only_one_document(tmp_path):
    words = ["plan", "--parameters", "1B", "--step-s", "1"]
    for two in (
        ["--values", "-", "--json", "-"],
        ["--values", "-", "--compose", "-"],
        ["--compose", "-", "-o", "jsonl"],
    ):
        code, said, error = atoll(*words, *two)
        assert (code, said) == (2, "")
        assert "give only one of them" in error
    out = tmp_path / "plan.json"
    code, said, _ = atoll(*words, "--region", "slow:2:1:30", "--values", "-", "--json", out)
    assert (code, said) == (1, ""), "an infeasible plan has no values"
    assert json.loads(out.read_text())["works"] is False
    code, _, error = atoll(*words, "--json", tmp_path)
    assert code == 1
    assert error == f"error: --json {tmp_path} cannot be written (Is a directory): give another path\n"


def test_goodput_as_json_has_all_cells(tmp_path):
    out, plot = tmp_path / "goodput.json", tmp_path / "goodput.svg"
    code, _, error = atoll("simulate", "goodput", "--hours", "3", "--json", out, "--plot", plot)
    assert (code, error) == (0, "")
    figures = json.loads(out.read_text())["goodput"]
    assert list(figures) == ["dp", "elastic", "2", "4", "8", "16"]
    assert all(len(row) == 5 for row in figures.values())
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize("what", ["bandwidth", pytest.param("hardware", marks=pytest.mark.slow)])
def test_other_tables_print_and_draw(tmp_path, what):
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    code, said, error = atoll("simulate", what, "--json", out, "--plot", plot)
    assert (code, error) == (0, "")
    assert "paper" in said
    assert json.loads(out.read_text())
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_users_own_fleet_is_simulated(tmp_path):
    code, said, _ = atoll("simulate", "goodput", "--chips", "10000", "--learners", "4")
    assert code == 0
    assert "goodput" in said
    code, _, error = atoll("simulate", "goodput", "--chips", "10", "--learners", "4")
    assert code == 2
    assert "raise --chips" in error
    for words in (("--learners", "4"), ("--chips", "10000", "--plot", "out.svg")):
        code, _, error = atoll("simulate", "goodput", *words)
        assert code == 2
        assert error.startswith("error: --")


def test_the_table_of_shards_is_the_planners():
    page = (ROOT / "docs/operate/shards.md").read_text()
    names = {7e9: "7 billion", 70e9: "70 billion", 405e9: "405 billion", 1e12: "1 trillion"}
    for parameters, name in names.items():
        made = sharding(parameters, 24, SHARD_BYTES, 0.0)
        memory, disk = f"{made.memory_bytes / 2**30:.0f} GiB", f"{made.disk_bytes / 1e9:,.0f} GB"
        assert f"| {name} | {made.shards} | {memory} | {disk} |" in page


def test_the_table_of_memory_and_disk_is_the_planners():
    page = (ROOT / "docs/guides/tune.md").read_text()
    rows = {line.split(" | ")[0]: line for line in page.splitlines()}
    sizes = 124e6, 1e9, 7e9
    assert rows["| core, memory"].endswith(" | ".join(f"{needed_bytes(n) / 2**30:.1f} GiB" for n in sizes) + " |")
    each = disk_bytes(1.0, 1.0, 0.0)
    assert f"| {each:g} N bytes, plus pending contributions " in rows["| core, disk"]
    assert f" {WAITING_BYTES:g} N bytes per learner per outer step of `--max-staleness`" in " ".join(page.split())
    assert rows["| core, disk"].endswith(f"| {each * 1:.0f} GB | {each * 7:.0f} GB |")
    each = backup_bytes(1.0, 1.0, 0.0, shards=1)
    assert f"| {each:g} N bytes, plus pending contributions " in rows["| core's backups, disk"]
    assert rows["| core's backups, disk"].endswith(f"| {each * 1:.0f} GB | {each * 7:.0f} GB |")
    learners = rows["| learner, host memory, excluding model and optimizer"]
    assert f"| {LEARNER_BYTES:g} N bytes" in learners
    assert learners.endswith(f"| {LEARNER_BYTES:.1f} GB | {LEARNER_BYTES * 7:.0f} GB |")
