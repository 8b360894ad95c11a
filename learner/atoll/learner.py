"""`atoll.Learner`: three lines turn a PyTorch training loop into a learner of a run."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import structlog
from atoll_wire import forking
from atoll_wire import outer_pb2 as pb
from atoll_wire.layout.layout import Layout, plan
from atoll_wire.process.clock import SYSTEM
from atoll_wire.process.metrics_server import MetricsServerError
from atoll_wire.security.transport import TransportSecurity
from torch import nn

from atoll.agent.join_request import Identity, ModelDescription, own_name, process_age_s
from atoll.agent.thread import Agent
from atoll.boundary.host_memory import HostMemory
from atoll.boundary.local_parameters import LocalParameters
from atoll.boundary.movement import Movement
from atoll.boundary.movement_watch import FOUND, MovementWatch
from atoll.boundary.optimizer_copies import Pairs
from atoll.boundary.parameters import Optimizers, Parameters
from atoll.boundary.ranks import GO_ON, RESTORE, STAND, STOP, Agreed, RankGroup, rank_group
from atoll.boundary.round_answers import RoundAnswers
from atoll.boundary.samples import ParameterSamples
from atoll.checkpoints.directory import RunFacts
from atoll.checkpoints.learner_checkpoints import NO_DIRECTORY, CheckpointSettings, LearnerCheckpoints
from atoll.checkpoints.learner_state import HasState
from atoll.errors import LearnerError
from atoll.fragments.exchange import BoundaryWork, DueRound, PreparedAnchor, ThreadExchange
from atoll.stats import Counters, LearnerMetrics, Stats, number, whole

log = structlog.get_logger()

# Limit on the wait for fates of contributions when a learner leaves. Open rounds close within this time. When all
# learners leave at once, no new round opens.
MIN_WAIT_S, WAIT_STEPS = 1.0, 4.0
NOT_ENTERED = "the learner was not entered: use it as `with atoll.Learner(...) as learner`"
NO_FORKS = (
    "this process cannot fork while it is a learner: grpc was imported before atoll, so gRPC's fork handlers would "
    f"crash the process or its children; import atoll before grpc, or start the process with {forking.SETTING}=0"
)
LEFT = "the learner has left the run: call step() inside the with block, or create a new Learner to join again"
STAND_S = 1.0  # while the run is paused, ranks agree again and count the paused time at least this often


class Learner:
    """Connects a PyTorch training loop to a run. It exchanges fragments with other learners while the loop trains.

        with atoll.Learner(model, optimizer, server="localhost:7070", name="eu-west") as learner:
            for batch in loader:
                ...                                   # the loop as it was
                learner.step(tokens=batch.numel())    # after optimizer.step()

    Entering the block joins the run and sets the model's trainable parameters to the run's. Entering waits for a core
    for up to `connect_timeout_s` seconds. Leaving the block sends outstanding work, waits up to `drain_s` seconds for
    its acknowledgement, and leaves the run. A parameter is trainable if it requires gradients and an optimizer updates
    it. Under torchrun, every rank creates a Learner and calls `step`. Data loaders may fork at any time if the program
    imports atoll before grpc. Wrong arguments raise LearnerError.

    Arguments:
        optimizer: the optimizer, or a list of all optimizers.
        server: HOST:PORT of a core or front, or several addresses, which are tried in turn.
        name: unique in the run. Default: REGION.HOSTNAME.
        region: the learner's region, shown in status and metrics.
        unshared: names or patterns ("teacher.*") of parameters that the run does not share.
        copies: a function that returns (parameter, copy) pairs. Name copies that an optimizer keeps outside its state,
            such as float32 masters.
        adoption: "rebase" keeps outstanding work when a new version arrives; "overwrite" drops it.
        checkpoint_dir: directory for this learner's checkpoints. Entering restores the optimizers and extra_state from
            the newest checkpoint of this run. Under torchrun, all ranks need the same directory.
        checkpoint_every_s: seconds between checkpoints. None saves only after `save_checkpoint`.
        extra_state: more objects to save, by name, such as a scheduler or a data loader. Each needs state_dict() and
            load_state_dict(). `atoll.RandomState()` holds the random generators.
        metrics_listen: HOST:PORT of the Prometheus endpoint.
        metrics_plaintext: allow metrics beyond loopback, over plain HTTP.
        tls: directory of certificates from `atoll certs`. Without it, only loopback addresses are allowed.
        insecure_plaintext: allow other addresses without TLS.
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
        directory = None if checkpoint_dir is None else Path(checkpoint_dir)
        settings = CheckpointSettings(directory, checkpoint_every_s, dict(extra_state or {}))
        self._checkpoints: LearnerCheckpoints | None = None
        if directory is not None:
            self._checkpoints = LearnerCheckpoints(settings, self._identity.name, self._counters, self._clock)
        self._process = os.getpid()
        self._rank_group: RankGroup | None = None
        self._agent: Agent | None = None
        self._parameters: Parameters | None = None
        self._layout: Layout | None = None
        self._local: LocalParameters | None = None
        self._watch: MovementWatch | None = None
        self._undone: LearnerError | None = None
        self._to_restore = False
        self._rounds: RoundAnswers | None = None
        self._left = self._rests = False
        self._agreed = Agreed(0, GO_ON, 0, 0)
        self._left_step_at = 0.0
        self._paused_since_step = 0.0

    def __enter__(self) -> Learner:
        """Joins the run. Raises LearnerError if joining fails."""
        if self._rank_group is not None:
            raise LearnerError("a Learner can be entered only once: create a new Learner to join again")
        self._process = os.getpid()
        began, self._counters.prepared_s = self._clock.monotonic(), process_age_s(self._clock)
        self._parameters = Parameters(self._model, self._optimizer, self._unshared, self._copies)
        self._parameters.warn(self._identity.name)
        self._rank_group = rank_group()
        try:
            with self._parameters.copies.following(self._parameters.values, restart=True):
                self._begin(self._parameters, self._rank_group)
            if self._checkpoints is not None:
                self._checkpoints.begin(self._parameters, self._run_facts())
        except BaseException:
            self._leaving.close()  # even after Ctrl-C, because the agent would otherwise retry forever
            raise
        self._counters.joining_s = self._clock.monotonic() - began
        self._left_step_at = self._clock.monotonic()
        return self

    def _begin(self, parameters: Parameters, ranks: RankGroup) -> None:
        problem = self._join(parameters) if ranks.is_leader else None
        # This call tells the other ranks whether rank 0 could join, and the number of fragments.
        fragments = [len(self._layout.fragments)] if self._layout and problem is None else []
        known = self._counters
        self._agreed = ranks.agree(0, GO_ON, known.run_tokens, known.total_tokens, fragments)
        if not self._agreed.adopt:
            raise problem or LearnerError("rank 0 could not join the run: see rank 0's error")
        self._layout = self._layout or plan(parameters.tensors, self._agreed.adopt[0])
        ranks.spread(parameters.values)

    def _run_facts(self) -> RunFacts | None:
        """Returns the run on rank 0, else None."""
        if self._agent is None or self._layout is None:
            return None
        run, generation = self._agent.run
        return RunFacts(run, self._layout.fingerprint.hex(), generation)

    def _join(self, parameters: Parameters) -> LearnerError | None:
        """Waits for the first anchors and writes them into the model. Returns the error, or None."""
        address, plaintext = self._metrics
        if address is not None:
            try:
                metrics = LearnerMetrics(self._counters, self._identity.name)
                self._leaving.callback(metrics.serve(address, plaintext=plaintext))
            except MetricsServerError as error:
                return LearnerError(str(error))
        if problem := self._identity.problem():
            return problem
        self._leaving.callback(lambda: self._counters.left(self._exchange.unsettled))
        model = ModelDescription(parameters.tensors, parameters.frozen_digest(), parameters.save)
        self._leaving.enter_context(forking.refused(LearnerError(NO_FORKS)))
        self._agent = Agent(self._identity, model, self._exchange, self._counters, self._clock)
        self._leaving.callback(self._agent.leave)
        self._agent.start()
        try:
            self._layout = self._agent.wait_ready()
        except LearnerError as error:
            return error
        self._exchange.clear()  # the first anchors come directly from the agent
        self._take_over(parameters, self._layout, self._agent)
        return None

    def _take_over(self, parameters: Parameters, layout: Layout, agent: Agent) -> None:
        """Writes the run's first anchors into the model, and starts to watch the parameters."""
        anchors = agent.anchors()
        self._watch = MovementWatch(ParameterSamples(parameters.values, layout.fragments))
        self._leaving.callback(self._watch.end)
        self._local = LocalParameters(
            HostMemory(parameters.values, layout.runs, agent.run_codec),
            anchors,
            keep=self._keep,
        )
        self._rounds = RoundAnswers(self._local, self._exchange, self._counters, agent.submit)
        self._watch.adopted(tuple(range(len(anchors))))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Sends outstanding work, unless the loop raised an exception, and leaves the run."""
        if os.getpid() != self._process:
            return  # a forked child leaves its copy of the block: the learner belongs to the parent
        self._left = True
        with self._leaving:  # Ctrl-C ends the wait, but the learner still leaves the run
            if kind is None and self._local and self._rounds and self._failure() is None:
                self._give_up_what_is_no_work(self._local)
                self._drain(self._local, self._rounds)
        if self._checkpoints is not None:
            self._checkpoints.end(self._drain_s if kind is None else 0.0)
        if self._local is not None:
            self._local.forget()
        if kind is None:
            self._ranks().leave()

    def _give_up_what_is_no_work(self, local: LocalParameters) -> None:
        """Drops outstanding work if the parameters were written since the last step."""
        if self._watch is not None and (verdict := self._watch.leave()) is not Movement.FINE:
            log.warning(FOUND[verdict], learner=self._identity.name, consequence="outstanding work is not sent")
            for fragment, track in enumerate(local.tracks):
                self._abandon(fragment, track.give_up(self._counters.tokens, self._counters.steps))

    def _drain(self, local: LocalParameters, rounds: RoundAnswers) -> None:
        """Sends the last pseudo-gradients, including those of fragments whose earlier contribution settles later."""
        deadline, steps = self._clock.monotonic() + self._drain_s, self._counters.steps
        rounds.hand_over()
        max_wait_s = max(MIN_WAIT_S, WAIT_STEPS * self._counters.step_time_s)
        late = min(deadline, self._clock.monotonic() + max_wait_s)
        while True:
            for fragment, track in enumerate(local.tracks):
                if track.flying is None and track.steps_from < steps and track.tokens_from < self._counters.tokens:
                    rounds.take(DueRound(fragment, 0, 0.0))
            more = self._clock.monotonic() < late and any(track.later(steps) for track in local.tracks)
            end = late if more else deadline
            settled = self._exchange.wait_settled(max(0.0, end - self._clock.monotonic()), fates=more)
            if not more or (not settled and self._clock.monotonic() < end):
                return
            todo = self._exchange.next()
            self._release(todo)
            while todo.prepared:  # the model stays unchanged, because other ranks could not follow
                newer = todo.prepared.popleft()
                self._abandon(newer.fragment, local.adopt(newer, self._counters.tokens, steps, apart=True))
            while todo.due:
                rounds.decline(todo.due.popleft(), "the learner is leaving")

    def step(self, tokens: int, loss: float | None = None) -> None:
        """Call this after each optimizer step. It takes pseudo-gradients that are due and adopts newer fragments.

        tokens: number of tokens that this rank trained in this step. loss: shown in status and metrics. Reading a GPU
        tensor waits for the GPU.

        `step` does not wait for the core, except while an operator has paused the run. Under torchrun, `step` also
        waits for the other ranks: it makes one small all-reduce, and broadcasts adopted fragments.

        Raises LearnerError if this learner cannot continue, for example because the core fenced or evicted it. A loop
        may catch an exception that a signal handler raises in `step`, and continue. The next call finishes the work.
        """
        began, counters = self._clock.monotonic(), self._counters
        tokens, loss = whole(tokens), None if loss is None else number(loss)
        if self._left:
            raise LearnerError(LEFT)
        if self._parameters is not None:
            self._parameters.check_unchanged()
        if self._watch is not None:
            self._watch.step()
        if self._rounds is not None:
            self._rounds.hand_over()
        self._decide(tokens)
        counters.stepped(began - self._left_step_at, self._paused_since_step, self._agreed.tokens, loss)
        self._paused_since_step = 0.0
        while self._agreed.request == STAND:
            began += self._stand()
            self._decide(0)
        counters.paused = False
        if self._agreed.request == STOP:
            raise self._failure() or LearnerError("rank 0 stopped: see rank 0's error")
        if self._agreed.request == RESTORE:
            self._restore()
        self._adopt(self._agreed.adopt)
        if self._rounds is not None:
            self._rounds.answer()
        if self._checkpoints is not None and self._agreed.save:
            self._checkpoints.save(self._run_facts(), self.run_tokens)
        self._left_step_at = self._clock.monotonic()
        counters.blocked_s += self._left_step_at - began

    def _decide(self, tokens: int) -> None:
        """Lets all ranks agree on the actions at this step boundary."""
        adopt, request = list[int](), GO_ON
        if self._failure() is not None:
            request = STOP
        elif self._exchange.stands:
            request = STAND
        elif (found := self._judge()) != GO_ON:
            request = found
        elif self._exchange.something or self._exchange.todo:
            todo = self._exchange.next()
            self._release(todo)
            adopt = [newer.fragment for newer in todo.prepared]
        known = self._counters.run_tokens_after(self.run_tokens)
        vote = 0 if self._checkpoints is None else self._checkpoints.vote()
        self._agreed = self._ranks().agree(tokens, request, known, self._counters.total_tokens, adopt, vote)

    def _judge(self) -> int:
        """Returns RESTORE if other code than the optimizer moved the parameters, STOP if this recurs, else GO_ON."""
        if self._watch is None or self._to_restore:
            return RESTORE if self._to_restore else GO_ON
        verdict = self._watch.judge() if self._exchange.something or self._exchange.todo else self._watch.glance()
        if verdict is Movement.FINE:
            return GO_ON
        if verdict is Movement.COPIES:
            self._undone = LearnerError(FOUND[verdict])
            return STOP
        log.warning(FOUND[verdict], learner=self._identity.name, consequence="the parameters are reset to the run's")
        self._to_restore = True  # stays set until the restore is complete, because a signal handler may raise earlier
        return RESTORE

    def _restore(self) -> None:
        """Resets all parameters to the run's, and drops outstanding work."""
        parameters = self._mine()
        with parameters.copies.following(parameters.values, restart=True):
            self._restore_anchors()
            self._ranks().spread(parameters.values)
        self._to_restore = False

    def _restore_anchors(self) -> None:
        if self._local is not None:
            fragments = range(len(self._local.tracks))
            with self._local.moving():
                for fragment in fragments:
                    given_up = self._local.restore(fragment, self._counters.tokens, self._counters.steps)
                    self._abandon(fragment, given_up)
            self._seen(fragments)

    def _seen(self, fragments: Sequence[int]) -> None:
        if self._watch is not None:
            self._watch.adopted(tuple(fragments))

    def _stand(self) -> float:
        """Waits at most STAND_S seconds while the run is paused. Returns the seconds waited.

        Other ranks wait in the all-reduce.
        """
        began, self._counters.paused = self._clock.monotonic(), True
        if self._ranks().is_leader:
            self._exchange.wait_resumed(STAND_S)
        return self._counters.rested(began, self._clock.monotonic())

    def _failure(self) -> LearnerError | None:
        """Returns the error that stops this process, or None."""
        if os.getpid() != self._process:
            return LearnerError(
                "this process is a fork of the learner's process: call step() in the process that entered the learner"
            )
        if self._local and self._local.torn:
            return LearnerError(
                "an earlier error interrupted an adoption, so the parameters may be inconsistent: restart the learner"
            )
        return self._undone or (self._agent.failure if self._agent is not None else None)

    def _adopt(self, fragments: Sequence[int]) -> None:
        """Moves fragments to their new anchors on all ranks. Only rank 0 has the anchors."""
        if not fragments:
            return
        assert self._layout is not None, "joined"
        moved = [self._mine().of(self._layout.fragments[fragment]) for fragment in fragments]
        with (
            contextlib.nullcontext() if self._local is None else self._local.moving(),
            self._mine().copies.following([parameter for group in moved for parameter in group]),
        ):
            if self._local is not None:
                self._adopt_anchors(self._local, self._exchange.todo.prepared)
            for parameters in moved:
                self._ranks().spread(parameters)
        self._seen(fragments)

    def _adopt_anchors(self, local: LocalParameters, prepared: deque[PreparedAnchor]) -> None:
        while prepared:
            newer = prepared.popleft()
            self._abandon(newer.fragment, local.adopt(newer, self._counters.tokens, self._counters.steps))
            self._exchange.adopted.append(pb.Adopted(fragment=newer.fragment, version=newer.version))

    def _release(self, todo: BoundaryWork) -> None:
        """Makes the work of refused contributions outstanding again, unless it must be dropped."""
        while todo.released:
            assert self._local is not None, "only rank 0 receives released fragments"
            self._abandon(todo.released[0], self._local.tracks[todo.released[0]].refused())
            todo.released.popleft()

    def _abandon(self, fragment: int, tokens: int) -> None:
        assert self._layout is not None, "joined"
        self._counters.abandoned_tokens += tokens * self._layout.fragments[fragment].length / self._layout.parameters

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager for evaluation or deliberate throttling between steps.

        Its time counts neither as useful nor as lost.

        Inside the block, you may move parameters to another device. Move them back before the block ends.
        """
        if self._rests:  # inside another pause, which counts the time
            yield
            return
        began = self._counters.resting_since = self._clock.monotonic()
        self._rests = self._counters.paused = True
        try:
            if self._local is not None and self._mine().on_accelerator():
                self._local.forget()  # so that the old memory of moved parameters is freed
                if self._watch is not None:
                    self._watch.forget()
            yield
        finally:
            self._rests = self._counters.paused = False
            self._counters.resting_since = None
            self._paused_since_step += self._counters.rested(began, self._clock.monotonic())

    def leave_soon(self) -> None:
        """Stops `step` from waiting while the run is paused. Call this in a signal handler, then end the loop."""
        self._exchange.excused = True

    def save_checkpoint(self) -> None:
        """Asks for a checkpoint at the end of the next `step`, or of a later one while another is being written.

        That step copies the state. A background thread then writes it. Under torchrun, one rank's call is enough.
        """
        if self._checkpoints is None:
            raise LearnerError(NO_DIRECTORY)
        self._checkpoints.request()

    @property
    def run_tokens(self) -> int:
        """Tokens that the run had trained at the last step. Use this for schedules: all ranks see the same value."""
        return self._agreed.run_tokens + self._agreed.tokens

    @property
    def total_tokens(self) -> int:
        """Tokens that the run will train (the core's --total-tokens), for schedules. 0: the core has no limit."""
        return self._agreed.total_tokens

    def stats(self) -> Stats:
        """Returns this learner's counters now, without waiting."""
        versions = () if self._local is None else tuple(track.version for track in self._local.tracks)
        return self._counters.stats(self.run_tokens, versions)

    def _mine(self) -> Parameters:
        if self._parameters is None:
            raise LearnerError(NOT_ENTERED)
        return self._parameters

    def _ranks(self) -> RankGroup:
        if self._rank_group is None:
            raise LearnerError(NOT_ENTERED)
        return self._rank_group
