"""Backups of a running core, and their restore into another directory."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from atoll.demo.processes import DemoError
from atoll_server.backups.backup import back_up, check_files
from atoll_server.backups.backup_files import BackupError
from atoll_server.backups.backup_folder import PART, RECORD, backups_in, only_backup, read_record, write_record
from atoll_server.backups.restoring import restore_backup
from atoll_server.checkpoints.restore import RESTORING
from atoll_server.cli.run_directory import read_run
from atoll_server.cli.tables import moment, shown
from atoll_server.cli.verify import verify
from atoll_server.ledger import shard_ledger
from atoll_server.ledger.database import read_ledger
from atoll_server.storage import crash_points
from atoll_server.storage.disk import DISK, Disk, ReadableFile, WritableFile
from atoll_wire import outer_pb2 as pb
from atoll_wire.cli.output import Format
from atoll_wire.errors import SettingsError
from atoll_wire.process.clock import SystemClock
from rich.console import Console
from structlog.testing import capture_logs

from tests.end_to_end.test_kill import each_merged_once
from tests.end_to_end.test_restore import take, training
from tests.end_to_end.world import Core, core, eventually, sharded, train

OPTIONS = ("--snapshot-every-s", "0.5")
AWAY = ("the core does not answer", "lost the connection", "waiting for")  # while the core is down
BACKUP_POINTS = [point for point in crash_points.POINTS if point.startswith("backup.")]
RESTORE_POINTS = [point for point in crash_points.POINTS if point.startswith(("restoring.", "rollback."))]


@dataclass(frozen=True)
class At(SystemClock):
    """A clock that shows this time, in wall-clock seconds."""

    at: float

    def wall(self) -> float:
        return self.at


def atoll(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a checkpoint command as an operator would."""
    command = [sys.executable, "-m", "atoll_server", "checkpoint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


def checksums(directory: Path) -> dict[int, tuple[int, tuple[int, int, int]]]:
    """Returns the version and checksums of each fragment that a core would start from."""
    return {index: (state.version, state.checksums()) for index, state in read_run(directory).states.items()}


def logged(running: Core, fragment: int, version: int) -> tuple[int, int, int]:
    """Returns the checksums that a running core's ledger has for a version."""
    with read_ledger(running.directory / "ledger.sqlite") as db:
        row = next(shard_ledger.merges(db, 1, fragment, version - 1, version))
    return row.theta, row.theta_pub, row.momentum


@pytest.mark.ci
def test_a_backup_of_a_running_core_restores_its_parameters_bit_by_bit_and_nobody_waits(tmp_path):
    root = tmp_path / "backups"
    with core(tmp_path, *OPTIONS) as running:
        with training(running.address, "a", "b") as trainees:
            eventually(lambda: running.status().merges >= 10, 60)
            before = [len(trainee.losses) for trainee in trainees]
            for trainee in trainees:
                trainee.longest_step_s = 0.0
            merges = running.status().merges
            for _ in range(3):
                done = atoll("backup", root, "--dir", running.directory)
                assert done.returncode == 0, done.stderr
                assert "verified" in done.stdout
            assert running.status().merges > merges, "rounds went on"
            assert all(len(t.losses) > b for t, b in zip(trainees, before, strict=True))
            assert max(trainee.longest_step_s for trainee in trainees) < 1.0
            eventually(lambda: running.status().contributions.pending < 10)
        each_merged_once(running.directory / "ledger.sqlite")
        assert "ERROR" not in running.log().upper()
        backup = backups_in(root)[-1]
        verified = atoll("verify", backup)
        assert verified.returncode == 0, verified.stderr + verified.stdout
        assert "a core can start from" in verified.stdout
        record = read_record(backup)
        there = tmp_path / "elsewhere"
        done = atoll("restore-backup", backup, "--dir", there)
        assert done.returncode == 0, done.stderr
        for index, (version, found) in checksums(there).items():
            assert version == record.versions[index]
            assert found == logged(running, index, version)


@pytest.mark.ci
def test_learners_follow_a_restored_backup_and_the_status_says_what_is_lost(tmp_path):
    root = tmp_path / "backups"
    with core(tmp_path, *OPTIONS) as running:
        with training(running.address, "a", "b") as trainees, capture_logs() as logs:
            eventually(lambda: running.status().merges >= 60, 60)
            taken = back_up(running.directory, root, keep=2).record
            kept = running.status().tokens_trained
            eventually(lambda: running.status().merges >= taken.merges() + 40, 60)
            lost = running.status()
            running.kill()
            shutil.rmtree(running.directory)
            logs.clear()
            done = atoll("restore-backup", backups_in(root)[-1], "--dir", running.directory)
            assert done.returncode == 0, done.stderr
            assert f"): {taken.merges():,} merges" in done.stdout
            running.start()
            eventually(lambda: running.status().merges >= taken.merges() + 10, 60)
            eventually(lambda: all(each.tokens for each in running.status().learners))
            status = running.status()
            with running.operator() as stub:
                events = [each.text for each in stub.ListEvents(pb.ListEventsRequest(), timeout=20).events]
        assert f"(generation {status.generation}): " in done.stdout
        assert status.restored.backup_at == pytest.approx(taken.taken_at)
        undone, trained = status.restored.undone_tokens, sum(each.tokens for each in status.learners)
        assert trained - undone <= status.tokens_trained < trained, "schedules continue from the backup"
        assert undone >= lost.tokens_trained - kept > 0
        assert any(text.startswith("restored from the backup of ") for text in events)
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(shown(status, Format.TABLE))
        told = f"(generation {status.generation}) at {moment(status.restored.at)}"
        assert f"{told}: {undone:,} trained tokens no longer count" in console.export_text()
        for each in status.learners:
            before = next(other for other in lost.learners if other.learner == each.learner)
            assert each.goodput.lost_s["thrown_away"] > 0.2 * before.goodput.useful_s, "what the backup lacks is lost"
            assert each.goodput.useful_s > 0.1 * before.goodput.useful_s, "what it has is not"
        assert [each for each in logs if each["log_level"] in {"error", "critical"}] == []
        warned = [each["event"] for each in logs if each["log_level"] == "warning"]
        others = [text for text in warned if not text.startswith(AWAY)]
        assert others == ["the run was restored to a checkpoint: dropping later work"] * len(trainees), warned
        assert len(warned) <= 4 * len(trainees), warned
        assert running.log().count("restored: later work is lost") == 1


def test_unchanged_files_are_shared_with_the_previous_backup_and_old_backups_go(tmp_path):
    root = tmp_path / "backups"
    with core(tmp_path, "--snapshot-every-s", "3600") as running:
        train(running.address, "a", steps=40)
        take(running)
        train(running.address, "a", steps=20)
        first = back_up(running.directory, root, keep=2)
        second = back_up(running.directory, root, keep=2)
        assert first.linked_bytes == 0
        snapshot, ledger = f"snapshots/{first.record.snapshots[0]:08d}.safetensors", "ledger.sqlite"
        for name in ("initial.safetensors", snapshot):
            assert (first.path / name).samefile(second.path / name)
            assert not (first.path / name).samefile(running.directory / name)
        assert not (first.path / ledger).samefile(second.path / ledger)
        logs = sum(size for path, (size, _) in second.record.files.items() if path.startswith("audit"))
        assert second.copied_bytes == second.record.files[ledger][0] + logs
        assert second.linked_bytes == second.record.size_bytes() - second.copied_bytes
        newer = take(running)
        third = back_up(running.directory, root, keep=2)
        assert third.record.snapshots == [newer.id]
        assert (third.path / "initial.safetensors").samefile(second.path / "initial.safetensors")
        assert third.removed == 1
        assert backups_in(root) == [second.path, third.path]
    for path in backups_in(root):
        check_files(path, read_record(path))  # sharing ends with the older backup, and harms no newer one
        assert atoll("verify", path).returncode == 0


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """The directory of a killed core, with a snapshot, and merged and pending contributions after it."""
    with core(tmp_path_factory.mktemp("core"), "--snapshot-every-s", "3600", "--record") as running:
        train(running.address, "a", "b", steps=40)
        take(running)
        train(running.address, "a", "b", steps=40)
        running.kill()
        return running.directory


@pytest.fixture
def backup(stopped, tmp_path) -> Path:
    return back_up(stopped, tmp_path / "backups", keep=3).path


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    "pattern", ["snapshots/*", "spool/**/*.frames", "initial.safetensors", "ledger.sqlite", "audit.jsonl", RECORD]
)
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_verify_and_restore_find_a_damaged_file(backup, tmp_path, capsys, pattern, damage):
    path = max(backup.glob(pattern))
    if damage == "flipped":
        flip(path, 0.9 if path.name != RECORD else 0.05)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1] if path.name != RECORD else path.read_bytes()[:-9])
    else:
        path.unlink()
    if (pattern, damage) == (RECORD, "gone"):
        verify(backup)
        assert "backup files: ok" not in capsys.readouterr().out, "it is only a directory without a record"
    else:
        with pytest.raises(BackupError, match=r"use another backup|use a newer Atoll"):
            verify(backup)
    with pytest.raises(BackupError):
        restore_backup(backup, tmp_path / "there")
    assert (tmp_path / "there" / RESTORING).exists() == (path.name != RECORD), "no core starts there"


