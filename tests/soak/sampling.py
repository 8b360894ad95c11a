"""Measures the processes: whether training continues, and the numbers of calls, threads and files."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from benchmarks.process_state import Metrics, metrics
from tests.soak.deployment import LEARNERS, Actor, Deployment, SoakError
from tests.soak.judge import CONNECTIONS, FILES, MEMORY, THREADS

MAX_WAIT_S = 120.0  # limit on the time until training continues; silent connections may last a minute
LOOKS, LOOK_EVERY_S = 3, 0.25  # minimum for one sample
CALMING_S, SILENCED_S = 10.0, 75.0  # limits on waits for calls to end; after a silence, gRPC's keepalive takes 50 s

Usage = dict[str, float]  # quantity -> value


@dataclass(frozen=True, slots=True)
class Training:
    """The progress of training. steps, merged: of each learner's current process."""

    merges: float
    steps: Mapping[str, float]
    merged: Mapping[str, float]

    def missing(self, since: Training) -> str:
        """Returns a part without progress since then, or an empty string. No process may have restarted in between."""
        if self.merges <= since.merges:
            return f"the core has made no merge beyond {since.merges:.0f}"
        for name in LEARNERS:
            if self.steps[name] <= since.steps[name]:
                return f"learner {name} has no inner step beyond {since.steps[name]:.0f}"
            if self.merged[name] <= since.merged[name]:
                return f"learner {name} has no merged contribution beyond {since.merged[name]:.0f}"
        return ""


def usage(actor: Actor) -> Usage:
    """Returns a process's open calls by kind, threads, file descriptors and resident memory."""
    read, process = metrics(actor.metrics_port), psutil.Process(actor.child.process.pid)
    used: Usage = {}
    for name in ("atoll_open_calls", "atoll_local_open_calls"):
        for sample in read.samples(name):
            used[f"{sample.labels['method']} calls {sample.labels.get('side', 'opened')}"] = sample.value
    with process.oneshot():
        files, connections = process.num_fds(), len(process.net_connections("tcp"))
        used |= {THREADS: process.num_threads(), MEMORY: process.memory_info().rss}
        used |= {FILES: files - connections, CONNECTIONS: connections}
    return used


def known(name: str, quantity: str) -> float | None:
    """Returns how many calls of a kind a quiet process has, or None for other quantities."""
    if quantity in {THREADS, FILES, CONNECTIONS, MEMORY}:
        return None
    lasting = {"Follow calls opened", "Report calls opened"}
    if name in LEARNERS:
        return float(quantity in lasting)
    if quantity == ("Announce calls opened" if name == "front" else "Announce calls answered"):
        return 1.0
    lasting = {"Follow calls answered", "Report calls answered"} | (lasting if name == "front" else set())
    return float(len(LEARNERS) * (quantity in lasting))


def training(deployment: Deployment) -> tuple[Training | None, str]:
    """Returns the progress of training, or why it is unknown: a process does not answer yet, or is not connected.

    A learner is connected if it follows and reports, as seen by its own process, the front and the core. Additional
    calls do not count, because the test looks for them.
    """
    told = dict[str, Metrics]()
    for name, actor in deployment.actors.items():
        try:
            told[name] = metrics(actor.metrics_port)
        except OSError as error:
            return None, f"{name} does not answer: {error}"
    live = told["core"].total("atoll_learners", state="live")
    if live != len(LEARNERS):
        return None, f"the core has {live:.0f} live learners"
    for method in ("Follow", "Report"):
        for name in ("core", "front"):
            if (calls := told[name].total("atoll_open_calls", method=method, side="answered")) < len(LEARNERS):
                return None, f"the {name} answers {calls:.0f} {method} calls"
        for name in LEARNERS:
            if not told[name].total("atoll_local_open_calls", learner=name, method=method):
                return None, f"learner {name} has no {method} call"

    def each(what: str) -> dict[str, float]:
        return {name: told[name].total(what, learner=name) for name in LEARNERS}

    steps, merged = each("atoll_local_inner_steps_total"), each("atoll_local_merged_total")
    return Training(told["core"].total("atoll_merges_total"), steps, merged), ""


class Sampler:
    """Waits until the deployment trains and is idle. Then measures each process."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._pause = threading.Event()  # never set; used to wait
        self._usual: dict[str, Usage] = {}  # the highest sample of each role

    def wait_until_training(self, after: str) -> None:
        """Waits until all learners are connected, and each then trains and has work merged.

        Raises SoakError if this takes too long, or a process died.
        """
        deadline, since = time.monotonic() + MAX_WAIT_S, None
        while True:
            self._deployment.check()
            now, why = training(self._deployment)
            if now is not None:
                since = since or now
                if not (why := now.missing(since)):
                    return
            if time.monotonic() > deadline:
                raise SoakError(f"{MAX_WAIT_S:.0f} s after {after}: {why}")
            self._pause.wait(LOOK_EVERY_S)

    def sample(self, after: str, *, silenced: bool = False) -> dict[str, Usage]:
        """Returns the lowest of several measurements of each process, so that ending calls do not count.

        Measures until no process has more calls than known, or more threads and files than in earlier samples. The
        limit is CALMING_S, or SILENCED_S if connections became silent. Measurements start again if a learner
        disconnects.
        """
        lowest: dict[str, Usage] = {}
        deadline, looks = time.monotonic() + (SILENCED_S if silenced else CALMING_S), 0
        while looks < LOOKS or (self._above(lowest) and time.monotonic() < deadline):
            for name, actor in self._deployment.actors.items():
                least = lowest.setdefault(name, {})
                for quantity, value in self._usage(actor).items():
                    least[quantity] = min(value, least.get(quantity, value))
            looks += 1
            if training(self._deployment)[0] is None:
                self.wait_until_training(after)
                lowest, looks = {}, 0
            self._pause.wait(LOOK_EVERY_S)
        self._deployment.check()
        for name, used in lowest.items():
            usual = self._usual.setdefault(name, {})
            usual.update({quantity: max(value, usual.get(quantity, value)) for quantity, value in used.items()})
        return lowest

    def _usage(self, actor: Actor) -> Usage:
        try:
            return usage(actor)
        except (OSError, psutil.Error):
            self._deployment.check()  # raises an error that names a dead process
            raise

    def _above(self, lowest: Mapping[str, Usage]) -> bool:
        """Returns whether any quantity is still too high."""
        for name, used in lowest.items():
            for quantity, value in used.items():
                most = known(name, quantity)
                if most is None:
                    most = self._usual.get(name, {}).get(quantity, 0.0)
                if quantity not in {MEMORY, CONNECTIONS} and value > most:
                    return True
        return False
