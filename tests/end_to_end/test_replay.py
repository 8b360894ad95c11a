"""`atoll replay` repeats a recorded run from its ledger, byte for byte or with other outer settings."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from atoll_server.cli.run_directory import read_run
from atoll_wire import outer_pb2 as pb
from safetensors.numpy import load_file

from tests.end_to_end.world import Trainee, core, eventually

STEPS = 500


def atoll(*arguments: object) -> tuple[int, str, str]:
    command = [Path(sys.executable).with_name("atoll"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def train(tmp_path: Path, *arguments: str) -> Path:
    with core(tmp_path, *arguments) as running:
        trainees = [Trainee(running.address, name, lambda t: len(t.losses) > STEPS, pace_s=0.004) for name in "ab"]
        for trainee in trainees:
            trainee.start()
        for trainee in trainees:
            trainee.done()
        eventually(lambda: running.status().contributions.pending == 0)
    return running.directory


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("recorded"), "--record")


def test_a_recorded_run_is_repeated_byte_for_byte(recorded, tmp_path):
    out = tmp_path / "again.safetensors"
    code, said, error = atoll("replay", recorded, "--out", out)
    assert (code, error) == (0, "")
    assert "the same, byte for byte" in said
    merges = sum(state.version for state in read_run(recorded).states.values())
    assert merges > 20
    assert f"{merges:,} merges" in said
    exported = tmp_path / "exported.safetensors"
    assert atoll("checkpoint", "export", exported, "--dir", recorded)[0] == 0
    assert out.read_bytes() == exported.read_bytes()


def test_a_replay_prints_one_object_for_programs(recorded, tmp_path):
    out = tmp_path / "again.safetensors"
    code, said, error = atoll("replay", recorded, "--out", out, "-o", "jsonl")
    assert (code, error) == (0, "")
    merges = sum(state.version for state in read_run(recorded).states.values())
    assert json.loads(said) == {
        "merges": merges, "changes": [], "identical": True, "snapshot": False, "apart": 0.0, "out": str(out),
    }  # fmt: skip
    assert out.exists()
    changed = json.loads(atoll("replay", recorded, "--set", "outer_lr=0.7", "--json")[1])
    assert changed["changes"] == ["outer_lr=0.7"]
    assert changed["apart"] > 0
    assert not changed["identical"]


@pytest.mark.ci
def test_a_record_and_snapshots_are_deleted_only_on_request(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "run")

    def started(*options: str) -> tuple[int, int]:
        """Starts the core for two more snapshots. Returns the numbers of payloads and snapshots."""
        with core(tmp_path, *options) as running, running.operator() as stub:
            for _ in range(2):
                stub.TakeCheckpoint(pb.TakeCheckpointRequest(), timeout=20)
            payloads = len(list((running.directory / "spool").rglob("*.frames")))
            return payloads, len(stub.ListCheckpoints(pb.ListCheckpointsRequest(), timeout=20).checkpoints)

    payloads, snapshots = started("--keep-snapshots", "4")  # the previous core was killed without a snapshot
    assert (payloads > 0, snapshots) == (True, 2)
    assert started() == (payloads, 4)
    assert "the same, byte for byte" in atoll("replay", tmp_path / "run")[1]
    assert started("--no-record", "--keep-snapshots", "2") == (0, 2)


@pytest.mark.ci
@pytest.mark.parametrize("change", ["outer_lr=0.7", "outer-momentum=0.9", "codec=float32"])
def test_other_settings_give_another_model(recorded, tmp_path, change):
    out, recorded_out = tmp_path / "what-if.safetensors", tmp_path / "recorded.safetensors"
    code, said, error = atoll("replay", recorded, "--set", change, "--out", out)
    assert (code, error) == (0, "")
    assert " by 0 % of" not in said
    assert atoll("checkpoint", "export", recorded_out, "--dir", recorded)[0] == 0
    ours, theirs = load_file(out), load_file(recorded_out)
    assert any((ours[name] != theirs[name]).any() for name in theirs)


def test_a_runs_own_settings_give_the_same_model(recorded):
    said = atoll("replay", recorded, "--set", "outer_lr=0.5", "--set", "staleness_exponent=0.5")[1]
    assert " by 0 % of" in said


@pytest.mark.ci
def test_settings_not_asked_for_stay_as_in_each_merge(tmp_path):
    train(tmp_path, "--record", "--outer-momentum", "0.3")
    directory = train(tmp_path, "--record", "--outer-momentum", "0.6")  # the same run with another momentum
    assert "the same, byte for byte" in atoll("replay", directory)[1]
    assert " by 0 % of" in atoll("replay", directory, "--set", "outer_lr=0.5")[1]
    assert " by 0 % of" not in atoll("replay", directory, "--set", "outer_momentum=0.6")[1]


@pytest.mark.parametrize(
    "change", ["outer_lr", "outer_lr=high", "outer_lr=99", "quorum=1", "inner_steps=3", "=1", "codec=int2"]
)
def test_unchangeable_settings_are_named(recorded, change):
    code, said, error = atoll("replay", recorded, "--set", change)
    assert (code, said) == (2, "")
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1


def test_settings_that_are_given_twice_are_named(recorded):
    code, _, error = atoll("replay", recorded, "--set", "outer_lr=0.5", "--set", "outer_lr=0.7")
    assert (code, error) == (2, "error: --set outer_lr is given twice: give each name once\n")


@pytest.mark.parametrize("command", [("replay",), ("checkpoint", "export", "out.safetensors", "--dir")])
@pytest.mark.parametrize("damage", ["cut", "empty", "noise"])
def test_a_damaged_ledger_is_named(recorded, tmp_path, command, damage):
    copy = tmp_path / "run"
    shutil.copytree(recorded, copy)
    for beside in copy.glob("ledger.sqlite-*"):
        beside.unlink()
    path = copy / "ledger.sqlite"
    data = bytearray(path.read_bytes())
    for place in range(4096, len(data), 97):
        data[place] ^= 0x5A
    path.write_bytes({"cut": data[: len(data) // 2 - 100], "empty": b"", "noise": data}[damage])
    code, _, error = atoll(*command, copy)
    assert code == 1
    assert error.startswith("error: ")
    assert "ledger.sqlite" in error or "row" in error
    assert len(error.splitlines()) == 1


@pytest.mark.ci
def test_without_a_snapshot_equality_is_only_with_the_ledger(tmp_path):
    directory = train(tmp_path, "--record", "--snapshot-every-s", "0.1")
    said = atoll("replay", directory)[1]
    assert "the same, byte for byte" in said
    assert "no snapshot" not in said
    shutil.rmtree(directory / "snapshots")
    code, said, _ = atoll("replay", directory)
    assert code == 0
    assert "no snapshot could be read" in said


def test_a_changed_payload_is_named(recorded, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(recorded, copy)
    payload = max((copy / "spool").rglob("*.frames"), key=lambda path: path.stat().st_size)
    data = bytearray(payload.read_bytes())
    data[len(data) // 2] ^= 1
    payload.write_bytes(data)
    code, _, error = atoll("replay", copy)
    assert code == 1
    assert payload.name in error
    assert "--record" not in error, "the run was recorded, so --record is no fix"


@pytest.mark.ci
def test_replay_of_an_unrecorded_run_states_what_to_do(tmp_path):
    directory = train(tmp_path, "--snapshot-every-s", "0.1")
    code, _, error = atoll("replay", directory)
    assert code == 1
    assert "--record" in error
    assert "backup" not in error, "a backup is no fix, because nothing is lost"
    assert len(error.splitlines()) == 1


def test_replay_refuses_a_directory_without_a_run(tmp_path):
    code, _, error = atoll("replay", tmp_path)
    assert code == 1
    assert "holds no run" in error