def test_a_backup_prints_one_object_for_programs(stopped, tmp_path):
    root = tmp_path / "backups"
    done = atoll("backup", root, "--dir", stopped, "-o", "jsonl")
    assert done.returncode == 0, done.stderr
    [path], found = backups_in(root), json.loads(done.stdout)
    record = read_record(path)
    assert (found["path"], found["taken_at"], found["merges"]) == (str(path), record.taken_at, record.merges())
    assert found["copied_bytes"] > 0
    every = atoll("backup", root, "--dir", stopped, "--every-s", "60", "--json")
    said = "--every-s and --json cannot be combined: give --output jsonl for one line per backup"
    assert (every.returncode, said in every.stderr) == (2, True)


@pytest.mark.ci
@pytest.mark.parametrize("point", BACKUP_POINTS)
def test_a_backup_that_is_killed_does_not_count_and_the_next_one_cleans_up(stopped, tmp_path, point):
    root = tmp_path / "backups"
    first = back_up(stopped, root, keep=1).path
    dead = atoll("backup", root, "--dir", stopped, "--keep", "1", ATOLL_CRASH_AT=point)
    assert dead.returncode == -signal.SIGKILL
    left = backups_in(root)
    counts = point in {"backup.renamed", "backup.old forgotten", "backup.old removed"}
    assert len(left) == (1 if point.startswith("backup.old") or not counts else 2)
    assert (first in left) == (not point.startswith("backup.old"))
    for path in left:
        check_files(path, read_record(path))
    again = back_up(stopped, root, keep=1)
    assert backups_in(root) == [again.path]
    assert sorted(path.name for path in root.iterdir()) == sorted([again.path.name, "lock"])
    check_files(again.path, again.record)


