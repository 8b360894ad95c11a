"""Trains the learners of a fleet in this process, with the real adoption at learners and the real merge of a core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from atoll.boundary.local_parameters import LocalParameters
from atoll.fragments.adoption import Fate, PreparedAnchor, PseudoGradient
from atoll.model.parameters import Parameters
from atoll.ranks.division import undivided
from atoll.reference import data
from atoll.reference.model import Transformer, build
from atoll.reference.train import inner_step, learning_rate, optimizer_for
from atoll_forecast.fleet.learners import Published, SentContribution
from atoll_server.merging import merge
from atoll_server.merging.norm_limit import NormLimiter
from atoll_server.rounds import syncer_events as ev
from atoll_server.rounds.outer_rule import OuterRule
from atoll_server.settings import Limits, RunSettings
from atoll_wire.codec import frame_codec
from atoll_wire.codec.block_kernels import F32
from atoll_wire.codec.frame_codec import Content
from atoll_wire.layout import layout
from atoll_wire.layout.frame_spans import Codec, FrameSpan
from atoll_wire.layout.layout import MergeKind, TensorSpec
from numpy.typing import NDArray

from benchmarks.quality import base_model, lora
from benchmarks.quality.recipe import Recipe

CPU = torch.device("cpu")


@dataclass(slots=True)
class Process:
    """The state of one learner's process, which is lost when the process dies. steps, tokens: since its start."""

    model: Transformer
    optimizer: torch.optim.Optimizer
    local: LocalParameters
    steps: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """A contribution for `merge.merge`; see merge.Contribution."""

    learner: str
    codec: Codec
    norms_sq: NDArray[np.float64]
    scale: float
    contents: tuple[Content, ...]

    def content(self, span: FrameSpan) -> Content:
        """Returns the content of one frame."""
        return self.contents[span.index]


