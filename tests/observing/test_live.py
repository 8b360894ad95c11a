"""A real Prometheus scrapes a real run. A learner and the core are killed, and the alerts fire and resolve.

Prometheus' clock cannot be accelerated, so the rules' durations are divided by 60.
"""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from atoll.demo.processes import ATOLL, Child, Children, DemoError, children, free_port

from tests.end_to_end.world import Core, eventually

pytestmark = [pytest.mark.observe, pytest.mark.timeout(300)]
RULES = Path(__file__).parent.parent.parent / "docker/prometheus/rules.yaml"
QUICKER = {"s": lambda n: "1s", "m": lambda n: f"{n}s", "h": lambda n: f"{n}m", "d": lambda n: f"{24 * n}m"}
DURATION = re.compile(r"(?<=[\[: ])(\d+)([smhd])(?=[\]:\s]|$)")


def quicker(text: str) -> str:
    """Returns the text with all durations divided by 60."""
    return DURATION.sub(lambda found: QUICKER[found[2]](int(found[1])), text)


def rules() -> dict[str, Any]:
    """Returns the shipped rules for the running processes, with shorter durations."""
    found = {"groups": [each for each in yaml.safe_load(RULES.read_text())["groups"] if each["name"] != "atoll-front"]}
    for group in found["groups"]:
        for rule in group["rules"]:
            rule["expr"] = quicker(rule["expr"])
            if "for" in rule:
                rule["for"] = quicker(f" {rule['for']}").strip()
    return found


class Prometheus:
    """A real Prometheus server."""

    def __init__(self, group: Children, directory: Path, targets: dict[str, list[str]]) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/api/v1"
        (directory / "rules.yaml").write_text(yaml.safe_dump(rules()))
        jobs = [{"job_name": name, "static_configs": [{"targets": where}]} for name, where in targets.items()]
        settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(directory / "rules.yaml")],
            "scrape_configs": jobs,
        }
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        words = [f"--config.file={directory}/prometheus.yaml", f"--storage.tsdb.path={directory}/series"]
        try:
            group.start("prometheus", ["prometheus", *words, f"--web.listen-address=127.0.0.1:{port}"])
        except DemoError as error:
            pytest.fail(f"{error}: install Prometheus (apt-get install prometheus)", pytrace=False)

    def ask(self, expression: str) -> dict[str, float]:
        """Returns the result of an expression: values by their labels, as text."""
        try:
            found = self._get("query", query=expression)["result"]
        except OSError:
            return {}  # Prometheus is still starting
        return {json.dumps(each["metric"], sort_keys=True): float(each["value"][1]) for each in found}

    def firing(self) -> dict[str, str]:
        """Returns the descriptions of firing alerts by name."""
        alerts = self._get("alerts")["alerts"]
        return {
            each["labels"]["alertname"]: each["annotations"]["summary"] for each in alerts if each["state"] == "firing"
        }

    def _get(self, what: str, **words: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{what}?{urllib.parse.urlencode(words)}", timeout=20) as answer:
            return json.loads(answer.read())["data"]


@pytest.fixture
def group(tmp_path) -> Iterator[Children]:
    with children(tmp_path) as it:
        yield it


def test_alerts_fire_when_a_learner_and_the_core_die_and_resolve_when_they_return(group, tmp_path):
    core_port, learner_ports = free_port(), {name: free_port() for name in ("eu-1", "eu-2")}
    core = Core(group, tmp_path / "run", ["--fragments", "4", "--inner-steps", "8",
                                          "--metrics-listen", f"127.0.0.1:{core_port}"])  # fmt: skip

    def learner(name: str) -> Child:
        where = ["--server", core.address, "--name", name, "--region", "eu", "--size", "tiny", "--batch", "1"]
        metrics = ["--metrics-listen", f"127.0.0.1:{learner_ports[name]}", "--slow-down", "4"]
        return group.start(name, [*ATOLL, "learner", *where, *metrics])

    running = {name: learner(name) for name in learner_ports}
    targets = {"atoll-core": [f"127.0.0.1:{core_port}"],
               "atoll-learner": [f"127.0.0.1:{port}" for port in learner_ports.values()]}  # fmt: skip
    prometheus = Prometheus(group, tmp_path, targets)
    live = 'sum(atoll_learners{state="live"})'
    eventually(lambda: list(prometheus.ask(live).values()) == [2.0], 90)
    eventually(lambda: len(prometheus.ask("up == 1")) == 3)
    eventually(lambda: sum(prometheus.ask('atoll_contributions_total{fate="merged"}').values()) > 8, 60)
    # A Join of ten seconds counts as ten minutes here, so goodput is low. No other alert may fire.
    eventually(lambda: set(prometheus.firing()) <= {"AtollGoodputLow", "AtollWatchdog"}, 30)

    running["eu-2"].kill()
    eventually(lambda: "AtollLearnerSilent" in prometheus.firing(), 60)
    assert "eu-2" in prometheus.firing()["AtollLearnerSilent"], "the alert must name the silent learner"
    lost = 'atoll_learner_lost_seconds{learner="eu-2"}'
    down = sum(prometheus.ask(lost).values())
    eventually(lambda: sum(prometheus.ask(lost).values()) > down)
    eventually(lambda: sum(prometheus.ask('atoll_lost_seconds{cause="down"}').values()) > 10)
    eventually(lambda: list(prometheus.ask(live).values()) == [1.0])
    running["eu-2"] = learner("eu-2")
    eventually(lambda: "AtollLearnerSilent" not in prometheus.firing(), 90)

    core.kill()
    eventually(lambda: "AtollCoreDown" in prometheus.firing(), 60)
    core.start()
    eventually(lambda: "AtollCoreDown" not in prometheus.firing(), 60)
    eventually(lambda: list(prometheus.ask(live).values()) == [2.0], 60)
    for child in running.values():
        group.stop(child)
    eventually(lambda: list(prometheus.ask('sum(atoll_learners{state="left"})').values()) == [2.0])
    eventually(lambda: not {"AtollLearnerSilent", "AtollNoLearnerLive", "AtollCoreDown"} & set(prometheus.firing()), 60)
