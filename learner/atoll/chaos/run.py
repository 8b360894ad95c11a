"""Runs `atoll chaos`: starts a deployment, injects failures, restarts killed processes, and prints a summary."""

from __future__ import annotations

import signal
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from atoll_wire.cli.output import Figures
from rich.console import Console

from atoll.chaos.local_deployment import Deployment, procfile, reference
from atoll.chaos.observer import KillRecord, Observer, observing
from atoll.chaos.schedule import CORE, KILL, Fault, parse, random_faults
from atoll.chaos.settings import ChaosSettings
from atoll.chaos.summary import summary_table
from atoll.demo.display import Progress
from atoll.demo.processes import Child, Children, DemoError, children

TICK_S = 0.1
READY_S = 180.0  # limit on the time until all learners train
LEAVE_S = 90.0  # at the end, limit on the time until all learners have left
BACK_S = 120.0  # at the end, limit on the time until the core answers again


def run_chaos(settings: ChaosSettings, out: Figures) -> None:
    """Runs a local deployment with the failures of `settings`, and prints a summary. Ctrl-C ends every child.

    out: where the summary goes. If the summary is printed as JSON, the progress goes to standard error. Raises
    DemoError if a process ends by itself.
    """
    out.check()
    console = Console(stderr=out.form.is_json)
    with tempfile.TemporaryDirectory() if settings.keep is None else nullcontext(settings.keep) as place:
        directory = Path(place)
        directory.mkdir(parents=True, exist_ok=True)
        if settings.procfile is not None:
            deployment = procfile(settings.procfile, settings.server)
        else:
            deployment = reference(
                directory,
                settings.learners,
                settings.size,
                settings.batch,
                settings.total_tokens,
                settings.seed,
                list(settings.core_options),
            )
        faults = _faults(settings, deployment)
        with (
            children(directory) as group,
            observing(deployment.address) as observer,
            Progress(console, settings.total_tokens) as progress,
        ):
            summary = Chaos(settings, deployment, group, observer, progress).run(faults)
            if settings.procfile is None:
                observer.export(str(directory / "last.safetensors"))
        if settings.procfile is None:
            from atoll.reference.train import loss_of_file  # noqa: PLC0415 - loads torch after the children have ended

            summary["validation_loss"] = loss_of_file(directory / "last.safetensors", settings.size, None)
    out.show(summary, lambda: summary_table(summary))


def _faults(settings: ChaosSettings, deployment: Deployment) -> list[Fault]:
    """Returns the failures to inject: those in --schedule, or random ones."""
    if settings.schedule is not None:
        return parse(settings.schedule, list(deployment.commands))
    return random_faults(
        settings.seed, settings.seconds, deployment.learners, settings.mtbf_s, settings.core_mtbf_s, settings.pauses
    )


