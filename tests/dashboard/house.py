"""A real core that requires tokens, a real dashboard, and learners in threads."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.demo.processes import Child, Children, children

from tests.end_to_end.world import Core, Trainee

LEARNERS = (("eu-1", "eu", 0.02), ("eu-2", "eu", 0.03), ("us-1", "us", 0.02))


@dataclass
class House:
    """A running deployment. url: of the page. token: of an operator. over: once set, learners leave."""

    core: Core
    group: Children
    token: str
    url: str
    dashboard: Child
    trainees: dict[str, Trainee] = field(default_factory=dict)
    over: list[bool] = field(default_factory=list)

    def ask(self, path: str, *, token: str = "", method: str = "GET", **body: Any) -> tuple[int, Any]:
        """Returns the status and the parsed JSON of a response."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(f"{self.url}/api/{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def look(self, path: str) -> Any:
        """Returns the JSON at a path, which must succeed."""
        status, told = self.ask(path)
        assert status == 200, told
        return told

    def action(self, name: str, *, token: str | None = None, **body: Any) -> tuple[int, Any]:
        """Requests an operator action. token: by default, the operator's."""
        return self.ask(f"actions/{name}", token=self.token if token is None else token, method="POST", **body)

    def learn(self, name: str, region: str, pace_s: float) -> Trainee:
        """Starts a learner."""
        trainee = Trainee(self.core.address, name, lambda _: bool(self.over), region=region, pace_s=pace_s)
        self.trainees[name] = trainee
        trainee.start()
        return trainee


@contextlib.contextmanager
def house(directory: Path, *options: str) -> Iterator[House]:
    """Context manager for a deployment, which ends with the block."""
    tokens = directory / "tokens"
    made = [sys.executable, "-m", "atoll.cli", "token", "ann", "--file", str(tokens)]
    token = subprocess.run(made, capture_output=True, text=True, check=True).stdout.strip()
    with children(directory) as group:
        settings = {
            "--operator-tokens": str(tokens),
            "--fragments": "4",
            "--inner-steps": "8",
            "--wan-budget-gb": "100",
        }
        running = Core(group, directory / "run", [*(word for pair in settings.items() for word in pair), *options])
        dashboard, url = group.start_dashboard("127.0.0.1:0", running.address, ["--token", token, "--log-json"])
        it = House(running, group, token, url, dashboard)
        try:
            for name, region, pace_s in LEARNERS:
                it.learn(name, region, pace_s)
            yield it
        finally:
            it.over.append(True)
            for trainee in it.trainees.values():
                trainee.join(30)
