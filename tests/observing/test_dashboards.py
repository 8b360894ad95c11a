"""Dashboards: they match make.py's output, are complete, and use one data source and existing series."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.observing.promql import check_syntax, filled, problems, promtool, series
from tests.observing.test_rules import known

pytestmark = pytest.mark.observe
ROOT = Path(__file__).parent.parent.parent
GRAFANA = ROOT / "docker/grafana"
NAMES = ("one-learner", "overview", "regions-and-wan", "rounds")
BOARDS = {name: json.loads((GRAFANA / f"dashboards/{name}.json").read_text()) for name in NAMES}
(PROVISIONED,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
SOURCE = {"type": PROVISIONED["type"], "uid": "${datasource}"}
SCOPE = ['run="$run"', 'namespace=~"$namespace"']

each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


def panels(board: dict) -> list[dict]:
    """Returns the panels, without section headings."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def exprs(board: dict) -> Iterator[tuple[str, str]]:
    """Yields all expressions with their locations."""
    for panel in panels(board):
        for target in panel["targets"]:
            yield panel["title"], filled(target["expr"])
    for event in board["annotations"].get("list", []):
        yield event["name"], filled(event["expr"])


def test_dashboards_equal_the_output_of_make_py(tmp_path):
    subprocess.run([sys.executable, str(GRAFANA / "make.py"), str(tmp_path)], check=True)
    assert sorted(path.stem for path in tmp_path.iterdir()) == list(NAMES)
    assert sorted(path.stem for path in (GRAFANA / "dashboards").iterdir()) == list(NAMES)
    for name in NAMES:
        made, kept = ((folder / f"{name}.json").read_text() for folder in (tmp_path, GRAFANA / "dashboards"))
        assert made == kept, f"{name} is out of date: run `python docker/grafana/make.py`"


def test_promtool_accepts_every_expression(tmp_path):
    found = {expr for board in BOARDS.values() for _, expr in exprs(board)}
    assert len(found) > 80
    check_syntax(sorted(found), tmp_path)


@each_board
def test_expressions_use_existing_series(board):
    told = known()
    for where, expr in exprs(board):
        assert not problems(expr, told), where
    for variable in board["templating"].get("list", []):
        if variable["type"] == "query":
            found, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]).groups()
            assert not problems(filled(found), told)
            assert label in told[found.partition("{")[0]]


@each_board
def test_legends_name_labels_of_their_series(board):
    for panel in panels(board):
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                kept = re.findall(r"\bby \(([^)]*)\)", target["expr"])
                listed = {each.strip() for labels in kept for each in labels.split(",")}
                assert not listed or label in listed, f"{panel['title']}: the legend's label {label} is not kept"


@each_board
def test_each_panel_has_a_description_and_a_unit(board):
    assert board["uid"].startswith("atoll-")
    assert board["description"]
    for panel in panels(board):
        assert panel["title"]
        assert 10 < len(panel["description"]) <= 120, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        if panel["type"] == "stat":
            steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
            assert steps[0]["value"] is None
            above = [step["value"] for step in steps[1:]]
            assert above == sorted(above), panel["title"]


@each_board
def test_data_source_namespace_and_run_are_variables(board):
    source, namespace, run = board["templating"]["list"][:3]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", PROVISIONED["type"])
    assert (namespace["name"], namespace["includeAll"], namespace["allValue"]) == ("namespace", True, ".*")
    assert (run["name"], run["includeAll"], run["multi"]) == ("run", False, False), "a sum over runs means nothing"
    for panel in panels(board):
        assert panel["datasource"] == SOURCE, panel["title"]
        assert all(target["datasource"] == SOURCE for target in panel["targets"]), panel["title"]
    for event in board["annotations"]["list"]:
        assert event["datasource"] == SOURCE
    for variable in board["templating"]["list"]:
        assert variable.get("datasource", SOURCE) == SOURCE


@each_board
def test_all_series_are_of_the_selected_run_and_namespace(board):
    asked = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    asked += [event["expr"] for event in board["annotations"]["list"]]
    for expr in asked:
        found = list(series(expr))
        assert found, expr
        assert all(inside.split(", ")[:2] == SCOPE for _, inside in found), expr


@each_board
def test_outages_and_restarts_are_annotated(board):
    assert [event["name"] for event in board["annotations"]["list"]][:3] == [
        "the core is down",
        "the core started",
        "a front is down or cut off",
    ]


@each_board
def test_no_panel_hides_a_dead_member_in_a_mean(board):
    for where, expr in exprs(board):
        fix = f"{where}: show a count, the worst, or one series each"
        assert not re.search(r"\bavg(_over_time)?\b|_seconds_sum\b", expr), fix
        for labels in re.findall(r"/\s*(?:sum|count)\b\s*(?:by\s*\(([^)]*)\))?\s*\(", expr):
            assert {"learner", "instance", "link"} & set(labels.split(", ")), fix


def test_the_overview_shows_the_worst_learners_one_by_one():
    worst = [target for panel in panels(BOARDS["overview"]) for target in panel["targets"] if "topk(" in target["expr"]]
    assert [target["legendFormat"] for target in worst] == ["{{learner}}", "{{learner}}"]