class Chaos:
    """One run of a deployment with injected failures."""

    def __init__(
        self, settings: ChaosSettings, deployment: Deployment, group: Children, observer: Observer, progress: Progress
    ) -> None:
        self._settings = settings
        self._deployment = deployment
        self._group = group
        self._observer = observer
        self._progress = progress
        self._alive: dict[str, Child] = {}
        self._again: dict[str, tuple[float, KillRecord]] = {}  # name -> start of its next process and the last kill
        self._paused: dict[str, float] = {}  # name -> end of its pause
        self._done: list[Fault] = []

    def run(self, faults: list[Fault]) -> dict[str, Any]:
        """Runs the deployment until all learners have left. Returns the summary."""
        for name, command in self._deployment.commands.items():
            self._alive[name] = self._group.start(name, command)
        self._wait_until_all_train()
        began, left = time.monotonic(), list(faults)
        self._progress.note(
            f"all {len(self._deployment.learners)} learners are training; {len(faults)} failures are scheduled"
        )
        while (elapsed := time.monotonic() - began) < self._settings.seconds and self._anybody_trains():
            left = [fault for fault in left if fault.at_s > elapsed or not self._strike(fault, elapsed)]
            self._tick()
        seconds = time.monotonic() - began
        self._end()
        return self._summary(seconds)

    def _wait_until_all_train(self) -> None:
        deadline = time.monotonic() + READY_S
        while not (self._observer.look() and self._observer.all_train(len(self._deployment.learners))):
            self._check()
            if time.monotonic() > deadline:
                raise DemoError(
                    f"some learners did not start training within {READY_S:.0f} s: "
                    "use --keep DIR, and read the logs there"
                )
            time.sleep(TICK_S)

    def _strike(self, fault: Fault, elapsed: float) -> bool:
        """Kills or pauses a process. Returns False if it is already down or paused; the caller then retries later."""
        name = fault.target
        if name in self._again or name in self._paused:
            return False
        child = self._alive[name]
        if fault.what == KILL:
            child.kill()
            again_at = time.monotonic() + self._settings.restart_after_s
            self._again[name] = (again_at, KillRecord(elapsed, name))
            self._progress.note(f"killed {name} with SIGKILL")
        else:
            child.process.send_signal(signal.SIGSTOP)
            self._paused[name] = time.monotonic() + fault.for_s
            self._progress.note(f"paused {name} with SIGSTOP for {fault.for_s:.1f} s")
        self._done.append(fault)
        return True

    def _tick(self) -> None:
        now = time.monotonic()
        for name, (again_at, hit) in list(self._again.items()):
            if now >= again_at:
                del self._again[name]
                hit.started_at = time.monotonic()
                self._alive[name] = self._group.start(name, self._deployment.commands[name])
                (self._observer.core_killed if name == CORE else self._observer.learner_killed)(hit)
        for name, until in list(self._paused.items()):
            if now >= until:
                del self._paused[name]
                self._alive[name].process.send_signal(signal.SIGCONT)
        self._check()
        if self._observer.look():
            self._progress.show(self._observer.status)
        time.sleep(TICK_S)

    def _check(self) -> None:
        """Raises DemoError if a process that `atoll chaos` did not kill has ended."""
        for name, child in self._alive.items():
            status = child.process.poll()
            if name not in self._again and (status not in {None, 0} or (status == 0 and name == CORE)):
                raise DemoError(f"{name} exited with status {status}: {child.tail()}")

    def _anybody_trains(self) -> bool:
        names = self._deployment.learners
        return any(name in self._again or self._alive[name].process.poll() is None for name in names)

    def _end(self) -> None:
        """Waits until all processes are back, lets learners leave cleanly, and waits for their last merges."""
        for name in list(self._paused):
            self._paused[name] = 0.0
        deadline = time.monotonic() + BACK_S
        while self._again or self._paused or not self._observer.look():
            self._tick()
            if time.monotonic() > deadline:
                raise DemoError(
                    f"the core did not answer, or a process did not restart, within {BACK_S:.0f} s: "
                    f"use --keep DIR, and read the logs there. The core's last log line: {self._alive[CORE].tail()}"
                )
        deadline = time.monotonic() + LEAVE_S
        names = [name for name in self._deployment.learners if self._alive[name].process.poll() is None]
        for name in names:
            self._alive[name].process.send_signal(signal.SIGTERM)
        while any(self._alive[name].process.poll() is None for name in names) and time.monotonic() < deadline:
            self._tick()
        while self._observer.look() and self._observer.status.contributions.pending and time.monotonic() < deadline:
            time.sleep(TICK_S)

    def _summary(self, seconds: float) -> dict[str, Any]:
        status, kills = self._observer.status, [fault for fault in self._done if fault.what == KILL]
        counts = status.contributions
        return {
            "learners": len(self._deployment.learners),
            "parameters": status.parameters,
            "seconds": seconds,
            "blows": [[fault.at_s, fault.what, fault.target, fault.for_s] for fault in self._done],
            "kills": {
                "learner": sum(fault.target != CORE for fault in kills),
                "core": sum(fault.target == CORE for fault in kills),
                "paused": len(self._done) - len(kills),
            },
            "goodput": status.goodput.ratio,
            "goodput_lost_s": dict(status.goodput.lost_s),
            "useful_s": status.goodput.useful_s,
            "provisioned_s": status.goodput.provisioned_s,
            "tokens_trained": status.tokens_trained,
            "tokens_merged": round(status.tokens_merged),
            "contributions": {
                "accepted": counts.accepted,
                "merged": counts.merged,
                "refused": counts.refused,
                "pending": counts.pending,
            },
            "hits": [hit.row() for hit in self._observer.hits],
        }
