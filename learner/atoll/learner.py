"""The class `atoll.Learner`: three added lines make a PyTorch training loop a learner of a run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import structlog
import torch
from atoll_wire import forking
from atoll_wire.layout.layout import Layout
from atoll_wire.process import allocator
from atoll_wire.process.clock import SYSTEM
from atoll_wire.process.metrics_server import MetricsServerError
from atoll_wire.security.transport import TransportSecurity
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from atoll import started_learners
from atoll.agent.join_request import Identity, ModelDescription, own_name, process_age_s
from atoll.agent.thread import Agent
from atoll.boundary.host_values import host_coder
from atoll.boundary.local_parameters import LocalParameters
from atoll.boundary.movement_watch import MovementWatch
from atoll.boundary.replicas import ReplicaCheck
from atoll.boundary.round_answers import RoundAnswers
from atoll.boundary.skipped_steps import SkippedSteps
from atoll.boundary.step_boundary import StepBoundary
from atoll.checkpoints.directory import RunFacts
from atoll.checkpoints.learner_checkpoints import NO_DIRECTORY, LearnerCheckpoints
from atoll.checkpoints.learner_state import HasState
from atoll.checkpoints.settings import checkpoint_settings
from atoll.data.leased_units import LeasedUnits
from atoll.data.sources import Source
from atoll.data.unit_log import UnitLog
from atoll.data.units import Units, check_single, declaration
from atoll.device.device_coder import DeviceCoder, coding_device
from atoll.errors import LearnerError
from atoll.fragments.adoption import PreparedAnchor
from atoll.fragments.exchange import ThreadExchange
from atoll.model.first_file import FirstFile
from atoll.model.optimizer_copies import Pairs
from atoll.model.parameters import Optimizers, Parameters
from atoll.model.samples import ParameterSamples
from atoll.ranks.division import Division, divide
from atoll.ranks.entering import Stage, gathered_parts, next_stage, of_leader
from atoll.ranks.messages import messages
from atoll.ranks.rank_group import RankGroup, rank_group
from atoll.started_learners import StartedLearner
from atoll.stats import Counters, LearnerMetrics, Stats, number, whole
from atoll.step_times import StepTimes

Part = TypeVar("Part")
log = structlog.get_logger()

ENTER_S = 0.1  # seconds between checks of whether all ranks have their first anchors
NOT_STARTED = "the learner was not started: use `with atoll.Learner(...) as learner`, or call start()"
ONCE = "a Learner can be started only once: create a new Learner to join again"
NO_FORKS = (
    "this process cannot fork while it is a learner: grpc was imported before atoll; import atoll first, or start the "
    f"process with {forking.SETTING}=0"
)
LEFT = "the learner has left the run: use it before close() or the end of the block, or create a new Learner"
OTHER_THREAD = (
    "step() was called in thread {}, but thread {} started the learner: call step() in the thread that started it"
)


class Learner:
    """Connects a PyTorch training loop to a run, and exchanges fragments with other learners while the loop trains.

    Entering the `with` block joins the run and sets the model's trainable parameters to the run's values. Joining
    waits up to `connect_timeout_s` seconds for a core. Leaving the block sends outstanding work, waits up to `drain_s`
    seconds for the core's acknowledgement, and leaves the run. If the block raised an exception, no outstanding work is
    sent. `start` and `close` do the same without a block.

    A parameter is trainable if it requires gradients and an optimizer updates it. With several ranks, every rank
    creates a Learner and calls `step`. Data loaders may fork at any time if the program imports atoll before grpc.

    Args:
        model: The model, with any wrapper except FSDP1.
        optimizer: The optimizer, or a list of all optimizers.
        server: HOST:PORT of a core or front, or several such addresses, which the learner tries in turn.
        name: The learner's name, unique in the run. Default: REGION.HOSTNAME.
        region: The learner's region, shown in status and metrics.
        unshared: Names or patterns ("teacher.*") of parameters that the run does not share.
        copies: A function that returns (parameter, copy) pairs. It must return the copies that an optimizer keeps
            outside its state, such as float32 master weights.
        send_frozen: Whether the run's first learner also sends the frozen parameters, which makes exported models
            complete. Otherwise, an export lists the names of the missing frozen parameters. All learners must load the
            same frozen values.
        adoption: "rebase" keeps outstanding work when a new version arrives; "overwrite" drops it.
        connect_timeout_s: Longest wait for a core when joining, in seconds.
        drain_s: Longest wait for acknowledgements when leaving, in seconds.
        same_batch: The mesh of ranks that train on the same batch, as with tensor parallelism. The batch's tokens
            count once.
        checkpoint_dir: Directory of this learner's checkpoints, which are in a folder with the learner's name. When the
            learner joins, it restores the optimizers and extra_state from this run's newest checkpoint. Joining raises
            LearnerError if another learner of this name uses the directory. All ranks need the same directory.
        checkpoint_every_s: Seconds between checkpoints. If None, the learner saves only after `save_checkpoint`.
        extra_state: Other objects to save, by name, such as a scheduler or a data loader. Each needs state_dict() and
            load_state_dict(). `atoll.RandomState()` holds the random generators.
        metrics_listen: HOST:PORT of the Prometheus metrics server. None starts no server.
        metrics_plaintext: Allow addresses other than loopback for metrics, over plain HTTP.
        tls: Directory of certificates from `atoll certs`. Without it, only loopback addresses are allowed.
        insecure_plaintext: Allow server addresses other than loopback without TLS.

    Raises:
        LearnerError: If an argument is invalid, or if the learner cannot join.

    Example:
        ```python
        with atoll.Learner(model, optimizer, server="127.0.0.1:7070", name="eu-west") as learner:
            for batch in loader:
                ...  # your training loop, unchanged
                learner.step(tokens=batch.numel())  # after optimizer.step()
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        server: str | Sequence[str],
        name: str = "",
        *,
        region: str = "",
        unshared: Collection[str] = (),
        copies: Pairs = tuple,
        send_frozen: bool = False,
        adoption: Literal["rebase", "overwrite"] = "rebase",
        connect_timeout_s: float = 600.0,
        drain_s: float = 30.0,
        same_batch: DeviceMesh | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every_s: float | None = 600.0,
        extra_state: Mapping[str, HasState] | None = None,
        metrics_listen: str | None = None,
        metrics_plaintext: bool = False,
        tls: str | Path | None = None,
        insecure_plaintext: bool = False,
    ) -> None:
        if adoption not in {"rebase", "overwrite"}:
            raise LearnerError(f'adoption="{adoption}" is not supported: use "rebase" or "overwrite"')
        self._model = model
        self._optimizer = optimizer
        self._unshared = unshared
        self._copies = copies
        self._same_batch = same_batch
        addresses = [server] if isinstance(server, str) else list(server)
        security = TransportSecurity(None if tls is None else Path(tls), insecure_plaintext)
        self._identity = Identity(name or own_name(region), region, addresses, connect_timeout_s, security)
        self._keep = adoption == "rebase"
        self._drain_s = drain_s
        self._metrics = (metrics_listen, metrics_plaintext)
        self._sends_frozen = send_frozen
        self._leaving = contextlib.ExitStack()  # closed when this learner leaves
        self._clock = SYSTEM
        self._counters = Counters()
        self._exchange = ThreadExchange(self._clock)
        settings = checkpoint_settings(checkpoint_dir, checkpoint_every_s, extra_state)
        self._checkpoints: LearnerCheckpoints | None = None
        if settings is not None:
            self._checkpoints = LearnerCheckpoints(settings, self._identity.name, self._counters, self._clock)
        self._process = os.getpid()
        self._thread: threading.Thread | None = None  # the thread that started this learner
        self._ranks: RankGroup | None = None
        self._coder: DeviceCoder | None = None
        self._agent: Agent | None = None
        self._parameters: Parameters | None = None
        self._boundary: StepBoundary | None = None
        self._units: dict[str, Units] = {}  # by name of the dataset
        self._unit_log = UnitLog()
        self._watch: MovementWatch | None = None
        self._skips: SkippedSteps | None = None
        self._times = StepTimes(self._counters, self._clock)
        self._left = False
        self._carried = 0  # tokens of skipped steps since the last step that was taken

    def __enter__(self) -> Learner:
        return self.start()

    def start(self) -> Learner:
        """Joins the run, as entering the `with` block does. Call `close` afterwards, for example in a notebook.

        If this thread has not closed an earlier learner of the same name and servers, that learner leaves the run
        first. If the process ends without `close`, the learner leaves the run without sending outstanding work. SIGTERM
        has the same effect, unless the program handles this signal.

        Returns:
            This learner.

        Raises:
            LearnerError: If the learner cannot join, or was started before.

        Example:
            ```python
            learner = atoll.Learner(model, optimizer, server="127.0.0.1:7070", name="eu-west").start()
            train(model, optimizer, learner)  # calls learner.step() after each optimizer step
            learner.close()
            ```
        """
        if self._thread is not None:
            raise LearnerError(ONCE)
        self._thread = threading.current_thread()
        self._process = os.getpid()
        identity = self._identity
        mine = StartedLearner(identity.name, identity.addresses, lambda: self.close(drain=False), self._leave_at_once)
        started_learners.add(mine)
        self._leaving.callback(started_learners.remove, mine)
        try:
            return self._start()
        except BaseException:
            self._left = True
            self._leaving.close()  # even after Ctrl-C, because the agent would otherwise retry forever
            if self._checkpoints is not None:
                self._checkpoints.release()
            raise

    def _start(self) -> Learner:
        began, self._counters.prepared_s = self._clock.monotonic(), process_age_s(self._clock)
        self._parameters = Parameters(self._model, self._optimizer, self._unshared, self._copies)
        self._ranks = rank_group(counts=self._parameters.counts_tokens(self._same_batch))
        if self._ranks.is_leader:
            self._parameters.warn(self._identity.name)
        with self._parameters.copies.following(self._parameters.values, restart=True):
            self._join(self._parameters, self._ranks)
        allocator.trim()  # ranks that send the initial parameters free many tensors, which glibc would keep
        if self._checkpoints is not None:
            self._checkpoints.begin(self._parameters, self._ranks, self._run_facts)
        self._skips = SkippedSteps(self._parameters.values)
        self._skips.begin()
        self._leaving.callback(self._skips.end)
        if self._ranks.is_leader:
            self._say_joined(self._parameters)
        self._counters.joining_s = self._clock.monotonic() - began
        self._times.begin()
        return self

    def _say_joined(self, parameters: Parameters) -> None:
        """Logs that the learner has joined, and what happened to the model's parameters."""
        began = self._mine(self._agent).began_run
        log.info(
            f"joined at {self.run_tokens:,} tokens: the model "
            + ("gave the run its initial parameters" if began else "now has the run's parameters"),
            learner=self._identity.name,
            trainable=parameters.trainable(),
            earlier_tokens=self._counters.earlier_tokens,
        )

    def _join(self, parameters: Parameters, ranks: RankGroup) -> None:
        """Waits for the first anchors on all ranks, and writes them into the model. Raises LearnerError on failure."""
        device = coding_device(parameters.values)
        self._coder = DeviceCoder(device) if ranks.connect(device) and device is not None else None
        parts = gathered_parts(parameters.tensors, parameters.parts, ranks)
        file = FirstFile(parameters, ranks, frozen=self._sends_frozen)
        model = ModelDescription(parameters.tensors, parameters.frozen_digest(), file.write)
        self._leaving.callback(file.end)
        agent = self._begin(model, ranks)
        while True:
            state = agent if isinstance(agent, LearnerError) else agent.wait_ready(ENTER_S)
            stage = next_stage(ranks, state, file=file.wanted)
            if stage is Stage.READY and isinstance(agent, Agent):
                break
            if stage is Stage.FILE:
                file.write_together()
        divisions = [divide(fragment, parts, ranks.rank) for fragment in agent.layout.fragments]
        anchors = self._exchange.take_first(of_leader(ranks, self._exchange.choose_first()))
        replicas = ReplicaCheck(parameters.values, divisions, parts, ranks.rank) if ranks.size > 1 else None
        self._take_over(parameters, agent.layout, agent, divisions, anchors, replicas)

    def _begin(self, model: ModelDescription, ranks: RankGroup) -> Agent | LearnerError:
        """Starts the agent. Returns it, or the error if this rank cannot join."""
        between = messages(ranks)
        address, plaintext = self._metrics
        if address is not None and ranks.is_leader:
            try:
                metrics = LearnerMetrics(self._counters, self._identity.name, self._identity.region)
                self._leaving.callback(metrics.serve(address, self._identity.security, plaintext=plaintext))
            except MetricsServerError as error:
                return LearnerError(str(error))
        if problem := self._identity.problem():
            return problem
        if self._checkpoints is not None and ranks.is_leader:
            try:
                self._checkpoints.lock()
            except LearnerError as error:
                return error
        self._leaving.callback(lambda: self._counters.left(self._exchange.unsettled))
        self._leaving.enter_context(forking.refused(LearnerError(NO_FORKS)))
        coder = self._coder or host_coder(ranks)
        self._agent = Agent(self._identity, model, self._exchange, self._counters, self._clock, between, coder)
        self._leaving.callback(self._agent.leave)
        self._agent.start()
        return self._agent

    def _take_over(
        self,
        parameters: Parameters,
        layout: Layout,
        agent: Agent,
        divisions: Sequence[Division],
        anchors: Sequence[PreparedAnchor],
        replicas: ReplicaCheck | None = None,
    ) -> None:
        """Writes the run's first anchors into the model, and starts to watch the parameters."""
        ranks = self._mine(self._ranks)
        if ranks.is_leader:
            self._watch = MovementWatch(ParameterSamples(parameters.values, divisions))
            self._leaving.callback(self._watch.end)
        local = LocalParameters(
            parameters.values, divisions, agent.run_codec, anchors, keep=self._keep, ranks=ranks, coder=self._coder
        )
        rounds = RoundAnswers(local, self._exchange, self._counters, agent.submit, self._unit_log)
        self._boundary = StepBoundary(
            self._identity.name,
            layout,
            parameters,
            local,
            rounds,
            self._watch,
            self._exchange,
            self._counters,
            ranks,
            self._clock,
            self._agent_failure,
            self._checkpoints,
            replicas,
        )
        self._boundary.seen(range(len(layout.fragments)))
        self._boundary.agree_on_tokens()

    def _run_facts(self) -> RunFacts:
        agent = self._mine(self._agent)
        run, generation = agent.run
        return RunFacts(run, agent.layout.fingerprint.hex(), generation)

    def _agent_failure(self) -> LearnerError | None:
        if os.getpid() != self._process:
            return LearnerError(
                "this process is a fork of the learner's process: use the learner only in the process that started it"
            )
        return self._agent.failure if self._agent is not None else None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Sends outstanding work, unless the loop raised an exception, and leaves the run."""
        self.close(drain=kind is None)

    def close(self, *, drain: bool = True) -> None:
        """Leaves the run, as the end of the `with` block does. Repeated calls, and calls before `start`, do nothing.

        Args:
            drain: Send outstanding work first, and wait up to `drain_s` seconds for the core's acknowledgement. Pass
                False after an error in the loop, because the error may have interrupted an optimizer step. Under
                torchrun, all ranks must pass the same value.
        """
        # A forked child may leave its copy of the block, but the learner belongs to the parent.
        if os.getpid() != self._process or self._left or self._thread is None:
            return
        self._left = True
        try:
            self._close(is_clean=drain)
        finally:
            if self._checkpoints is not None:
                self._checkpoints.release()

    def _leave_at_once(self) -> None:
        """Leaves the run without sending outstanding work, because the process ends."""
        if os.getpid() == self._process and self._agent is not None:
            self._agent.leave()

    def _close(self, *, is_clean: bool) -> None:
        with self._leaving:  # Ctrl-C ends the wait, but the learner still leaves the run
            if is_clean and self._boundary is not None and self._boundary.failure() is None:
                self._boundary.drain(self._drain_s)
                if self._mine(self._ranks).is_leader:
                    self._mine(self._parameters).warn_of_buffers(self._identity.name)
        if self._checkpoints is not None:
            if is_clean:
                self._checkpoints.finish(self.run_tokens, self._drain_s)
            self._checkpoints.end()
        if self._boundary is not None:
            self._boundary.local.forget()
        if is_clean:
            self._mine(self._ranks).leave()
            if self._checkpoints is not None:
                self._checkpoints.close()

    def step(self, tokens: int, loss: float | None = None) -> None:
        """Takes pseudo-gradients that are due, and adopts newer versions. Call this after each optimizer step.

        `step` does not wait for the core, except while an operator has paused the run. Several ranks agree on
        the next actions with a small all-reduce, which runs while the model trains. If no optimizer took a step since
        the last call, for example because a gradient scaler skipped it, the call counts no step. Its tokens count with
        the next step. For a fused optimizer with a scaler, the call waits for the GPU.

        A loop may catch an exception that a signal handler raises in `step`, and continue: the next call finishes the
        work. With several ranks, or if the exception interrupted an adoption, the next call raises LearnerError.

        Args:
            tokens: Number of tokens that this rank trained on in this step.
            loss: The training loss, shown in status and metrics. If it is a GPU tensor, `step` waits for the GPU.

        Raises:
            LearnerError: If this learner cannot continue, for example because the core fenced or evicted it. Also if a
                thread other than the one that started the learner calls `step`.

        Example:
            ```python
            optimizer.step()
            learner.step(tokens=batch.numel(), loss=loss.item())
            ```
        """
        tokens, loss = whole(tokens), None if loss is None else number(loss)
        if self._left:
            raise LearnerError(LEFT)
        boundary = self._mine(self._boundary)
        if self._thread is not None and self._thread is not (here := threading.current_thread()):
            raise LearnerError(OTHER_THREAD.format(here.name, self._thread.name))
        came_at = self._times.came(loss)
        skipped = self._skips is not None and self._skips.skipped()
        self._counters.skipped += skipped
        tokens, self._carried = (0, self._carried + tokens) if skipped else (self._carried + tokens, 0)
        if not skipped:
            self._unit_log.stepped(self._counters.steps + 1)
        grad = torch.is_grad_enabled()
        try:
            stood_s = boundary.step(tokens, int(not skipped))
        except BaseException:
            torch.set_grad_enabled(grad)  # an exception of a signal handler may interrupt `torch.no_grad` itself
            raise
        if self._skips is not None:
            self._skips.settled()
        self._times.left(came_at, stood_s)

    def units(self, source: Source, name: str, *, seed: int = 0, epochs: int = 1, lag: int = 0) -> Units:
        """Returns the samples of the data units that the core leases to this learner. Call this inside the block.

        In each epoch, each unit is consumed once, whichever learner trains on it (see `atoll.data`).

        Args:
            source: The data, such as `atoll.data.Rows` or `atoll.data.TokenFile`.
            name: The dataset's name. All learners need the same source, seed and epochs for it.
            seed: Decides the order of units, which differs between epochs.
            epochs: Number of times that the run trains on each unit.
            lag: Number of steps by which the loop's loader is ahead of training.

        Raises:
            LearnerError: If the learner has several ranks, or already uses a dataset of this name.

        Example:
            ```python
            units = learner.units(atoll.data.Rows(dataset, unit=64), "text", epochs=2)
            ```
        """
        check_single(self._mine(self._ranks).size)
        if name in self._units:
            raise LearnerError(f'dataset "{name}" is already in use: reuse the result of units(), or use another name')
        declared = declaration(source, name, seed, epochs)
        agent, pause = self._mine(self._agent), self._times.pause
        leased = LeasedUnits(declared, agent, self._unit_log, lag, self._agent_failure, pause)
        self._units[name] = Units(source, leased, declared)
        return self._units[name]

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager for evaluation or deliberate throttling between steps.

        Time in the block counts neither as useful nor as lost. Inside the block, you may move parameters to another
        device. Move them back before the block ends.

        Example:
            ```python
            with learner.pause():
                evaluate(model)
            ```
        """
        with self._times.pause() as is_outermost:
            if is_outermost and self._boundary is not None and self._mine(self._parameters).on_accelerator():
                self._boundary.local.forget()  # so that the old memory of moved parameters is freed
                if self._watch is not None:
                    self._watch.forget()
            yield

    def leave_soon(self) -> None:
        """Makes `step` return even while the run is paused. Call this in a signal handler, then end the loop.

        Example:
            ```python
            signal.signal(signal.SIGTERM, lambda *_: learner.leave_soon())
            ```
        """
        self._exchange.excused = True

    def save_checkpoint(self) -> None:
        """Requests a checkpoint at the end of the next `step`, or of a later one while another is being written.

        That step copies the state. A background thread then writes it. With several ranks, one rank's call is enough,
        and the ranks agree on the step. Leaving the run also saves a requested checkpoint, unless the block raised an
        exception.

        Raises:
            LearnerError: If the learner has left the run, or has no `checkpoint_dir`.

        Example:
            ```python
            learner.save_checkpoint()  # before a planned stop
            ```
        """
        if self._left:
            raise LearnerError(LEFT)
        if self._checkpoints is None:
            raise LearnerError(NO_DIRECTORY)
        self._checkpoints.request()

    @property
    def run_tokens(self) -> int:
        """The run's training tokens so far, for learning rate schedules.

        The value is updated in `step`, and is the same on all ranks.
        """
        return self._boundary.run_tokens if self._boundary is not None else 0

    @property
    def total_tokens(self) -> int:
        """The run's target of training tokens (the core's --total-tokens), for schedules. 0 means no target."""
        return self._boundary.total_tokens if self._boundary is not None else 0

    def stats(self) -> Stats:
        """Returns the current values of this learner's counters, without waiting.

        Example:
            ```python
            print(f"{learner.stats().merged} contributions merged")
            ```
        """
        tracks = self._boundary.local.tracks if self._boundary is not None else []
        return self._counters.stats(self.run_tokens, tuple(track.version for track in tracks))

    @staticmethod
    def _mine(part: Part | None) -> Part:
        if part is None:
            raise LearnerError(NOT_STARTED)
        return part
