"""A learner's counters, which the user, the core and Prometheus read."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, SupportsFloat, SupportsIndex

from atoll_wire import outer_pb2 as pb
from atoll_wire.connections import calls
from atoll_wire.process import metrics_server
from atoll_wire.process.certificate_expiry import CertificateExpiry, expiry_times
from atoll_wire.security.transport import TransportSecurity
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atoll.errors import LearnerError

STEP_SMOOTHING = 0.1
SHORT_PAUSE_S, SHORT_PAUSE_STEPS = 0.5, 2.0  # pauses up to the longer of both are throttling, so not reported
LATELY = 4  # number of newest steps; the shortest of them is `period_s`
MAX_TOKENS = 1 << 40  # limit on the tokens of one rank in one step


@dataclass(frozen=True, slots=True)
class Stats:
    """The counters that `Learner.stats()` returns. Times are in seconds. Byte counts include only payloads.

    Each process has its own counters, which start at zero when the process joins. In a torchrun job, `tokens` counts
    the tokens of all ranks, and only rank 0 counts the bytes and contributions of all ranks.

    Attributes:
        steps: Inner steps of this learner.
        tokens: Tokens of this learner.
        skipped: Calls of `step` without an optimizer step, for example because a gradient scaler skipped it.
        earlier_steps: Inner steps that earlier processes with this name reported.
        earlier_tokens: Tokens that earlier processes with this name reported.
        run_tokens: Tokens of all learners, as known at the last step.
        blocked_s: Time inside `step`, excluding waits while an operator paused the run.
        stepping_s: Total time between calls of `step`, without pauses.
        joining_s: Time from `start` until training may begin.
        paused_s: Time in `pause`, in waiting for data units that other learners hold, or while an operator paused the
            run.
        bytes_up: Payload of contributions sent.
        bytes_down: Payload of published updates received.
        bytes_whole: Payload of whole fragments and initial parameters.
        versions: For each fragment, the version of this learner's anchor.
        merged: Contributions that were merged.
        refused: Contributions that were refused.
        pending: Contributions whose fate is unknown. After leaving: contributions that the core did not acknowledge.
        abandoned_tokens: Tokens whose work the learner dropped.
        reconnects: Lost connections to the core.
        mismatches: Fragments with a wrong checksum, which were fetched whole.
        connected: Whether the learner is connected to the core.
        last_error: The latest error of a call, or the reason for a refusal; else empty.
        paused_by: The operator who paused the run, and the reason; empty if the run is not paused.
        checkpoints: Learner checkpoints that were saved.
        checkpoints_failed: Learner checkpoints that could not be saved.

    Example:
        ```python
        stats = learner.stats()
        print(f"{stats.merged} contributions merged, {stats.blocked_s:.1f} s in step()")
        ```
    """

    steps: int
    tokens: int
    skipped: int
    earlier_steps: int
    earlier_tokens: int
    run_tokens: int
    blocked_s: float
    stepping_s: float
    joining_s: float
    paused_s: float
    bytes_up: int
    bytes_down: int
    bytes_whole: int
    versions: tuple[int, ...]
    merged: int
    refused: int
    pending: int
    abandoned_tokens: float
    reconnects: int
    mismatches: int
    connected: bool
    last_error: str
    paused_by: str
    checkpoints: int
    checkpoints_failed: int


@dataclass(slots=True)
class Counters:
    """Counters since the Learner was started. The training thread and the agent write different counters."""

    steps: int = 0
    tokens: int = 0
    skipped: int = 0
    earlier_steps: int = 0
    earlier_tokens: int = 0
    loss: float = float("nan")
    step_time_s: float = 0.0
    stepping_s: float = 0.0
    blocked_s: float = 0.0
    joining_s: float = 0.0
    prepared_s: float = 0.0  # age of the process when joining began
    first_step_s: float = 0.0
    paused_s: float = 0.0
    abandoned_tokens: float = 0.0
    paused: bool = False
    resting_since: float | None = None  # when the loop's current pause began; None if the loop is not paused
    period_s: float = 0.0  # shortest of the last steps, including their pauses
    periods: deque[float] = field(default_factory=lambda: deque(maxlen=LATELY))
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_whole: int = 0
    merged: int = 0
    refused: int = 0
    pending: int = 0
    mismatches: int = 0  # anchors whose checksum differed from the published one; they were fetched whole
    reconnects: int = 0
    connected: bool = False
    last_error: str = ""
    paused_by: str = ""
    checkpoints: int = 0
    checkpoints_failed: int = 0
    run_tokens: int = 0
    run_tokens_at: int = 0  # this learner's tokens when run_tokens was last set
    voided_tokens: int = -1  # tokens that operators voided or a restore undid; -1: not known yet
    corrected: bool = False  # whether run_tokens fell since training last read it
    total_tokens: int = 0  # the run's target; 0 if the core has none

    def told(self, run_tokens: int, voided_tokens: int = 0, *, restored: bool = False) -> None:
        """Records the core's count of the run's tokens. The count falls when an operator voids tokens.

        Reports may arrive out of order, because an update carries the tokens that were known when its merge began.
        restored: whether the run was restored to a checkpoint, so that earlier reports no longer count.
        """
        if restored or (voided_tokens, run_tokens) > (self.voided_tokens, self.run_tokens):
            self.corrected |= restored or voided_tokens > self.voided_tokens > -1
            self.voided_tokens = voided_tokens
            # The training thread may read between these two lines. This order gives it too few tokens, never too many.
            self.run_tokens_at = self.tokens
            self.run_tokens = run_tokens

    def known_tokens(self) -> int:
        """Returns the run's tokens: this learner's own, plus the other learners' tokens in the core's last report."""
        # The core receives this learner's tokens with a delay. The voided tokens may include tokens of this learner.
        return self.tokens + max(-max(0, self.voided_tokens), self.run_tokens - self.run_tokens_at)

    def run_tokens_after(self, agreed: int) -> int:
        """Returns the run's tokens: at least `agreed`, unless tokens were voided since the last call."""
        corrected, self.corrected = self.corrected, False
        return max(0 if corrected else agreed, self.known_tokens())

    def stepped(self, whole_s: float, paused_s: float, loss: float | None) -> None:
        """Records an inner step. whole_s: its duration, which includes paused_s seconds of deliberate pauses."""
        step_s = max(0.0, whole_s - paused_s)
        self.stepping_s += step_s
        first = not self.periods
        if first:
            self.first_step_s = step_s
        self.step_time_s += (step_s - self.step_time_s) * (1.0 if first else STEP_SMOOTHING)
        self.periods.append(whole_s)
        self.period_s = min(self.periods)
        self.loss = self.loss if loss is None else loss

    def trained(self, tokens: int, steps: int) -> None:
        """Counts inner steps, and the tokens of all ranks in them."""
        self.steps += steps
        self.tokens += tokens

    def left(self, unsettled: int) -> None:
        """Records that the learner has left. unsettled: number of contributions that were never acknowledged."""
        self.connected = False
        self.pending = unsettled

    def rested(self, began: float, now: float) -> float:
        """Counts a deliberate pause, or a part of one, and returns its duration. began, now: monotonic seconds."""
        seconds = now - began
        self.paused_s += seconds
        return seconds

    def stats(self, run_tokens: int, versions: tuple[int, ...]) -> Stats:
        """Returns all counters, for the user."""
        mine: dict[str, Any] = {each.name: getattr(self, each.name, None) for each in fields(Stats)}
        return Stats(**mine | {"run_tokens": run_tokens, "versions": versions})

    def pausing(self, now: float) -> bool:
        """Returns whether to report a pause to the core. Throttling is not reported. now: monotonic seconds."""
        since = self.resting_since  # read once, because the training thread may change it
        return self.paused and (since is None or now - since > max(SHORT_PAUSE_S, SHORT_PAUSE_STEPS * self.period_s))

    def progress(self, now: float) -> pb.Progress:
        """Returns the counters as a message to the core. now: monotonic seconds."""
        return pb.Progress(
            steps=self.steps,
            tokens=self.tokens,
            loss=self.loss,
            step_time_s=self.step_time_s,
            stepping_s=self.stepping_s,
            blocked_s=self.blocked_s,
            joining_s=self.joining_s,
            paused_s=self.paused_s,
            abandoned_tokens=round(self.abandoned_tokens),
            paused=self.pausing(now),
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            bytes_whole=self.bytes_whole,
            prepared_s=self.prepared_s,
            first_step_s=self.first_step_s,
        )


