"""A restore to an older checkpoint: running learners roll back, and later work no longer counts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from atoll_server.cli import operator_client
from atoll_server.cli.operator_client import OperatorTarget
from atoll_server.cli.replay import replay
from atoll_server.cli.run_directory import export_from_directory, read_run
from atoll_server.ledger import shard_ledger
from atoll_server.ledger.database import read_ledger
from atoll_server.storage import crash_points
from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import Fate

from tests.end_to_end.test_kill import each_merged_once
from tests.end_to_end.world import Core, Trainee, core, eventually, front, train

OPTIONS = ("--record", "--snapshot-every-s", "3600", "--max-staleness", "4")
POINTS = [point for point in crash_points.POINTS if point.startswith("rollback.")]


def restore(directory: Path, checkpoint: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as an operator would."""
    command = [sys.executable, "-m", "atoll_server", "checkpoint", "restore", str(checkpoint), "--dir", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


def take(running: Core) -> pb.Checkpoint:
    with running.operator() as stub:
        return stub.TakeCheckpoint(pb.TakeCheckpointRequest(), timeout=20)


@contextmanager
def training(address: str, *names: str):
    stop = threading.Event()
    trainees = [Trainee(address, name, lambda _: stop.is_set(), pace_s=0.02, drain_s=3.0) for name in names]
    for trainee in trainees:
        trainee.start()
    try:
        yield trainees
    finally:
        stop.set()
    for trainee in trainees:
        trainee.done()


def generations(path: Path, table: str) -> dict[int, int]:
    with read_ledger(path) as db:
        return dict(db.execute(f"SELECT generation, COUNT(*) FROM {table} GROUP BY generation").fetchall())  # noqa: S608


@pytest.mark.ci
@pytest.mark.parametrize("through_a_front", [False, True])
def test_learners_follow_a_run_that_is_restored_to_an_older_checkpoint(tmp_path, through_a_front):
    with core(tmp_path, *OPTIONS) as running, front(tmp_path / "front", running.address) as gateway:
        with training(gateway.address if through_a_front else running.address, "a", "b") as trainees:
            eventually(lambda: running.status().merges >= 10, 60)
            old = take(running)
            eventually(lambda: running.status().merges >= sum(old.versions.values()) + 30, 60)
            assert take(running).id == old.id + 1
            tokens = running.status().tokens_trained
            running.stop()
            before = {name: generations(running.directory / "ledger.sqlite", name) for name in ("merges",)}
            done = restore(running.directory, old.id)
            assert done.returncode == 0, done.stderr
            assert f"restored to checkpoint {old.id} (generation 2): {sum(old.versions.values())} merges" in done.stdout
            restored = read_run(running.directory)
            assert {index: state.version for index, state in restored.states.items()} == dict(old.versions)
            running.start()
            status = running.status()
            assert (status.generation, status.restored.checkpoint) == (2, old.id)
            assert status.tokens_trained < tokens, "the token count must return to the checkpoint's"
            eventually(lambda: running.status().merges >= sum(old.versions.values()) + 20, 60)
            status = running.status()
            assert status.generation == 2
            with running.operator() as stub:
                told = stub.ListEvents(pb.ListEventsRequest(), timeout=20).events
                listed = stub.ListCheckpoints(pb.ListCheckpointsRequest(), timeout=20).checkpoints
            assert any(event.text == f"restored to checkpoint {old.id} (generation 2)" for event in told)
            assert [each.generation for each in listed] == [1] * len(listed)
            assert len(listed) >= 2, "undone checkpoints must stay restorable"
            versions = [trainee.learner.stats() for trainee in trainees]
            assert all(each.merged and not each.last_error.startswith("cannot") for each in versions)
            learners = {each.learner: each for each in status.learners}
            assert all(each.goodput.lost_s["thrown_away"] > 0 for each in learners.values())
            assert all(0 <= each.goodput.ratio < 1 for each in learners.values())
        eventually(lambda: running.status().contributions.pending == 0)
        counts = running.status().contributions
        assert counts.accepted == counts.merged + counts.refused
        running.stop()
    ledger_path = running.directory / "ledger.sqlite"
    each_merged_once(ledger_path)
    assert generations(ledger_path, "merges")[1] == before["merges"][1], "undone merges must stay in the ledger"
    assert generations(ledger_path, "contributions")[2] > 0
    for generation in (1, 2):
        again = replay(running.directory, (), lambda *_: None, generation)
        assert again.identical
    with read_ledger(ledger_path) as db:
        for made_in in (1, 2):
            assert all(fate.fate is not Fate.PENDING for _, fate in shard_ledger.contributions(db, made_in))


@pytest.mark.ci
def test_an_export_after_a_restore_has_the_bytes_of_the_checkpoint_and_a_restore_can_be_undone(tmp_path, capsys):
    with core(tmp_path, *OPTIONS) as running:
        train(running.address, "a", steps=60)
        eventually(lambda: running.status().contributions.pending == 0)
        first = take(running).id
        operator_client.export_checkpoint(
            OperatorTarget(running.address), tmp_path / "first.safetensors", initial=False
        )
        train(running.address, "a", steps=60)
        eventually(lambda: running.status().contributions.pending == 0)
        second = take(running).id
        operator_client.export_checkpoint(
            OperatorTarget(running.address), tmp_path / "second.safetensors", initial=False
        )
        refused = restore(running.directory, first)
        assert refused.returncode == 1
        assert f"a core uses {running.directory}: stop the core, and run the command again" in refused.stderr
        running.stop()
        for generation, (checkpoint, name) in enumerate(((first, "first"), (second, "second")), start=2):
            assert restore(running.directory, checkpoint).returncode == 0
            export_from_directory(running.directory, tmp_path / "now.safetensors", initial=False)
            before, now = ((tmp_path / f"{each}.safetensors").read_bytes() for each in (name, "now"))
            said, changed = b'"atoll.generation":"1"', b'"atoll.generation":"%d"' % generation
            assert before.count(said) == 1
            assert now == before.replace(said, changed), "only the generation may differ"
            again = restore(running.directory, checkpoint)
            assert f"is already at checkpoint {checkpoint} (generation {generation})" in again.stdout
        missing = restore(running.directory, 77)
        assert missing.returncode == 1
        assert f"there is no checkpoint 77 in {running.directory}: use one of {first} (" in missing.stderr
        assert missing.stderr.count("\n") == 1
        file = running.directory / "snapshots" / f"{first:08d}.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        damaged = restore(running.directory, first)
        assert damaged.returncode == 1
        assert f"checkpoint {first} is damaged" in damaged.stderr
        assert f"use one of {second} (" in damaged.stderr
        running.start()
        assert running.status().generation == 3
        [trainee] = train(running.address, "a", steps=60)
        assert trainee.learner.stats().merged > 0
        assert torch.isfinite(torch.tensor(trainee.losses)).all()
        take(running)
        train(running.address, "a", steps=60)
        eventually(lambda: running.status().contributions.pending == 0)
        third = take(running)
        with running.operator() as stub:
            listed = stub.ListCheckpoints(pb.ListCheckpointsRequest(), timeout=20).checkpoints
        assert third.id in {each.id for each in listed}
        assert first not in {each.id for each in listed}


@pytest.mark.ci
@pytest.mark.parametrize("point", POINTS)
def test_a_restore_that_is_killed_leaves_the_old_or_the_new_generation_complete(tmp_path, point):
    with core(tmp_path, *OPTIONS) as running:
        train(running.address, "a", steps=60)
        old = take(running)
        train(running.address, "a", steps=60)
        running.stop()
        before = read_run(running.directory)
        dead = restore(running.directory, old.id, ATOLL_CRASH_AT=point)
        assert dead.returncode == -signal.SIGKILL
        shutil.copytree(running.directory, tmp_path / "dead")
        came_back, replayed = read_run(tmp_path / "dead"), read_run(tmp_path / "dead", from_start=True)
        versions = {index: state.version for index, state in came_back.states.items()}
        new = point == "rollback.committed"
        assert came_back.line.generation == (2 if new else 1)
        assert versions == (dict(old.versions) if new else {i: state.version for i, state in before.states.items()})
        for index, state in came_back.states.items():
            assert state.checksums() == replayed.states[index].checksums()
        done = restore(running.directory, old.id)
        assert done.returncode == 0
        assert "generation 2" in done.stdout
        running.start()
        [trainee] = train(running.address, "a", steps=150)
        assert trainee.learner.stats().merged > 0
        assert running.status().generation == 2