class Training:
    """The `Work` of a fleet; see atoll_forecast.fleet.learners. done: trained share of the run's tokens."""

    def __init__(self, recipe: Recipe, settings: RunSettings, corpus: data.Corpus) -> None:
        self.recipe = recipe
        self.settings = settings
        self.corpus = corpus
        first = new_model(recipe)
        specs = Parameters(first, optimizer_for(first, 1.0)).tensors
        if recipe.merging == "average":
            specs = tuple(_averaged(spec) for spec in specs)
        self.layout = layout.plan(specs, settings.fragments)
        self.states = [merge.start(vector) for vector in vectors_of(first, self.layout)]
        self.published = [Published(index, 0, 0.0, s.theta_pub.copy()) for index, s in enumerate(self.states)]
        limits = Limits()
        window, limit, clip = limits.norm_window, settings.norm_limit, settings.clip_norm
        self.norms = [NormLimiter(window, limit, clip) for _ in self.states]
        self.processes: dict[str, Process] = {}
        self.flying: dict[tuple[str, int], tuple[Received, PseudoGradient]] = {}
        self.received: dict[ev.ContributionKey, Received] = {}
        self.batches: dict[str, Iterator[torch.Tensor]] = {}
        self.tokens = 0
        self.losses: list[float] = []
        self.bits = [0.0, 0.0, 0.0, 0.0]  # bits up, parameters up, bits down, parameters down

    @property
    def done(self) -> float:
        return self.tokens / self.recipe.tokens

    def begin(self, learner: str) -> None:
        """Starts a process with the newest anchors and a fresh optimizer."""
        for fragment in range(len(self.states)):
            self.flying.pop((learner, fragment), None)
        model = new_model(self.recipe)
        optimizer = optimizer_for(model, self.recipe.learning_rate)
        self.processes[learner] = Process(model, optimizer, self._local(model, optimizer))
        if learner not in self.batches:
            self.batches[learner] = batches(self.recipe, self.corpus, learner)

    def train(self, learner: str) -> None:
        """Takes one inner step on the learner's next batch."""
        process = self.processes[learner]
        rate = learning_rate(self.recipe.learning_rate, self.done, process.steps)
        self.losses.append(inner_step(process.model, process.optimizer, next(self.batches[learner]), rate, CPU))
        tokens = tokens_of_step(self.recipe)
        process.steps += 1
        process.tokens += tokens
        self.tokens += tokens

    def take(self, learner: str, fragment: int, seq: int) -> SentContribution | None:
        """Takes a pseudo-gradient. Encodes, compresses, decodes and checks it, as on its way to a core."""
        process = self.processes[learner]
        if process.local.tracks[fragment].steps_from == process.steps:
            return None
        outstanding = process.local.take(fragment, process.tokens, process.steps)
        frames = self.layout.fragments[fragment].frames
        payloads = [frame_codec.compress(content) for content in outstanding.coded.contents]
        checked = [
            frame_codec.check_frame(p, span, self.settings.codec) for p, span in zip(payloads, frames, strict=True)
        ]
        norms_sq = merge.norms_sq(self.layout.fragments[fragment], [squares for _, squares in checked])
        norm = float(np.sqrt(norms_sq.sum()))
        verdict = self.norms[fragment].enter(learner, norm, outstanding.steps, self.processes.keys())
        assert not verdict.refusal, verdict.refusal
        contents = tuple(content for content, _ in checked)
        received = Received(learner, self.settings.codec, norms_sq, verdict.scale, contents)
        self.flying[learner, fragment] = (received, outstanding)
        self.received[ev.ContributionKey(learner, 0, fragment, seq)] = received
        size = sum(map(len, payloads))
        self.bits[0] += 8 * size
        self.bits[1] += self.layout.fragments[fragment].length
        return SentContribution(outstanding.tokens, outstanding.steps, outstanding.base_version, size)

    def merge(self, effect: ev.Merge) -> Published:
        """Takes the outer step with the contributions that the effect names."""
        fragment, state = self.layout.fragments[effect.fragment], self.states[effect.fragment]
        keys = [ev.ContributionKey(share.key.learner, 0, effect.fragment, share.key.seq) for share in effect.shares]
        given = [self.received.pop(key) for key in keys]
        for refusal in effect.refusals:
            del self.received[ev.ContributionKey(refusal.key.learner, 0, effect.fragment, refusal.key.seq)]
        weights = [share.weight for share in effect.shares]
        rule = OuterRule.of(self.settings, effect.age, effect.cause, self.tokens)
        if self.recipe.down == "float32":
            rule = replace(rule, codec=Codec.FLOAT32)
        merged = merge.merge(fragment, state, given, weights, rule, state.theta_pub)
        self.states[effect.fragment] = merged.state
        size = sum(len(frame_codec.compressed(frame)) for frame in merged.update.frames)
        self.bits[2] += 8 * size
        self.bits[3] += fragment.length
        published = Published(effect.fragment, effect.version, size, merged.state.theta_pub.copy())
        self.published[effect.fragment] = published
        return published

    def adopt(self, learner: str, published: Published, *, merged: bool, drop: bool) -> None:
        """Adopts a newer anchor at a step boundary."""
        process = self.processes[learner]
        flying = self.flying.pop((learner, published.fragment), None) if merged or drop else None
        q = flying[1].coded if merged and flying is not None else None
        prepared = PreparedAnchor(published.fragment, published.version, anchor_of(published), Fate(q, drop))
        process.local.adopt(prepared, process.tokens, process.steps)

    def model(self) -> Transformer:
        """Returns a new model with the newest published parameters."""
        model = new_model(self.recipe)
        self._local(model, optimizer_for(model, 1.0))
        return model

    def _local(self, model: Transformer, optimizer: torch.optim.Optimizer) -> LocalParameters:
        """Sets a model's parameters to the newest anchors."""
        values = Parameters(model, optimizer).values
        anchors = [PreparedAnchor(p.fragment, p.version, anchor_of(p), Fate()) for p in self.published]
        keep = self.recipe.adoption == "rebase"
        return LocalParameters(values, undivided(self.layout), self.settings.codec, anchors, keep=keep)


def new_model(recipe: Recipe) -> Transformer:
    """Returns the first model of a run, which is the same for all learners of a seed."""
    if not recipe.fine_tuning:
        return build(recipe.model, recipe.seed)
    model = base_model.read(recipe.base)
    if recipe.fine_tuning == "lora":
        lora.adapt(model, recipe.seed)
    return model


def batches(recipe: Recipe, corpus: data.Corpus, learner: str) -> Iterator[torch.Tensor]:
    """Yields a learner's batches without end, int64 (batch / learners, context + 1).

    Seed and name decide their order.
    """
    each = recipe.batch // recipe.learners
    return data.batches(corpus.training, each, recipe.model.context, recipe.seed, learner)


def tokens_of_step(recipe: Recipe) -> int:
    """Returns the number of tokens in one learner's inner step."""
    return recipe.batch // recipe.learners * recipe.model.context


def anchor_of(published: Published) -> F32:
    """Returns the parameters of a published version, float32 (fragment.length,)."""
    assert isinstance(published.anchor, np.ndarray), "published by this work"
    return published.anchor


def vectors_of(model: Transformer, laid_out: layout.Layout) -> list[F32]:
    """Returns the model's parameters, one float32 vector per fragment."""
    flat = [p.detach().numpy().reshape(-1) for p in model.parameters() if p.requires_grad]
    return [
        np.concatenate([flat[piece.tensor][piece.start : piece.start + piece.length] for piece in fragment.pieces])
        for fragment in laid_out.fragments
    ]


def _averaged(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, spec.shape, spec.dtype, MergeKind.AVERAGE, spec.tied_names)
