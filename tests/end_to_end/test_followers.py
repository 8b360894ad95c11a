"""Followers have the published model's exact bits despite faults, and change nothing in the run."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading

import atoll
import pytest
import torch
from atoll.demo.processes import free_port
from atoll_server.cli.operator_client import OperatorTarget, export_checkpoint
from atoll_server.cli.run_directory import restore_checkpoint
from atoll_wire import outer_pb2 as pb
from safetensors.torch import load_file
from torch import nn

from benchmarks.process_state import metrics
from tests.end_to_end.following import exported, recorder, training
from tests.end_to_end.relay import relay
from tests.end_to_end.test_checkpoint import _train_theirs
from tests.end_to_end.test_training import Somebodys
from tests.end_to_end.world import core, eventually, front, sharded, small_model, train

VERSIONS = 100


@pytest.mark.ci
def test_a_follower_has_the_bits_of_the_export_for_a_hundred_versions(tmp_path):
    with core(tmp_path) as running, training(running.address) as trainee:
        with recorder(running.address) as follower:
            follower.compare_until(running, VERSIONS)
            assert {key[0] for key in follower.compared} == {1}
        status = running.status()
        assert [each.learner for each in status.learners] == ["a"], "a follower is not a member"
        assert trainee.learner.stats().mismatches == 0


@pytest.mark.ci
def test_a_follower_continues_after_a_cut_connection_and_a_killed_core(tmp_path):
    with core(tmp_path) as running, relay(running.address) as link, training(running.address):
        with recorder(link.address) as follower:
            follower.compare_until(running, 10)
            link.reset()
            follower.compare_until(running, 10)
            running.kill()
            running.start()
            follower.compare_until(running, 10)
            whole = len({id(cut.fixed) for cut in follower.cuts})
        assert whole == 1, "fixed values must be fetched once"


@pytest.mark.ci
def test_a_follower_of_a_core_restored_from_a_backup_starts_over(tmp_path):
    with core(tmp_path) as running:
        train(running.address, "first", steps=60)
        running.stop()
        shutil.copytree(running.directory, tmp_path / "backup")
        running.start()
        train(running.address, "second", steps=100)
        with recorder(running.address) as follower:
            eventually(lambda: bool(follower.cuts) and follower.compare_newest(running))
            running.kill()
            shutil.rmtree(running.directory)
            (tmp_path / "backup").rename(running.directory)
            running.start()
            train(running.address, "third", steps=60)
            eventually(lambda: follower.compare_newest(running))


@pytest.mark.ci
def test_a_follower_of_a_run_restored_to_a_checkpoint_starts_over_in_the_new_generation(tmp_path):
    with core(tmp_path) as running:
        train(running.address, "first", steps=60)
        with running.operator() as stub:
            taken = stub.TakeCheckpoint(pb.TakeCheckpointRequest(), timeout=20)
        with recorder(running.address) as follower:
            train(running.address, "second", steps=60)
            follower.compare_until(running, 2)
            running.stop()
            restore_checkpoint(running.directory, taken.id)
            running.start()
            with training(running.address, "third"):
                follower.compare_until(running, 10)
            generations = [cut.run.generation for cut in follower.cuts]
        assert generations == sorted(generations)
        assert set(generations) == {1, 2}


@pytest.mark.ci
def test_a_follower_of_two_shards_has_the_bits_of_the_export(tmp_path):
    with sharded(tmp_path, 2) as it, training(it.address), recorder(it.address) as follower:
        follower.compare_until(it.registrar, 20)
        it.shards[1].kill()
        it.shards[1].start()
        eventually(lambda: it.status().shards[1].attached)
        follower.compare_until(it.registrar, 20)


def test_a_model_follows_with_its_tied_and_frozen_tensors_and_buffers(tmp_path):
    torch.manual_seed(1)
    given, calls = Somebodys(), list[tuple[int, ...]]()
    with core(tmp_path) as running:
        follower_model = Somebodys()
        with torch.no_grad():
            for tensor in follower_model.state_dict().values():
                tensor.zero_()
        _train_theirs(running.address, given)
        eventually(lambda: running.status().contributions.pending == 0)
        with atoll.Follower(
            follower_model, running.address, on_update=lambda it: calls.append(it.versions)
        ) as follower:
            assert follower.versions == tuple(each.version for each in running.status().fragments)
            assert follower.run == running.status().run
            assert follower.generation == 1
            assert not follower.update(), "the second call adopts nothing new"
            assert not follower.wait(timeout_s=0.1)
        export_checkpoint(OperatorTarget(running.address), tmp_path / "now.safetensors", initial=False)
    expected = load_file(tmp_path / "now.safetensors")
    state = follower_model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name
    assert calls == [follower.versions]
    assert follower_model.head.weight is follower_model.table.weight, "the tensors must stay tied"


def test_on_update_is_called_once_for_each_change_of_the_model_in_the_callers_thread(tmp_path):
    calls = list[tuple[tuple[int, ...], threading.Thread]]()
    with core(tmp_path) as running:
        train(running.address, "first", steps=40)

        def changed(follower):
            calls.append((follower.versions, threading.current_thread()))

        with atoll.Follower(small_model(), running.address, on_update=changed) as follower:
            for name in ("second", "third", "fourth"):
                before, known = follower.versions, len(calls)
                for _ in range(10):  # steps beyond the staleness limit of a busy machine merge nothing
                    train(running.address, name, steps=60)
                    target = [each.version for each in running.status().fragments]
                    if min(target) >= max(before) + 2:
                        break
                assert min(target) >= max(before) + 2, "several versions must be new"
                assert len(calls) == known, "nothing may call it between update() and wait()"
                assert follower.wait(min(target), timeout_s=20.0)
                assert len(calls) == known + 1, "one call for several versions"
            assert not follower.wait(timeout_s=0.0) or len(calls) == known + 2
    versions = [at for at, _ in calls]
    assert len(versions) >= 4
    assert versions == sorted(set(versions))
    assert {thread for _, thread in calls} == {threading.current_thread()}


def test_a_follower_refuses_a_model_that_differs_from_the_runs(tmp_path):
    with core(tmp_path) as running:
        train(running.address, "a", steps=8)
        lacking, wider, longer = small_model(), small_model(), small_model()
        del lacking[3]
        wider[3] = nn.Linear(48, 33)
        longer.append(nn.Linear(2, 2))
        for model, text in (
            (lacking, 'the model lacks "3.weight"'),
            (wider, r'"3.weight" has shape \[33, 48\], but \[32, 48\] in the run'),
            (longer, 'the model has "4.weight", which the run does not have'),
            (small_model().to("meta"), "is on the meta device"),
        ):
            with pytest.raises(atoll.FollowerError, match=text), atoll.Follower(model, running.address):
                pass


@pytest.mark.ci
def test_pull_writes_the_bytes_of_the_export_and_replaces_the_file_while_the_model_changes(tmp_path):
    out = tmp_path / "now.safetensors"
    with core(tmp_path) as running:
        train(running.address, "a", steps=40)
        pull = [sys.executable, "-m", "atoll.cli", "pull", str(out), "--server", running.address]
        said = subprocess.run(pull, capture_output=True, text=True, timeout=60, check=True).stdout
        assert out.read_bytes() == exported(running)
        assert said.startswith(f"wrote {out} (0.0 MB, run ")
        following = subprocess.Popen([*pull, "--follow", "--every-s", "0.1"], stdout=subprocess.PIPE, text=True)
        try:
            with training(running.address, "b"):
                lines = [following.stdout.readline() for _ in range(5)]
                before = out.stat().st_ino
                eventually(lambda: out.stat().st_ino != before)
            assert len(set(lines)) == 5, "each replaced file must have newer versions"
            assert load_file(out).keys() == small_model().state_dict().keys(), "the file must be complete at any time"
        finally:
            following.terminate()
            following.wait(20)


def test_pull_names_what_is_wrong(tmp_path):
    pull = [sys.executable, "-m", "atoll.cli", "pull"]
    lost = subprocess.run(
        [*pull, str(tmp_path / "x"), "--server", "127.0.0.1:1", "--connect-timeout-s", "0.5"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert lost.returncode == 3
    assert lost.stderr.splitlines()[-1].startswith("error: no model arrived from 127.0.0.1:1 within")
    with core(tmp_path) as running:
        train(running.address, "a", steps=8)
        nowhere = subprocess.run(
            [*pull, str(tmp_path / "none" / "x"), "--server", running.address],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert nowhere.stderr.splitlines()[-1].startswith(f"error: {tmp_path / 'none' / 'x'} cannot be written (No such")


@pytest.mark.ci
def test_a_follower_behind_a_front_continues_after_a_killed_front_and_a_killed_core(tmp_path):
    with (
        core(tmp_path / "home") as it,
        front(tmp_path / "eu", it.address) as eu,
        training(it.address),
        recorder(eu.address) as follower,
    ):
        follower.compare_until(it, 10)
        eu.kill()
        eu.start()
        follower.compare_until(it, 10)
        it.kill()
        it.start()
        follower.compare_until(it, 10)


@pytest.mark.ci
def test_many_followers_behind_a_front_cost_the_core_as_much_as_one(tmp_path):
    port = free_port()
    with (
        core(tmp_path / "home", "--metrics-listen", f"127.0.0.1:{port}") as it,
        front(tmp_path / "eu", it.address, "--region", "eu") as eu,
        contextlib.ExitStack() as others,
    ):
        train(it.address, "first", steps=40)
        followers = [others.enter_context(recorder(eu.address)) for _ in range(20)]
        eventually(lambda: all(follower.cuts for follower in followers), 60)
        fixed = len(followers[0].cuts[0].fixed.content)
        assert eu.wan_bytes("down", "fixed") == fixed, "fixed values must cross the WAN once"
        first = [each.version for each in it.status().fragments]
        parameters = [each.parameters for each in it.status().fragments]
        train(it.address, "second", steps=80)
        eventually(lambda: it.status().contributions.pending == 0)
        newest = tuple(each.version for each in it.status().fragments)
        eventually(lambda: all(follower.cuts[-1].versions == newest for follower in followers), 60)
        here, home = eu.metrics(), metrics(port)
        once = sum(count * (new - old) for count, new, old in zip(parameters, newest, first, strict=True))
        assert 0 < eu.wan_bytes("down", "update") <= 0.6 * once, "int4 updates must cross the WAN once"
        assert 0 < eu.wan_bytes("down", "whole") <= 1.1 * 4 * sum(parameters), "whole fragments must cross the WAN once"
        for kind in ("update", "whole", "fixed"):
            assert home.total("atoll_reader_bytes_total", kind=kind) == eu.wan_bytes("down", kind)
        assert home.total("atoll_readers") == 1, "the core must see only the front's watch"
        assert here.total("atoll_front_readers") == 20
        assert here.total("atoll_front_reader_bytes_total") > 15 * (eu.wan_bytes("down", "update") + fixed)
        assert [each.learner for each in it.status().learners] == ["first", "second"]
