"""Operator requests to a run with several shards: receipts, rounds, checkpoints, exports, pauses, restores."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from atoll_server.access.certificate_authority import init, issue
from atoll_server.checkpoints.restore import LEDGER
from atoll_server.cli.replay import replay
from atoll_server.cli.run_directory import read_run
from atoll_server.ledger import run_ledger
from atoll_server.ledger.database import read_ledger
from atoll_server.ledger.manifests import kept_of
from atoll_server.operators.shard_calls import FOR_REGISTRAR
from atoll_wire import outer_pb2 as pb
from atoll_wire.security.certificate import Role
from atoll_wire.security.transport import TransportSecurity
from safetensors.numpy import load_file

from tests.end_to_end.test_operators import atoll
from tests.end_to_end.test_restore import restore, take, training
from tests.end_to_end.world import Core, Sharded, eventually, sharded, small_model, train

OPTIONS = ("--record", "--snapshot-every-s", "3600", "--max-staleness", "4")

pytestmark = pytest.mark.ci  # each test starts several processes


def settled(run: Sharded) -> pb.StatusReply:
    """Returns the status once all shards have reported that no contribution is pending."""

    def done() -> bool:
        status = run.status()
        counts = status.contributions
        return counts.pending == 0 and len(status.fragments) == 4 and counts.accepted == counts.merged + counts.refused

    eventually(done)
    threading.Event().wait(2.5)  # time for two summaries
    return run.status()


def pages(core: Core, limit: int) -> list[pb.LoggedReceipt]:
    """Returns all receipts, in pages of `limit`."""
    found, before = [], ""
    with core.operator() as stub:
        while (page := stub.ListReceipts(pb.ListReceiptsRequest(limit=limit, before=before), timeout=20)).receipts:
            assert not page.missing
            found += page.receipts
            before = page.next
    return found


def meta(core: Core) -> dict:
    with read_ledger(core.directory / LEDGER) as db:
        return run_ledger.get_meta(db)


@pytest.mark.parametrize("alone", [False, True])
def test_receipts_and_rounds_of_all_shards_come_newest_first_page_by_page(tmp_path, alone):
    with sharded(tmp_path, 3, *OPTIONS, alone=alone) as run:
        train(run.address, "a", "b", steps=100)
        status = settled(run)
        found = pages(run.registrar, 7)
        assert len(found) == status.contributions.accepted
        names = [(each.shard, each.number) for each in found]
        shown = json.loads(atoll("receipts", "--server", run.address, "--json").stdout)
        assert [(each["shard"], each["number"]) for each in shown] == names[:50]
        assert len(set(names)) == len(names)
        assert {each.shard for each in found} == {0, 1, 2}
        times = [each.accepted_at for each in found]
        assert all(later < earlier + 0.5 for earlier, later in pairwise(times)), "times may overlap by 0.5 s"
        assert {each.receipt.fragment for each in found[:20]} == {0, 1, 2, 3}, "shards must mix"
        with run.registrar.operator() as stub:
            rounds = stub.ListRounds(pb.ListRoundsRequest(last=12), timeout=20).rounds
            with pytest.raises(grpc.RpcError, match="position of the receipts is invalid"):
                stub.ListReceipts(pb.ListReceiptsRequest(before="x"), timeout=20)
        assert len(rounds) == 12
        assert {each.fragment for each in rounds} == {0, 1, 2, 3}
        assert [each.opened_at for each in rounds] == sorted((each.opened_at for each in rounds), reverse=True)
        shards = {each.shard: each for each in status.shards}
        assert sorted(index for each in shards.values() for index in each.fragments) == [0, 1, 2, 3]
        assert all(each.attached for each in shards.values())
        assert sorted(shards) == ([0, 1, 2, 3] if alone else [0, 1, 2])
        shard = run.shards[2]
        for arguments in (["status"], ["receipts"], ["checkpoint", "list"], ["checkpoint", "take"], ["pause", "--yes"]):
            asked = atoll(*arguments, "--server", shard.address)
            assert asked.returncode == 4
            assert f"this is shard 2 of the run: ask its registrar, at {run.address}" in asked.stderr

        shard.kill()
        eventually(lambda: not {each.shard: each for each in run.status().shards}[2].attached)
        asked = atoll("receipts", "--server", run.address, "--json", "--last", "1000")
        assert "shard 2 did not answer" in asked.stderr
        kept = json.loads(asked.stdout)
        assert {each["shard"] for each in kept} == {0, 1}
        with run.registrar.operator() as stub:
            assert list(stub.ListRounds(pb.ListRoundsRequest(last=5), timeout=20).missing) == [2]
            for refused in (
                lambda: stub.TakeCheckpoint(pb.TakeCheckpointRequest(), timeout=20),
                lambda: list(stub.ExportCheckpoint(pb.ExportCheckpointRequest(), timeout=20)),
            ):
                with pytest.raises(grpc.RpcError, match="shard 2 is not attached"):
                    refused()
        shown = atoll("status", "--server", run.address).stdout
        assert "not attached" in shown
        paused = atoll("pause", "--yes", "--server", run.address)
        assert "not yet confirmed by shard 2" in paused.stdout
        shard.start()
        eventually(lambda: meta(shard)["view"]["paused"] != "")
        assert "not yet confirmed" not in atoll("resume", "--server", run.address).stdout


def test_a_shard_answers_only_the_registrars_certificate(tmp_path):
    init(tmp_path)
    home = issue(tmp_path, Role.CORE, "home", ["127.0.0.1"], 1)
    others = [issue(tmp_path, role, "someone", [], 1) for role in (Role.OPERATOR, Role.LEARNER)]
    with sharded(tmp_path, 2, common=("--tls", str(home))) as run:
        run.registrar.security = TransportSecurity(others[0])
        eventually(lambda: all(each.attached for each in run.status().shards))
        request = pb.ListReceiptsRequest()
        with run.registrar.operator() as stub:
            assert list(stub.ListReceipts(request, timeout=20).missing) == []
            assert list(stub.ListRounds(pb.ListRoundsRequest(), timeout=20).missing) == []
        shard = run.shards[1]
        for directory in (*others, home):
            shard.security = TransportSecurity(directory)
            with shard.operator() as stub:
                with pytest.raises(grpc.RpcError, match="ask its registrar"):
                    stub.ListReceipts(request, timeout=20)
                if directory != home:
                    with pytest.raises(grpc.RpcError, match="ask its registrar"):
                        stub.ListReceipts(request, timeout=20, metadata=FOR_REGISTRAR)
                else:
                    assert stub.ListReceipts(request, timeout=20, metadata=FOR_REGISTRAR).receipts == []


@pytest.mark.parametrize("alone", [False, True])
def test_an_export_over_all_shards_is_the_model_that_their_directories_hold(tmp_path, alone):
    with sharded(tmp_path, 3, *OPTIONS, alone=alone) as run:
        train(run.address, "a", "b", steps=100)
        settled(run)
        for name, options in (("now", ()), ("initial", ("--initial",))):
            out = tmp_path / f"{name}.safetensors"
            done = atoll("checkpoint", "export", str(out), "--server", run.address, *options)
            assert done.returncode == 0, done.stderr
        small_model().load_state_dict(_torch(tmp_path / "now.safetensors"), strict=True)
        now, initial = (load_file(tmp_path / f"{name}.safetensors") for name in ("now", "initial"))
        for name, tensor in _torch(tmp_path / "initial.safetensors").items():
            assert (tensor == small_model().state_dict()[name]).all(), name
        assert all((now[name] != initial[name]).any() for name in now), "each fragment must be trained"
        cores = [run.registrar, *run.shards.values()]
        for each in reversed(cores):
            each.stop()
        parts = [read_run(each.directory) for each in cores]
        assert sorted(index for part in parts for index in part.states) == [0, 1, 2, 3]
        for part in parts:
            for index, state in part.states.items():
                for piece in part.layout.fragments[index].pieces:
                    values = now[part.layout.tensors[piece.tensor].name].reshape(-1)
                    mine = state.theta_pub[piece.offset : piece.offset + piece.length]
                    assert (values[piece.start : piece.start + piece.length] == mine).all()


def _torch(path: Path) -> dict:
    from safetensors.torch import load_file as load

    return load(path)


@pytest.mark.parametrize("alone", [False, True])
def test_a_run_restored_at_its_registrar_continues_from_the_checkpoint_in_all_shards(tmp_path, alone):
    with sharded(tmp_path, 2, *OPTIONS, alone=alone) as run:
        cores = [run.registrar, *run.shards.values()]
        with training(run.address, "a", "b") as trainees:
            eventually(lambda: run.status().merges >= 12, 60)
            old = take(run.registrar)
            assert sorted(old.versions) == [0, 1, 2, 3]
            eventually(lambda: run.status().merges >= sum(old.versions.values()) + 30, 60)
            assert take(run.registrar).id == old.id + 1
            run.registrar.stop()
            done = restore(run.registrar.directory, old.id)
            assert done.returncode == 0, done.stderr
            merges = sum(old.versions.values())
            assert f"restored to checkpoint {old.id} (generation 2): {merges} merges" in done.stdout
            again = restore(run.registrar.directory, old.id)
            assert f"is already at checkpoint {old.id} (generation 2)" in again.stdout
            run.registrar.start()  # the shards never stopped
            eventually(lambda: all(meta(each)["generation"] == 2 for each in run.shards.values()))
            eventually(lambda: all(each.attached for each in run.status().shards))
            assert run.status().restored.checkpoint == old.id
            eventually(lambda: run.status().merges >= merges + 20, 60)
            assert all(trainee.learner.stats().merged for trainee in trainees)
            for each in run.status().learners:
                assert each.goodput.lost_s["thrown_away"] > 0
                assert 0 <= each.goodput.ratio < 1
            newest = take(run.registrar)
            assert newest.generation == 2
        settled(run)
        for each in reversed(cores):
            each.stop()
        for each in cores:
            recorded = read_run(each.directory)
            assert recorded.line.generation == 2
            if recorded.states:
                begun = recorded.line.beginnings[0]
                assert begun.versions == {index: old.versions[index] for index in recorded.states}
                for generation in (1, 2):
                    assert replay(each.directory, (), lambda *_: None, generation).identical


def test_a_shard_that_was_down_for_two_restores_follows_both_at_once(tmp_path):
    with sharded(tmp_path, 2, *OPTIONS) as run:
        train(run.address, "a", steps=60)
        settled(run)
        old = take(run.registrar)
        train(run.address, "a", steps=60)
        settled(run)
        newer = take(run.registrar)
        run.shards[1].stop()
        wrong = restore(run.shards[1].directory, 1)
        assert wrong.returncode == 1
        assert "holds shard 1 of a run: restore the checkpoint in the registrar's directory" in wrong.stderr
        run.registrar.stop()
        missing = restore(run.registrar.directory, 77)
        assert f"use one of {old.id} ({sum(old.versions.values())} merges, generation 1)" in missing.stderr
        for generation, checkpoint in ((2, old.id), (3, newer.id)):
            done = restore(run.registrar.directory, checkpoint)
            assert f"(generation {generation})" in done.stdout, done.stderr
        run.registrar.start()
        run.shards[1].start()
        eventually(lambda: meta(run.shards[1])["generation"] == 3)
        eventually(lambda: {f.fragment: f.version for f in run.status().fragments} == dict(newer.versions))
        [trainee] = train(run.address, "a", steps=60)
        assert trainee.learner.stats().merged > 0


@pytest.mark.parametrize(
    "point",
    [
        "rollback.rows written",
        pytest.param("rollback.checked", marks=pytest.mark.ci),
        pytest.param("rollback.committed", marks=pytest.mark.ci),
    ],
)
def test_a_shard_killed_while_it_follows_a_restore_follows_after_its_next_start(tmp_path, monkeypatch, point):
    with sharded(tmp_path, 2, *OPTIONS) as run:
        shard = run.shards[1]
        train(run.address, "a", steps=60)
        settled(run)
        old = take(run.registrar)
        train(run.address, "a", steps=60)
        settled(run)
        shard.stop()
        run.registrar.stop()
        assert restore(run.registrar.directory, old.id).returncode == 0
        run.registrar.start()
        monkeypatch.setenv("ATOLL_CRASH_AT", point)
        shard.launch()
        assert shard.child.process.wait(30) == -9
        monkeypatch.delenv("ATOLL_CRASH_AT")
        assert meta(shard)["generation"] == (2 if point == "rollback.committed" else 1)
        shard.start()
        eventually(lambda: meta(shard)["generation"] == 2)
        eventually(lambda: {f.fragment: f.version for f in run.status().fragments} == dict(old.versions))
        shard.stop()
        assert replay(shard.directory, (), lambda *_: None).identical


def test_shards_keep_the_snapshots_of_checkpoints_over_restarts_and_delete_them_afterwards(tmp_path):
    with sharded(tmp_path, 2, "--keep-snapshots", "2", "--snapshot-every-s", "3600") as run:
        shard = run.shards[1]

        def files() -> set[int]:
            return {int(path.stem) for path in (shard.directory / "snapshots").glob("*.safetensors")}

        def restarted() -> None:
            train(run.address, "a", steps=40)
            settled(run)
            shard.stop()  # takes a snapshot
            shard.start()
            eventually(lambda: all(each.attached for each in run.status().shards))

        train(run.address, "a", steps=40)
        settled(run)
        take(run.registrar)
        kept = kept_of(meta(shard)).snapshots
        assert len(kept) == 1
        for _ in range(4):
            restarted()
        assert len(files()) == 3
        assert kept < files(), "the checkpoint names this snapshot"
        with run.registrar.operator() as stub:
            [named] = stub.ListCheckpoints(pb.ListCheckpointsRequest(), timeout=20).checkpoints
        assert sum(named.versions.values()) > 0
        take(run.registrar)
        take(run.registrar)
        eventually(lambda: len(kept_of(meta(shard)).snapshots) == 2 and not kept & kept_of(meta(shard)).snapshots)
        take(run.registrar)
        eventually(lambda: not kept & files())


@pytest.mark.parametrize("point", ["manifest.snapshots durable", "manifest.committed"])
def test_a_checkpoint_that_is_interrupted_does_not_count(tmp_path, monkeypatch, point):
    with sharded(tmp_path, 2, *OPTIONS) as run:
        train(run.address, "a", steps=60)
        settled(run)
        run.registrar.kill()
        monkeypatch.setenv("ATOLL_CRASH_AT", point)
        run.registrar.start()
        eventually(lambda: all(each.attached for each in run.status().shards))
        with run.registrar.operator() as stub, pytest.raises(grpc.RpcError):
            stub.TakeCheckpoint(pb.TakeCheckpointRequest(), timeout=20)
        assert run.registrar.child.process.wait(20) == -9
        monkeypatch.delenv("ATOLL_CRASH_AT")
        run.registrar.start()
        eventually(lambda: all(each.attached for each in run.status().shards))
        with run.registrar.operator() as stub:
            listed = stub.ListCheckpoints(pb.ListCheckpointsRequest(), timeout=20).checkpoints
        assert len(listed) == (point == "manifest.committed")
        assert take(run.registrar).id == len(listed) + 1
        [snapshots] = [kept_of(meta(each)).snapshots for each in run.shards.values()]
        assert len(snapshots) <= 2


@pytest.mark.parametrize("point", ["snapshot.committed", "kept.committed"])
def test_a_shard_killed_during_a_checkpoint_keeps_the_snapshots_of_checkpoints(tmp_path, monkeypatch, point):
    with sharded(tmp_path, 2, *OPTIONS) as run:
        shard = run.shards[1]
        train(run.address, "a", steps=60)
        settled(run)
        shard.kill()
        monkeypatch.setenv("ATOLL_CRASH_AT", point)
        shard.start()
        eventually(lambda: all(each.attached for each in run.status().shards))
        if point == "snapshot.committed":
            with pytest.raises(grpc.RpcError, match=r"a call to shard 1 at .* failed"):
                take(run.registrar)
        else:
            take(run.registrar)
        assert shard.child.process.wait(20) == -9
        monkeypatch.delenv("ATOLL_CRASH_AT")
        assert _listed(run) == (point == "kept.committed")
        shard.start()
        eventually(lambda: all(each.attached for each in run.status().shards))
        newest = take(run.registrar)
        train(run.address, "a", steps=60)
        settled(run)
        shard.stop()
        run.registrar.stop()
        assert restore(run.registrar.directory, newest.id).returncode == 0
        run.registrar.start()
        shard.start()
        eventually(lambda: {f.fragment: f.version for f in run.status().fragments} == dict(newest.versions))


def test_the_registrar_takes_checkpoints_at_its_interval(tmp_path):
    with sharded(tmp_path, 2, "--snapshot-every-s", "1") as run, training(run.address, "a"):
        eventually(lambda: _listed(run) >= 2, 30)


def _listed(run: Sharded) -> int:
    with run.registrar.operator() as stub:
        return len(stub.ListCheckpoints(pb.ListCheckpointsRequest(), timeout=20).checkpoints)


def test_offline_commands_read_a_shards_part_or_say_that_they_need_the_whole_run(tmp_path):
    with sharded(tmp_path, 2, *OPTIONS) as run:
        train(run.address, "a", steps=60)
        settled(run)
        taken = take(run.registrar)
        told = pages(run.registrar, 1000)
        cores = [run.registrar, *run.shards.values()]
        for each in reversed(cores):
            each.stop()
        for number, each in enumerate(cores):
            place = str(each.directory)
            listed = atoll("receipts", "--dir", place, "--json", "--last", "1000")
            mine = [each["number"] for each in json.loads(listed.stdout)]
            assert mine == [one.number for one in told if one.shard == number]
            verified = atoll("checkpoint", "verify", place)
            assert verified.returncode == 0, verified.stderr
            assert f"a core can start from {place}\n" in verified.stdout
            replayed = atoll("replay", place)
            assert replayed.returncode == 0, replayed.stderr
            assert "the same, byte for byte" in replayed.stdout
            for arguments in (
                ["replay", place, "--out", str(tmp_path / "x")],
                ["checkpoint", "export", str(tmp_path / "x"), "--dir", place],
            ):
                refused = atoll(*arguments)
                assert refused.returncode == 1
                assert refused.stderr == (
                    f"error: {place} holds 2 of the run's 4 fragments, but a model file needs all "
                    "of them: use `atoll checkpoint export OUT --server` with the registrar's address\n"
                )
        listed = atoll("checkpoint", "list", "--dir", str(run.registrar.directory)).stdout
        assert f" {sum(taken.versions.values())} " in listed
        assert "snapshots of shard 1" in atoll("checkpoint", "list", "--dir", str(run.shards[1].directory)).stdout