@pytest.mark.ci
@pytest.mark.parametrize("point", RESTORE_POINTS)
def test_a_restore_that_is_killed_starts_no_core_and_a_second_one_completes_it(stopped, backup, tmp_path, point):
    there = tmp_path / "there"
    dead = atoll("restore-backup", backup, "--dir", there, ATOLL_CRASH_AT=point)
    assert dead.returncode == -signal.SIGKILL
    if point != "restoring.finished":
        assert (there / RESTORING).exists()
        with pytest.raises(SettingsError, match="run the restore again"):
            verify(there)
        done = atoll("restore-backup", backup, "--dir", there)
        assert done.returncode == 0, done.stderr
    assert checksums(there) == checksums(stopped)
    assert read_run(there).line.generation >= 2
    assert not (there / RESTORING).exists()
    verify(there)


def test_no_core_starts_in_a_directory_whose_restore_was_interrupted(backup, tmp_path):
    there = tmp_path / "run"
    assert atoll("restore-backup", backup, "--dir", there, ATOLL_CRASH_AT="restoring.copied").returncode < 0
    with (
        pytest.raises(DemoError, match=r"is incomplete \(a restore of a backup was interrupted\)"),
        core(tmp_path),
    ):
        pass


def test_a_recorded_run_is_restored_with_all_its_payloads(stopped, backup, tmp_path):
    restore_backup(backup, tmp_path / "there")
    assert checksums(tmp_path / "there") == checksums(stopped)
    again = read_run(tmp_path / "there", from_start=True)
    assert {index: state.checksums() for index, state in again.states.items()} == {
        index: found for index, (_, found) in checksums(stopped).items()
    }


