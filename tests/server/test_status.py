"""The status that operators see."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from atoll_server.learners.learner_counters import IncarnationCounters
from atoll_server.learners.learner_registry import LearnerRegistry
from atoll_server.learners.refused_joins import RefusedJoins
from atoll_server.links.links import Links
from atoll_server.operators.status import _waited_for, merged_tokens, trained_tokens
from atoll_server.rounds.liveness import LearnerLiveness
from atoll_server.run.attached_shards import AttachedShards
from atoll_server.run.known_run import Running, Waiting
from atoll_server.run.troubles import troubles


@pytest.mark.parametrize(("reported", "merged", "told"), [(84_480, 86_141.25, 86_142), (90_000, 86_141.25, 90_000)])
def test_merged_tokens_never_exceed_trained_tokens_after_a_death_before_a_report(reported, merged, told):
    parameters = 100
    account = SimpleNamespace(merged_token_parameters=merged * parameters)
    registry = SimpleNamespace(tokens=lambda: reported, entries={"a": SimpleNamespace(account=account)})
    layout = SimpleNamespace(parameters=parameters)
    run = SimpleNamespace(registry=registry, state=Running(SimpleNamespace()), layout=layout)
    assert merged_tokens(run) == merged
    assert trained_tokens(run) == told
    assert trained_tokens(SimpleNamespace(registry=registry, state=Waiting())) == reported


def told_of(batches: dict[str, int], silent: tuple[str, ...] = ()) -> list[str]:
    """Returns the troubles of a run whose learners report these tokens per step."""
    registry, now, liveness = LearnerRegistry(8), 1000.0, {}
    for number, (name, batch) in enumerate(batches.items(), 1):
        account = registry.join(name, "eu", number, 0, 0.0, b"", b"t", 0.0, now).account
        account.heard(100.0, IncarnationCounters(steps=100, tokens=100 * batch))
        account.step_time_s = 1.0
        stepped_at = now - 60.0 if name in silent else now
        liveness[name] = LearnerLiveness(1, stepped_at, stepped_at, steps=100, stepped_at=stepped_at, step_time_s=1.0)
    shard = SimpleNamespace(
        syncer=SimpleNamespace(liveness=liveness),
        spool=SimpleNamespace(room_bytes=1),
        fragments={0: None},
        contributions=SimpleNamespace(missed=lambda _: 0),
    )
    run = SimpleNamespace(
        registry=registry,
        shard=shard,
        links=Links(),
        attached=AttachedShards(own=0, count=1),
        writer=SimpleNamespace(full=False),
        settings=SimpleNamespace(total_tokens=0, max_staleness=4),
        clock=SimpleNamespace(at=lambda _: 100.0),
        refused_joins=RefusedJoins(),
    )
    return [trouble.text for trouble in troubles(run, "", now)]


def test_status_warns_of_a_learner_that_counts_bytes_or_batches_as_tokens():
    (line,) = told_of({"a": 10, "b": 10_000})
    assert line.startswith(
        "b reports 10,000 tokens per step vs. the other learners' median of 10, so its work outweighs theirs."
    )
    assert len(told_of({"a": 10, "b": 12, "c": 10_000})) == 1
    (line,) = told_of({"samples": 8, "b": 8192, "c": 8192})
    assert line.startswith("samples reports 8 tokens per step vs. the other learners' median of 8,192, so its work")


def test_status_does_not_warn_of_other_hardware_and_absent_learners():
    assert told_of({"small": 8, "b": 64, "large": 80}) == []
    assert told_of({"alone": 10_000}) == []
    assert told_of({"a": 10, "b": 10_000}, silent=("a", "b")) == []


def test_only_learners_that_a_round_waits_for_are_named():
    now = 1000.0
    liveness = {
        name: LearnerLiveness(1, now - quiet_s, now - quiet_s, steps=9, stepped_at=now - quiet_s, step_time_s=1.0)
        for name, quiet_s in (("a", 0.0), ("b", 0.0), ("silent", 60.0), ("left", 0.0))
    }
    liveness["left"].gone = True
    shard = SimpleNamespace(syncer=SimpleNamespace(liveness=liveness))
    run = SimpleNamespace(shard=shard, state=Running(SimpleNamespace()))
    entries = [SimpleNamespace(name=name, evicted="") for name in liveness]
    waits = {entry.name: _waited_for(run, entry, {3: {"b"}}, now) for entry in entries}
    assert waits == {"a": "its answer for fragment 3", "b": "", "silent": "", "left": ""}