def test_every_metric_of_links_has_a_panel():
    shown = json.dumps(BOARDS["regions-and-wan"])
    for name in known():
        if name.startswith(("atoll_link_", "atoll_outage_")):
            assert name in shown, name


CASE = """
rule_files: [%s]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'up{job="atoll-core", run="a", instance="c"}', values: "1x9 0 0 0 0 0 1x30"}
      - {series: 'atoll_restore_seconds{job="atoll-core", run="a", instance="c"}', values: "2x9 stale _x4 2x30"}
      - {series: 'atoll_core_epoch{job="atoll-core", run="a", instance="c"}', values: "1x9 stale _x4 2x30"}
      - {series: 'up{job="atoll-front", run="a", instance="eu"}', values: "1x40"}
      - {series: 'up{job="atoll-front", run="a", instance="us"}', values: "1x9 0x30"}
      - {series: 'up{job="atoll-front", run="a", instance="ap"}', values: "1x40"}
      - {series: 'up{job="atoll-front", run="a", instance="new"}', values: "0x40"}
      - {series: 'up{job="atoll-front", run="another", instance="x"}', values: "0x40"}
      - {series: 'atoll_front_core_up{job="atoll-front", run="a", region="eu", instance="eu"}', values: "1x40"}
      - {series: 'atoll_front_core_up{job="atoll-front", run="a", region="us", instance="us"}', values: "1x9 stale"}
      - {series: 'atoll_front_core_up{job="atoll-front", run="a", region="ap", instance="ap"}', values: "1x9 0x30"}
    promql_expr_test:
"""


def test_dead_and_cut_off_members_are_shown_and_marked(tmp_path):
    """Of four fronts, one is dead, one is cut off, and one has never answered. The core is down for five minutes."""
    board = BOARDS["regions-and-wan"]
    asked = {panel["title"]: filled(panel["targets"][0]["expr"]) for panel in panels(board)}
    marks = {event["name"]: filled(event["expr"]) for event in board["annotations"]["list"]}
    fronts = [{"labels": f'{{instance="{name}", region="{name}"}}', "value": n}
              for name, n in (("eu", 2), ("us", 0), ("ap", 1))]  # fmt: skip
    fronts.append({"labels": '{instance="new"}', "value": 0})
    down = {"labels": '{__name__="core:atoll_core_state:max", job="atoll-core", run="a"}', "value": 0}
    wanted = [
        {"expr": asked["Fronts in trouble"], "eval_time": "20m", "exp_samples": [{"labels": "{}", "value": 3}]},
        {"expr": asked["Fronts"], "eval_time": "20m", "exp_samples": fronts},
        {"expr": f"count({marks['a front is down or cut off']})", "eval_time": "20m",
         "exp_samples": [{"labels": "{}", "value": 3}]},
        {"expr": marks["the core is down"], "eval_time": "9m"},
        {"expr": marks["the core is down"], "eval_time": "12m", "exp_samples": [down]},
        {"expr": marks["the core is down"], "eval_time": "17m"},
        {"expr": f"count({marks['the core started']})", "eval_time": "15m",
         "exp_samples": [{"labels": "{}", "value": 1}]},
        {"expr": marks["the core started"], "eval_time": "20m"},
    ]  # fmt: skip
    text = CASE % json.dumps(str(ROOT / "docker/prometheus/rules.yaml"))
    path = tmp_path / "case.yaml"
    path.write_text(text + "".join(f"      - {json.dumps(each)}\n" for each in wanted))
    promtool("test", "rules", str(path))


@each_board
def test_panels_do_not_overlap(board):
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"panel {panel['title']} covers panel {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_dashboards_link_to_each_other():
    uids = [board["uid"] for board in BOARDS.values()]
    assert len(set(uids)) == len(uids)
    for board in BOARDS.values():
        assert board["links"][0]["tags"] == board["tags"] == ["atoll"]
        assert set(re.findall(r"/d/([\w-]+)", json.dumps(board))) <= set(uids)


def test_the_overview_shows_silent_learners_with_lost_time_and_cost():
    """The table on the first screen shows this without a click."""
    (table,) = (panel for panel in panels(BOARDS["overview"]) if panel["title"] == "Learners, trouble first")
    assert table["gridPos"]["y"] + table["gridPos"]["h"] <= 20
    names = next(each["options"] for each in table["transformations"] if each["id"] == "organize")["renameByName"]
    asked = {names[f"Value #{target['refId']}"]: target["expr"] for target in table["targets"]}
    assert "atoll_learner_info" in asked["state"]
    assert "atoll_learner_heard_timestamp_seconds" in asked["last heard"]
    assert "atoll_learner_lost_seconds" in asked["lost in this time range"]
    assert table["options"]["sortBy"][0] == {"displayName": "state", "desc": True}
    states = next(each for each in table["fieldConfig"]["overrides"] if each["matcher"]["options"] == "state")
    words = next(each["value"] for each in states["properties"] if each["id"] == "mappings")[0]["options"]
    worst = max(words, key=float)
    assert (words[worst]["text"], words[worst]["color"]) == ("silent", "red")


def test_grafana_is_configured_with_the_folder_of_dashboards():
    (told,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/atoll.yaml").read_text())["providers"]
    mounts = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["grafana"]["volumes"]
    assert f"./grafana/dashboards:{told['options']['path']}:ro" in mounts