def test_a_file_of_the_same_name_with_other_content_is_not_shared(stopped, tmp_path):
    """Two restores of one backup give two histories, whose files may have the same names."""
    root = tmp_path / "backups"
    first = back_up(stopped, root, keep=2)
    name = f"snapshots/{first.record.snapshots[0]:08d}.safetensors"
    size, identity = first.record.files[name]
    write_record(first.path, replace(first.record, files=first.record.files | {name: (size, identity[::-1])}), DISK)
    second = back_up(stopped, root, keep=2)
    assert not (second.path / name).samefile(first.path / name)
    assert (second.path / "initial.safetensors").samefile(first.path / "initial.safetensors")
    check_files(second.path, second.record)


def test_a_file_that_the_core_deletes_during_the_backup_begins_it_again(stopped, tmp_path):
    class Deleting(Disk):
        """Fails to open the first payload, as if a snapshot had just covered it."""

        failed = 0

        def open(self, path: Path) -> ReadableFile:
            if path.suffix == ".frames" and path.is_relative_to(stopped) and self.failed < self.times:
                self.failed += 1
                raise FileNotFoundError(path)
            return super().open(path)

    disk = Deleting()
    disk.times = 2
    done = back_up(stopped, tmp_path / "backups", keep=1, disk=disk)
    assert disk.failed == 2
    check_files(done.path, done.record)
    disk.times = 1000
    with pytest.raises(BackupError, match="deleted files 10 times"):
        back_up(stopped, tmp_path / "others", keep=1, disk=disk)
    assert backups_in(tmp_path / "others") == []
    assert not list((tmp_path / "others").glob(f"*{PART}"))


def test_a_full_disk_fails_the_backup_and_leaves_the_earlier_ones(stopped, tmp_path):
    class Full(Disk):
        def create(self, path: Path) -> WritableFile:
            if path.suffix == ".safetensors":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return super().create(path)

    root = tmp_path / "backups"
    with pytest.raises(BackupError, match=r"No space left.*free space there, or keep fewer backups"):
        back_up(stopped, root, keep=1, disk=Full())
    assert [path.name for path in root.iterdir()] == ["lock"]


def test_a_disk_that_is_too_full_for_the_ledger_is_not_taken_for_a_damaged_run(stopped, tmp_path):
    class Full(Disk):
        def connect(self, path: Path) -> sqlite3.Connection:
            db = super().connect(path)
            db.execute("PRAGMA max_page_count=2")
            return db

    with pytest.raises(BackupError, match=r"No space left.*free space there, or keep fewer backups"):
        back_up(stopped, tmp_path / "backups", keep=1, disk=Full())


