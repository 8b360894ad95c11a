"""The demo of docker/compose.yaml as a separate Compose project, on the engine at DOCKER_HOST."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from atoll.demo.processes import free_port

ROOT = Path(__file__).parent.parent.parent
FILES = ["docker/compose.yaml", "docker/compose.test.yaml"]
PROJECT = f"atoll-test-{os.getpid()}"
LEARNERS = ["learner-eu", "learner-us", "learner-ap"]
ASK_S = 60.0


class NoEngineError(Exception):
    """The stack cannot run. The message is one line with the fix."""


class Stack:
    """One Compose project. tag: of images that only this test builds."""

    def __init__(self) -> None:
        self.tag = PROJECT
        self.prometheus_port, self.dashboard_port = free_port(), free_port()
        self._environment = os.environ | {
            "ATOLL_TAG": self.tag, "PYTHON_IMAGE": f"python:{sys.version_info.major}.{sys.version_info.minor}-slim",
            "CORE_PORT": str(free_port()), "DASHBOARD_PORT": str(self.dashboard_port),
            "PROMETHEUS_PORT": str(self.prometheus_port), "ALERTMANAGER_PORT": str(free_port()),
            "TOTAL_TOKENS": str(10**12),
        }  # fmt: skip

    def docker(self, *words: str, timeout: float = ASK_S, **environment: str) -> str:
        """Returns the output of `docker`. Raises AssertionError with its last lines if the command fails."""
        done = subprocess.run(
            ["docker", *words], cwd=ROOT, env=self._environment | environment, text=True, capture_output=True,
            timeout=timeout,
        )  # fmt: skip
        assert done.returncode == 0, f"docker {' '.join(words)}: {(done.stdout + done.stderr)[-3000:]}"
        return done.stdout

    def compose(self, *words: str, timeout: float = ASK_S, **environment: str) -> str:
        """Returns the output of `docker compose` for this project."""
        files = [word for file in FILES for word in ("--file", file)]
        return self.docker("compose", "--project-name", PROJECT, *files, *words, timeout=timeout, **environment)

    def check(self) -> None:
        """Raises NoEngineError if there is no usable engine."""
        try:
            self.docker("version", timeout=20)
            self.docker("compose", "version", timeout=20)
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            where = os.environ.get("DOCKER_HOST", "the default socket")
            raise NoEngineError(
                f"no Docker engine with Compose answers at {where}: start one, or name it with DOCKER_HOST"
            ) from error

    def containers(self, service: str) -> list[dict[str, Any]]:
        """Returns the containers of a service, as `docker inspect` shows them, ordered by number."""
        names = self.compose("ps", "--all", "--quiet", service).split()
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", *names)) if names else []
        return sorted(found, key=lambda each: each["Name"])

    def healthy(self, service: str) -> bool:
        """Returns whether all containers of a service are healthy."""
        found = self.containers(service)
        return bool(found) and all(each["State"].get("Health", {}).get("Status") == "healthy" for each in found)

    def atoll(self, *words: str) -> str:
        """Runs a subcommand of `atoll` as a viewer, in the core's container."""
        return self.compose("exec", "-T", "core", "atoll", *words)

    def operator(self, *words: str) -> str:
        """Runs a subcommand of `atoll` as the operator."""
        return self.compose("run", "--rm", "operator", *words)

    def status(self) -> dict[str, Any]:
        """Returns the run's status."""
        found: dict[str, Any] = json.loads(self.atoll("status", "--json"))
        return found

    def receipts(self) -> dict[tuple[str, str, str, str], dict[str, Any]]:
        """Returns the current receipt of each acknowledged contribution, by key."""
        lines = json.loads(self.atoll("receipts", "--json", "--last", "10000"))
        key = ("learner", "incarnation", "fragment", "seq")
        found = [line["receipt"] for line in lines]
        return {tuple(str(each.get(part, 0)) for part in key): each for each in found}  # type: ignore[misc]

    def page(self, path: str, token: str = "") -> Any:
        """Returns the dashboard's JSON response. With a token, requests an operator action."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.dashboard_port}/api/{path}")
        if token:
            request = urllib.request.Request(request.full_url, b"{}", {"Authorization": f"Bearer {token}",
                                                                       "Content-Type": "application/json"})  # fmt: skip
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:
            return json.loads(answer.read())

    def measure(self, expression: str) -> list[dict[str, Any]]:
        """Returns Prometheus' answer to a query."""
        query = urllib.parse.urlencode({"query": expression})
        url = f"http://127.0.0.1:{self.prometheus_port}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=ASK_S) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
        return found


def until(what: Any, max_wait_s: float = 120.0) -> Any:
    """Calls `what` once per second until it returns a true value, which is returned. Raises AssertionError."""
    deadline = time.monotonic() + max_wait_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"the condition did not hold within {max_wait_s:.0f} s"
        time.sleep(1.0)
    return found