def whole(tokens: SupportsIndex) -> int:
    """Returns the `tokens` argument of `step` as an integer. Raises LearnerError if it is not a number of tokens."""
    try:
        count = -1 if isinstance(tokens, bool) else operator.index(tokens)
    except TypeError:
        count = -1
    if not 0 <= count <= MAX_TOKENS:
        raise LearnerError(
            f"step() got tokens={tokens!r}, which is not an integer from 0 to {MAX_TOKENS}: pass the number of "
            "tokens in this step"
        )
    return count


def number(loss: SupportsFloat) -> float:
    """Returns the `loss` argument of `step` as a float. Raises LearnerError if it is not one number."""
    try:
        return float(loss.detach() if hasattr(loss, "detach") else loss)
    except (TypeError, ValueError) as error:
        raise LearnerError(
            f"step() got a loss of type {type(loss).__name__}, not one number: pass one number, or omit loss"
        ) from error


class LearnerMetrics(Collector):
    """Exports this process's counters to Prometheus."""

    def __init__(self, counters: Counters, name: str, region: str) -> None:
        self._counters = counters
        self._name = name
        self._region = region

    def collect(self) -> Iterator[Metric]:
        """Yields one metric per counter. Prometheus calls this at each scrape."""
        c = self._counters
        for name, text, value in (
            ("atoll_local_inner_steps", "Inner steps", c.steps),
            ("atoll_local_tokens", "Tokens trained", c.tokens),
            ("atoll_local_stepping_seconds", "Seconds in inner steps", c.stepping_s),
            ("atoll_local_blocked_seconds", "Seconds inside Learner.step()", c.blocked_s),
            ("atoll_local_paused_seconds", "Seconds in Learner.pause() or while the run is paused", c.paused_s),
            ("atoll_local_merged", "Contributions merged", c.merged),
            ("atoll_local_refused", "Contributions refused", c.refused),
            ("atoll_local_reconnects", "Lost connections to the core", c.reconnects),
            ("atoll_local_checkpoints", "Checkpoints saved", c.checkpoints),
            ("atoll_local_failed_checkpoints", "Checkpoints that could not be saved", c.checkpoints_failed),
        ):
            yield self._counter(name, text, {"": value})
        directions: dict[str, float] = {"up": c.bytes_up, "down": c.bytes_down, "whole": c.bytes_whole}
        yield self._counter(
            "atoll_local_payload_bytes",
            "Payload bytes by direction: up, down, or whole (whole fragments and initial parameters)",
            directions,
        )
        streams = GaugeMetricFamily("atoll_local_open_calls", "Open streams to the core", labels=["learner", "method"])
        for method, count in sorted(calls.open_calls().items()):
            streams.add_metric([self._name, method], count)
        yield streams
        for name, text, value in (
            ("atoll_local_loss", "Latest training loss", c.loss),
            ("atoll_local_step_seconds", "Smoothed duration of an inner step", c.step_time_s),
            ("atoll_local_pending", "Contributions in flight", c.pending),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["learner"])
            gauge.add_metric([self._name], value)
            yield gauge
        text = "1 if connected to the core, else 0"
        connected = GaugeMetricFamily("atoll_local_connected", text, labels=["learner", "region"])
        connected.add_metric([self._name, self._region], float(c.connected))
        yield connected

    def _counter(self, name: str, text: str, values: dict[str, float]) -> Metric:
        plain = list(values) == [""]
        counter = CounterMetricFamily(name, text, labels=["learner"] if plain else ["learner", "direction"])
        for direction, value in values.items():
            counter.add_metric([self._name] if plain else [self._name, direction], value)
        return counter

    def serve(self, address: str, security: TransportSecurity, *, plaintext: bool) -> Callable[[], None]:
        """Serves metrics and readiness at HOST:PORT, and returns a function that stops the server.

        plaintext: whether addresses other than loopback are allowed. Raises MetricsServerError if this fails.
        """
        metrics_server.check(address, plaintext=plaintext)
        registry = CollectorRegistry()
        registry.register(self)
        registry.register(CertificateExpiry(partial(expiry_times, security)))
        ProcessCollector(registry=registry)
        return metrics_server.serve(registry, address, lambda: "", self._not_ready).end

    def _not_ready(self) -> str:
        """Returns the reason why the learner is not ready, or "".

        After joining, the learner stays ready, because it can train without the core.
        """
        return "" if self._counters.joining_s else "the learner has not joined the run yet"