def test_a_snapshot_that_is_damaged_in_the_run_fails_the_backup(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    flip(next((tmp_path / "run" / "snapshots").iterdir()), 0.5)
    with pytest.raises(BackupError, match="is damaged, or its copy is"):
        back_up(tmp_path / "run", tmp_path / "backups", keep=1)
    assert backups_in(tmp_path / "backups") == []


def test_what_cannot_be_backed_up_or_restored_is_refused(stopped, backup, tmp_path):
    root = backup.parent
    with pytest.raises(SettingsError, match="holds no run"):
        back_up(tmp_path / "nothing", root, keep=1)
    with pytest.raises(SettingsError, match="in the run's own directory"):
        back_up(stopped, stopped / "backups", keep=1)
    with only_backup(root, DISK), pytest.raises(SettingsError, match="another backup writes to"):
        back_up(stopped, root, keep=1)
    with core(tmp_path / "other") as other:
        with pytest.raises(BackupError, match="has no parameters yet: start a learner first"):
            back_up(other.directory, tmp_path / "others", keep=1)
        train(other.address, "a", steps=10)
        with pytest.raises(BackupError, match="back up each run directory to its own folder"):
            back_up(other.directory, root, keep=1)
        with pytest.raises(SettingsError, match="a core uses"):
            restore_backup(backup, other.directory)
        other.stop()
    with pytest.raises(SettingsError, match="is not empty"):
        restore_backup(backup, other.directory)
    with pytest.raises(SettingsError, match="is for runs with several shards"):
        restore_backup(backup, tmp_path / "there", checkpoint=3)
    with pytest.raises(BackupError, match="is not a backup"):
        restore_backup(stopped, tmp_path / "there")
    record = read_record(backup)
    for path in ("../x", "/x", "spool/../../x", "lock", RESTORING, RECORD):
        write_record(backup, replace(record, files={path: (1, "")}), DISK)
        with pytest.raises(BackupError, match="no backup contains a file"):
            restore_backup(backup, tmp_path / "there")
    write_record(backup, replace(record, format=99), DISK)
    with pytest.raises(BackupError, match="has format 99, but this version reads 1"):
        restore_backup(backup, tmp_path / "there")


def test_what_others_keep_in_the_folders_stays(stopped, backup, tmp_path):
    root = backup.parent
    (root / "downloads.part").mkdir()
    kept = backup.rename(root / "before-the-upgrade")
    newer = [back_up(stopped, root, keep=1).path for _ in range(2)][-1]
    assert backups_in(root) == [newer]
    assert (root / "downloads.part").is_dir()
    check_files(kept, read_record(kept))
    with core(tmp_path / "empty") as empty:
        empty.stop()
    (empty.directory / "tls").mkdir()
    with pytest.raises(SettingsError, match="is not empty"):
        restore_backup(newer, empty.directory)
    assert (empty.directory / "ledger.sqlite").exists()


def test_a_symbolic_link_to_a_backup_goes_but_its_files_stay(stopped, tmp_path):
    root, elsewhere = tmp_path / "backups", tmp_path / "larger disk"
    first = back_up(stopped, root, 3).path
    first.rename(elsewhere)
    first.symlink_to(elsewhere)
    (root / f"20200101T000000.000Z{PART}").symlink_to(elsewhere)
    back_up(stopped, root, 1)
    assert len([path for path in root.iterdir() if path.is_dir()]) == 1
    check_files(elsewhere, read_record(elsewhere))


def test_a_restore_into_the_backup_itself_is_refused(backup):
    with pytest.raises(SettingsError, match="is inside the backup, which must not change"):
        restore_backup(backup, backup / "run")
    check_files(backup, read_record(backup))


def test_a_damaged_record_stops_later_backups_until_it_is_moved_away(stopped, backup, tmp_path):
    flip(backup / RECORD, 0.05)
    with pytest.raises(BackupError, match=f"is damaged .*: move {backup} to another folder"):
        back_up(stopped, backup.parent, keep=1)
    backup.rename(tmp_path / "damaged")
    assert backups_in(backup.parent) == []
    back_up(stopped, backup.parent, keep=1)


def test_files_are_copied_and_verified_if_the_file_system_has_no_hard_links(stopped, backup):
    class NoLinks(Disk):
        def copy(self, old: Path, new: Path, *, link: bool) -> None:
            super().copy(old, new, link=False)
            if link and self.spoils:
                flip(new, 0.9)

    disk = NoLinks()
    disk.spoils = False
    done = back_up(stopped, backup.parent, keep=3, disk=disk)
    assert (done.linked_bytes, done.copied_bytes) == (0, done.record.size_bytes())
    check_files(done.path, done.record)
    disk.spoils = True
    with pytest.raises(BackupError, match="is damaged, or its copy is"):
        back_up(stopped, backup.parent, keep=3, disk=disk)
    assert backups_in(backup.parent) == [backup, done.path]


def test_a_generation_that_began_after_the_backup_is_not_used_again(backup, tmp_path):
    taken_at = read_record(backup).taken_at
    found = [
        restore_backup(backup, tmp_path / f"after {after_s}", clock=At(taken_at + after_s)).rolled_back.generation
        for after_s in (-5.0, 30.0, 61.0, 3600.0)
    ]
    assert found == [2, 2, 3, 62]
    again = back_up(tmp_path / "after 3600.0", tmp_path / "others", keep=1)
    assert again.record.generation == 62
    check_files(again.path, again.record)
    verify(again.path)


def test_a_directory_whose_core_has_no_parameters_yet_can_take_a_backup(backup, stopped, tmp_path):
    with core(tmp_path / "empty") as empty:
        empty.stop()
        restore_backup(backup, empty.directory)
        empty.start()
        status = empty.status()
        assert sum(each.version for each in status.fragments) == sum(v for v, _ in checksums(stopped).values())


def lock(stack: ExitStack, root: Path) -> bool:
    """Keeps other backups out of the folder until the stack ends. Returns False while one is running."""
    try:
        stack.enter_context(only_backup(root, DISK))
    except SettingsError:
        return False
    return True


@pytest.mark.slow
def test_backups_at_an_interval_wait_for_a_run_and_end_on_sigterm(tmp_path):
    root, errors = tmp_path / "backups", tmp_path / "errors"
    command = [sys.executable, "-m", "atoll_server", "checkpoint", "backup", str(root), "--dir", str(tmp_path / "run")]
    with errors.open("w") as stderr:
        child = subprocess.Popen(
            [*command, "--every-s", "0.2", "--keep", "3"], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        assert child.stdout is not None
        assert "has no run with parameters yet" in child.stdout.readline()
        with core(tmp_path) as running:
            train(running.address, "a", steps=20)
            eventually(lambda: len(backups_in(root)) == 3, 60)
            with ExitStack() as locked:  # makes backups fail
                eventually(lambda: lock(locked, root), 60)
                eventually(lambda: "error: another backup writes to" in errors.read_text(), 60)
                before = backups_in(root)
            eventually(lambda: backups_in(root)[-1] > before[-1], 60)
            child.terminate()
            assert child.wait(20) == 0
            back_up(running.directory, root, keep=3)
        assert not list(root.glob(f"*{PART}")), "what the end of a running backup left is gone"
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_a_run_over_shards_continues_from_the_checkpoint_that_all_backups_have(tmp_path):
    """The registrar's and the shards' disks are lost. Their backups are of different moments."""
    with sharded(tmp_path, 2, "--snapshot-every-s", "3600") as run:
        cores = {"registrar": run.registrar, "shard1": run.shards[1]}
        with training(run.address, "a", "b") as trainees:
            eventually(lambda: run.status().merges >= 20, 60)
            checkpoint = take(run.registrar)
            eventually(lambda: run.status().merges >= sum(checkpoint.versions.values()) + 8, 60)
            for name, each in cores.items():
                back_up(each.directory, tmp_path / "backups" / name, keep=2)
            eventually(lambda: run.status().merges >= sum(checkpoint.versions.values()) + 30, 60)
            for name, each in cores.items():
                each.kill()
                shutil.rmtree(each.directory)
                done = atoll("restore-backup", backups_in(tmp_path / "backups" / name)[-1], "--dir", each.directory)
                assert done.returncode == 0, done.stderr
                if name == "registrar":
                    assert "the other shards need these snapshots" in done.stdout
                    assert f"{sum(checkpoint.versions.values()):,} merges" in done.stdout
                else:
                    assert "it rolls back to the run's checkpoint when it attaches" in done.stdout
            for each in cores.values():
                each.start()
            before = sum(checkpoint.versions.values())
            eventually(lambda: len(run.status().fragments) == 4 and run.status().merges >= before + 10, 90)
            status = run.status()
            assert status.generation >= 2
            assert (status.restored.checkpoint, status.restored.backup_at > 0) == (checkpoint.id, True)
        assert all(trainee.learner.stats().merged for trainee in trainees)
    for each in cores.values():
        each_merged_once(each.directory / "ledger.sqlite")
