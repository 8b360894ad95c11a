"""`atoll.Learner`: three lines turn a PyTorch training loop into a learner of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch
from atoll_wire import forking
from atoll_wire.layout.layout import Layout
from atoll_wire.process.clock import SYSTEM
from atoll_wire.process.metrics_server import MetricsServerError
from atoll_wire.security.transport import TransportSecurity
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from atoll.agent.join_request import Identity, ModelDescription, own_name, process_age_s
from atoll.agent.thread import Agent
from atoll.boundary.first_file import FirstFile
from atoll.boundary.local_parameters import LocalParameters
from atoll.boundary.movement_watch import MovementWatch
from atoll.boundary.optimizer_copies import Pairs
from atoll.boundary.parameters import Optimizers, Parameters
from atoll.boundary.round_answers import RoundAnswers
from atoll.boundary.samples import ParameterSamples
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
from atoll.fragments import segments
from atoll.fragments.adoption import PreparedAnchor
from atoll.fragments.exchange import ThreadExchange
from atoll.ranks.division import Division, divide
from atoll.ranks.entering import Stage, gathered_parts, next_stage, of_leader
from atoll.ranks.messages import messages
from atoll.ranks.rank_group import RankGroup, rank_group
from atoll.stats import Counters, LearnerMetrics, Stats, number, whole

Part = TypeVar("Part")

ENTER_S = 0.1  # seconds between checks of whether all ranks have their first anchors
NOT_ENTERED = "the learner was not entered: use it as `with atoll.Learner(...) as learner`"
NO_FORKS = (
    "this process cannot fork while it is a learner: grpc was imported before atoll; import atoll first, or start the "
    f"process with {forking.SETTING}=0"
)
LEFT = "the learner has left the run: call step() inside the with block, or create a new Learner to join again"


class Learner:
    """Connects a PyTorch training loop to a run. It exchanges fragments with other learners while the loop trains.

        with atoll.Learner(model, optimizer, server="localhost:7070", name="eu-west") as learner:
            for batch in loader:
                ...                                   # your training loop, unchanged
                learner.step(tokens=batch.numel())    # after optimizer.step()

    Entering the block joins the run and sets the model's trainable parameters to the run's values. It waits up to
    `connect_timeout_s` seconds for a core. Leaving the block sends outstanding work, waits up to `drain_s` seconds for
    the core's acknowledgement, and leaves the run. A parameter is trainable if it requires gradients and an optimizer
    updates it. Under torchrun, every rank creates a Learner and calls `step`. Data loaders may fork at any time if the
    program imports atoll before grpc. Raises LearnerError for invalid arguments.

    Arguments:
        optimizer: the optimizer, or a list of all optimizers.
        server: HOST:PORT of a core or front, or several addresses, which are tried in turn.
        name: the learner's name, unique in the run. Default: REGION.HOSTNAME.
        region: the learner's region, shown in status and metrics.
        unshared: names or patterns ("teacher.*") of parameters that the run does not share.
        copies: a function that returns (parameter, copy) pairs. It must return the copies that an optimizer keeps
            outside its state, such as float32 master weights.
        adoption: "rebase" keeps outstanding work when a new version arrives; "overwrite" drops it.
        same_batch: the mesh of ranks that train on the same batch, as with tensor parallelism. Their tokens count once.
        checkpoint_dir: directory for this learner's checkpoints, in a folder of its name. At entry, the learner
            restores the optimizers and extra_state from the newest checkpoint of this run. It raises LearnerError if
            another learner of this name uses the directory. Under torchrun, all ranks need the same directory.
        checkpoint_every_s: seconds between checkpoints. None saves only after `save_checkpoint`.
        extra_state: more objects to save, by name, such as a scheduler or a data loader. Each needs state_dict() and
            load_state_dict(). `atoll.RandomState()` holds the random generators.
        metrics_listen: HOST:PORT of the Prometheus endpoint.
        metrics_plaintext: allow addresses other than loopback for metrics, over plain HTTP.
        tls: directory of certificates from `atoll certs`. Without it, only loopback addresses are allowed.
        insecure_plaintext: allow server addresses other than loopback without TLS.
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
        self._leaving = contextlib.ExitStack()  # closed when this learner leaves
        self._clock = SYSTEM
        self._counters = Counters()
        self._exchange = ThreadExchange(self._clock)
        settings = checkpoint_settings(checkpoint_dir, checkpoint_every_s, extra_state)
        self._checkpoints: LearnerCheckpoints | None = None
        if settings is not None:
            self._checkpoints = LearnerCheckpoints(settings, self._identity.name, self._counters, self._clock)
        self._process = os.getpid()
        self._ranks: RankGroup | None = None
        self._coder: DeviceCoder | None = None
        self._agent: Agent | None = None
        self._parameters: Parameters | None = None
        self._boundary: StepBoundary | None = None
        self._units: dict[str, Units] = {}  # by name of the dataset
        self._unit_log = UnitLog()
        self._watch: MovementWatch | None = None
        self._left = self._rests = False
        self._left_step_at = 0.0
        self._paused_since_step = 0.0

    def __enter__(self) -> Learner:
        """Joins the run. Raises LearnerError if joining fails."""
        if self._ranks is not None:
            raise LearnerError("a Learner can be entered only once: create a new Learner to join again")
        self._process = os.getpid()
        began, self._counters.prepared_s = self._clock.monotonic(), process_age_s(self._clock)
        self._parameters = Parameters(self._model, self._optimizer, self._unshared, self._copies)
        self._ranks = rank_group(counts=self._parameters.counts_tokens(self._same_batch))
        if self._ranks.is_leader:
            self._parameters.warn(self._identity.name)
        try:
            with self._parameters.copies.following(self._parameters.values, restart=True):
                self._join(self._parameters, self._ranks)
            if self._checkpoints is not None:
                self._checkpoints.begin(self._parameters, self._ranks, self._run_facts)
        except BaseException:
            self._leaving.close()  # even after Ctrl-C, because the agent would otherwise retry forever
            if self._checkpoints is not None:
                self._checkpoints.release()
            raise
        self._counters.joining_s = self._clock.monotonic() - began
        self._left_step_at = self._clock.monotonic()
        return self

    def _join(self, parameters: Parameters, ranks: RankGroup) -> None:
        """Waits for the first anchors on all ranks, and writes them into the model. Raises LearnerError on failure."""
        device = coding_device(parameters.values)
        self._coder = DeviceCoder(device) if ranks.connect(device) and device is not None else None
        parts = gathered_parts(parameters.tensors, parameters.parts, ranks)
        file = FirstFile(parameters, ranks)
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
        anchors = self._exchange.take_first(of_leader(ranks, self._exchange.first()))
        self._take_over(parameters, agent.layout, agent, divisions, anchors)

    def _begin(self, model: ModelDescription, ranks: RankGroup) -> Agent | LearnerError:
        """Starts the agent. Returns it, or the error if this rank cannot join."""
        between = messages(ranks)
        address, plaintext = self._metrics
        if address is not None and ranks.is_leader:
            try:
                metrics = LearnerMetrics(self._counters, self._identity.name)
                self._leaving.callback(metrics.serve(address, plaintext=plaintext))
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
        coder = self._coder or segments
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
                "this process is a fork of the learner's process: call step() in the process that entered the learner"
            )
        return self._agent.failure if self._agent is not None else None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Sends outstanding work, unless the loop raised an exception, and leaves the run."""
        if os.getpid() != self._process:
            return  # a forked child left its copy of the block, but the learner belongs to the parent
        self._left = True
        try:
            self._leave(is_clean=kind is None)
        finally:
            if self._checkpoints is not None:
                self._checkpoints.release()

    def _leave(self, *, is_clean: bool) -> None:
        with self._leaving:  # Ctrl-C ends the wait, but the learner still leaves the run
            if is_clean and self._boundary is not None and self._boundary.failure() is None:
                self._boundary.drain(self._drain_s)
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

        tokens: number of tokens that this rank trained on in this step.
        loss: shown in status and metrics. If it is a GPU tensor, `step` waits for the GPU.

        `step` does not wait for the core, except while an operator has paused the run. Under torchrun, ranks agree on
        the next actions with a small all-reduce, which runs while the model trains.

        Raises LearnerError if this learner cannot continue, for example because the core fenced or evicted it. A loop
        may catch an exception that a signal handler raises in `step`, and continue: the next call finishes the work.
        With several ranks, or if the exception interrupted an adoption, the next call raises LearnerError instead.
        """
        began, counters = self._clock.monotonic(), self._counters
        tokens, loss = whole(tokens), None if loss is None else number(loss)
        if self._left:
            raise LearnerError(LEFT)
        boundary = self._mine(self._boundary)
        self._unit_log.stepped(counters.steps + 1)
        counters.stepped(began - self._left_step_at, self._paused_since_step, loss)
        self._left_step_at, self._paused_since_step = began, 0.0
        grad = torch.is_grad_enabled()
        try:
            stood_s = boundary.step(tokens)
        except BaseException:
            torch.set_grad_enabled(grad)  # an exception of a signal handler may interrupt `torch.no_grad` itself
            raise
        self._left_step_at = self._clock.monotonic()
        counters.blocked_s += self._left_step_at - began - stood_s

    def units(self, source: Source, name: str, *, seed: int = 0, epochs: int = 1, lag: int = 0) -> Units:
        """Returns the samples of the data units that the core leases to this learner. Call this inside the block.

        One learner of the run trains each unit of each epoch (see `atoll.data`). Raises LearnerError under torchrun.

        source: the data, such as `atoll.data.Rows` or `atoll.data.TokenFile`. name: of the dataset in the run; all
        learners need the same source, seed and epochs for it. seed: of the order of units, which differs between
        epochs. lag: number of steps that the loop's loader is ahead of training, such as 1 for Accelerate's.
        """
        check_single(self._mine(self._ranks).size)
        if name in self._units:
            raise LearnerError(f'dataset "{name}" is already in use: keep what units() returned, or use another name')
        declared = declaration(source, name, seed, epochs)
        leased = LeasedUnits(declared, self._mine(self._agent), self._unit_log, lag, self._agent_failure)
        self._units[name] = Units(source, leased, declared)
        return self._units[name]

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager for evaluation or deliberate throttling between steps.

        Time in the block counts neither as useful nor as lost.

        Inside the block, you may move parameters to another device. Move them back before the block ends.
        """
        if self._rests:  # inside another pause, which counts the time
            yield
            return
        began = self._counters.resting_since = self._clock.monotonic()
        self._rests = self._counters.paused = True
        try:
            if self._boundary is not None and self._mine(self._parameters).on_accelerator():
                self._boundary.local.forget()  # so that the old memory of moved parameters is freed
                if self._watch is not None:
                    self._watch.forget()
            yield
        finally:
            self._rests = self._counters.paused = False
            self._counters.resting_since = None
            self._paused_since_step += self._counters.rested(began, self._clock.monotonic())

    def leave_soon(self) -> None:
        """Makes `step` return even while the run is paused. Call this in a signal handler, then end the loop."""
        self._exchange.excused = True

    def save_checkpoint(self) -> None:
        """Asks for a checkpoint at the end of the next `step`, or of a later one while another is being written.

        That step copies the state. A background thread then writes it. Under torchrun, one rank's call is enough, and
        the ranks agree on the step. Leaving also saves a requested checkpoint, unless the block raised.
        """
        if self._left:
            raise LearnerError(LEFT)
        if self._checkpoints is None:
            raise LearnerError(NO_DIRECTORY)
        self._checkpoints.request()

    @property
    def run_tokens(self) -> int:
        """The run's training tokens so far, as known at the last step, for schedules. All ranks read the same value."""
        return self._boundary.run_tokens if self._boundary is not None else 0

    @property
    def total_tokens(self) -> int:
        """The run's target of training tokens (the core's --total-tokens), for schedules. 0: there is no target."""
        return self._boundary.total_tokens if self._boundary is not None else 0

    def stats(self) -> Stats:
        """Returns this learner's counters now, without waiting."""
        tracks = self._boundary.local.tracks if self._boundary is not None else []
        return self._counters.stats(self.run_tokens, tuple(track.version for track in tracks))

    @staticmethod
    def _mine(part: Part | None) -> Part:
        if part is None:
            raise LearnerError(NOT_ENTERED)
        return part
