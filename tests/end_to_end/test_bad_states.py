"""Damaged directories that a starting core may find: whether the core recovers, and its message.

`docs/concepts/failures.md` lists them, and a test below compares the list with this file.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from atoll_server.checkpoints.restore import RESTORING
from atoll_server.cli.run_directory import read_run
from atoll_server.cli.verify import verify
from atoll_server.ledger import database, run_ledger
from atoll_wire import outer_pb2 as pb
from atoll_wire.errors import UserError

from tests.end_to_end.world import Trainee, core, eventually, train

DOCUMENT = Path(__file__).parents[2] / "docs" / "concepts" / "failures.md"
DAMAGE: dict[str, Bad] = {}
QUICK = {  # a start for each kind of damage; the other starts are slow tests
    "ledger is not a database",
    "ledger has a damaged page",
    "contribution has a changed weight",
    "merge is gone",
    "run uses a different protocol",
    "clock is behind the last start",
    "payload has a flipped bit",
    "spool has files that were never acknowledged",
    "newest snapshot is cut",
    "all snapshots are damaged",
    "initial parameters are gone",
    "directory is a file",
}


@dataclass(frozen=True)
class Bad:
    """A damaged directory. says: text of the error if the core does not start, or of the log if it recovers.

    warns: the warning of `atoll checkpoint verify` if a core recovers; empty if nothing is damaged.
    """

    damage: Callable[[Path], None]
    says: str
    recovers: bool
    warns: str


def bad(says: str, *, recovers: bool = False, warns: str = ""):
    def add(damage: Callable[[Path], None]) -> Callable[[Path], None]:
        DAMAGE[damage.__name__.replace("_", " ")] = Bad(damage, says, recovers, warns)
        return damage

    return add


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Iterator[Path]:
    """Yields the directory of a killed core, with two snapshots. A start needs the payloads of later merges."""
    with core(tmp_path_factory.mktemp("core"), "--snapshot-every-s", "3600", "--keep-snapshots", "2") as running:
        for _ in range(2):
            train(running.address, "a", "b", steps=40)
            with running.operator() as stub:
                stub.TakeCheckpoint(pb.TakeCheckpointRequest())
        train(running.address, "a", "b", steps=60)
        eventually(lambda: running.status().contributions.pending == 0)
        running.kill()
        yield running.directory


# ------------------------------------------------------------------------------------------------- the ledger


def sql(directory: Path, statement: str) -> None:
    with closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
        changed = db.execute(statement)
        assert changed.rowcount != 0, "the statement changed no row"
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def set_meta(directory: Path, key: str, value: Any) -> None:
    with closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
        run_ledger.put_meta(db, key, value)
        db.commit()


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


def cut(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])


@bad("cannot be used as a ledger (file is not a database): restore it from a backup")
def ledger_is_not_a_database(directory: Path) -> None:
    for log in directory.glob("ledger.sqlite-*"):  # SQLite could still read pages from the log
        log.unlink()
    (directory / "ledger.sqlite").write_bytes(b"not a database at all, but of some length" * 100)


@bad("restore")
def ledger_is_cut(directory: Path) -> None:
    sql(directory, f"PRAGMA user_version={database.SCHEMA_VERSION}")
    cut(directory / "ledger.sqlite", 0.5)


@bad("restore")
def ledger_has_a_damaged_page(directory: Path) -> None:
    sql(directory, f"PRAGMA user_version={database.SCHEMA_VERSION}")
    path = directory / "ledger.sqlite"
    content = bytearray(path.read_bytes())
    for page in range(2, len(content) // 4096):
        content[page * 4096 : page * 4096 + 64] = bytes(64)
    path.write_bytes(content)


@bad("has schema 99, but this version reads 7: use the version that wrote it")
def ledger_was_written_by_a_newer_atoll(directory: Path) -> None:
    sql(directory, "PRAGMA user_version=99")


@bad(
    "a row of the ledger table contributions does not match its checksum",
    recovers=True,
    warns="ledger rows: a row of the ledger table contributions",
)
def contribution_has_changed_tokens(directory: Path) -> None:
    sql(directory, "UPDATE contributions SET tokens=tokens+1 WHERE rowid=3")


@bad("does not match its checksum: restore a backup", recovers=True, warns="ledger rows: the fate of contribution")
def contribution_has_a_changed_weight(directory: Path) -> None:
    sql(directory, "UPDATE contributions SET weight=0.123 WHERE rowid=3")


@bad("the ledger has a merge but not its contribution")
def contribution_of_a_merge_is_gone(directory: Path) -> None:
    sql(directory, "DELETE FROM contributions WHERE rowid=(SELECT max(rowid) FROM contributions)")


@bad("a row of the ledger table merges does not match its checksum")
def merge_has_a_changed_checksum(directory: Path) -> None:
    sql(directory, "UPDATE merges SET theta=theta+1 WHERE version=(SELECT max(version) FROM merges)")


@bad("the ledger lacks version")
def merge_is_gone(directory: Path) -> None:
    sql(directory, "DELETE FROM merges WHERE version=(SELECT max(version)-1 FROM merges)")


@bad("a row of the ledger table learners does not match its checksum")
def learner_has_a_changed_incarnation(directory: Path) -> None:
    sql(directory, "UPDATE learners SET incarnation=incarnation+7 WHERE name='a'")


@bad("a row of the ledger table snapshots does not match its checksum")
def snapshot_has_changed_versions(directory: Path) -> None:
    sql(directory, "UPDATE snapshots SET versions='[[0, 7777], [1, 7777]]'")


@bad("a row of the ledger table meta does not match its checksum")
def run_has_a_changed_learning_rate(directory: Path) -> None:
    sql(directory, "UPDATE meta SET value=replace(value, '0.85', '0.8') WHERE key='settings'")


@bad("a row of the ledger table tallies does not match its checksum")
def tally_has_changed_tokens(directory: Path) -> None:
    sql(directory, "UPDATE tallies SET tokens='7'")


@bad("the run uses protocol 77, but this core uses 3: use the version that started the run")
def run_uses_a_different_protocol(directory: Path) -> None:
    set_meta(directory, "protocol", 77)


@bad("of Atoll computes a different layout for the run's tensors: use the version that started the run")
def layout_has_a_different_fingerprint(directory: Path) -> None:
    set_meta(directory, "fingerprint", "00")


@bad("this machine's clock is behind the run", recovers=True)
def clock_is_behind_the_last_start(directory: Path) -> None:
    from atoll_server.ledger.rows import LearnerRow

    with closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
        for row in run_ledger.learners(db):
            later = row.account | {"heard_at": time.time() + 86_400.0}
            run_ledger.put_learner(
                db, LearnerRow(row.name, row.region, row.incarnation, row.nonces, later, row.evicted)
            )
        db.commit()


# ------------------------------------------------------------------------------------------------- payloads


def payload(directory: Path) -> Path:
    """Returns a payload that a start needs, because it is from a fragment's newest merge."""
    with closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
        query = (
            "SELECT learner, incarnation, fragment, seq FROM contributions WHERE fate='merged' ORDER BY version DESC, "
            "rowid DESC LIMIT 1"
        )
        learner, incarnation, fragment, seq = db.execute(query).fetchone()
    return directory / "spool" / "g1" / f"f{fragment:04d}" / f"{learner}-{incarnation}-{seq}.frames"


@bad("an acknowledged contribution is lost; restore a backup")
def payload_is_gone(directory: Path) -> None:
    payload(directory).unlink()


@bad("is truncated: an acknowledged contribution is lost; restore a backup")
def payload_is_cut(directory: Path) -> None:
    cut(payload(directory), 0.7)


@bad("does not match its checksum: the disk lost acknowledged data")
def payload_has_a_flipped_bit(directory: Path) -> None:
    flip(payload(directory), 0.9)


@bad("restore a backup")
def payload_declares_a_length_beyond_its_end(directory: Path) -> None:
    path = payload(directory)
    content = bytearray(path.read_bytes())
    content[4:8] = (0xFFFFFFF0).to_bytes(4, "little")
    path.write_bytes(content)


@bad("files_not_needed=2", recovers=True)
def spool_has_files_that_were_never_acknowledged(directory: Path) -> None:
    for name in ("z-1-1.frames", "a-9-9.part"):
        (directory / "spool" / "g1" / "f0000" / name).write_bytes(b"half of something")


# ------------------------------------------------------------------------------------------------- snapshots


def snapshots(directory: Path) -> list[Path]:
    return sorted((directory / "snapshots").glob("*.safetensors"))


@bad("ignoring a snapshot that is damaged or missing: check the disk", recovers=True, warns="snapshot 2 is damaged")
def newest_snapshot_is_gone(directory: Path) -> None:
    snapshots(directory)[-1].unlink()


@bad("ignoring a snapshot that is damaged or missing: check the disk", recovers=True, warns="snapshot 2 is damaged")
def newest_snapshot_is_cut(directory: Path) -> None:
    cut(snapshots(directory)[-1], 0.6)


@bad("ignoring a snapshot that is damaged or missing: check the disk", recovers=True, warns="snapshot 2 is damaged")
def newest_snapshot_has_a_flipped_bit(directory: Path) -> None:
    flip(snapshots(directory)[-1], 0.8)


@bad("ignoring a snapshot that is damaged or missing: check the disk", recovers=True, warns="snapshot 2 is damaged")
def newest_snapshot_declares_a_giant_header(directory: Path) -> None:
    path = snapshots(directory)[-1]
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])


@bad("restore a backup")
def all_snapshots_are_damaged(directory: Path) -> None:
    for path in snapshots(directory):
        flip(path, 0.8)


@bad("state restored", recovers=True)
def snapshot_was_half_written_when_the_power_failed(directory: Path) -> None:
    (directory / "snapshots" / "00000009.part").write_bytes(b"half")
    (directory / "snapshots" / "00000010.safetensors").write_bytes(b"renamed, but never committed")


# ------------------------------------------------------------------------------------------------- initial parameters


@bad("initial.safetensors cannot be read (No such file or directory): restore it from a backup")
def initial_parameters_are_gone(directory: Path) -> None:
    (directory / "initial.safetensors").unlink()


@bad("initial.safetensors")
def initial_parameters_are_cut(directory: Path) -> None:
    cut(directory / "initial.safetensors", 0.5)


@bad("initial.safetensors")
def initial_parameters_declare_a_giant_header(directory: Path) -> None:
    path = directory / "initial.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])


@bad("state restored", recovers=True)
def an_upload_of_initial_parameters_was_left_over(directory: Path) -> None:
    (directory / "staging" / "1.part").write_bytes(b"half")


@bad(
    "initial.safetensors does not match its checksum: restore it from a backup",
    recovers=True,
    warns="initial parameters: ",
)
def initial_parameters_have_a_flipped_bit(directory: Path) -> None:
    flip(directory / "initial.safetensors", 0.9)


# ------------------------------------------------------------------------------------------------- the directory


@bad("cannot be used")
def directory_is_a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("no directory")


@bad("cannot be used")
def spool_is_a_file(directory: Path) -> None:
    shutil.rmtree(directory / "spool")
    (directory / "spool").write_text("no directory")


@bad("is incomplete (a restore of a backup was interrupted): run the restore again")
def restore_of_a_backup_was_interrupted(directory: Path) -> None:
    (directory / RESTORING).touch()


def files(directory: Path) -> dict[Path, bytes]:
    """Returns all files except SQLite's shared memory, which a reader may create."""
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.name.endswith("-shm")]
    return {path: path.read_bytes() for path in paths}


@pytest.mark.parametrize("name", DAMAGE)
def test_verify_reports_without_a_core_what_a_start_would_find(template, tmp_path, name, capsys):
    case, directory = DAMAGE[name], tmp_path / "run"
    shutil.copytree(template, directory)
    case.damage(directory)
    before = files(directory)
    if case.recovers:
        verify(directory)
    else:
        with pytest.raises(UserError) as error:
            verify(directory)
        print(error.value)
        assert "\n" not in str(error.value)
        assert ": " in str(error.value), "the error states a fix"
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert files(directory) == before
    if case.recovers:
        assert len(warnings) == bool(case.warns)
        assert all(case.warns in line for line in warnings)


def type_verify(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atoll.cli", "checkpoint", "verify", str(directory), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_verify_names_each_part_of_a_sound_directory(template, tmp_path):
    shutil.copytree(template, tmp_path / "run")
    done = type_verify(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    parts = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert parts[:-1] == ["ledger pages", "initial parameters", "snapshots", "start", "payloads", "ledger rows"]
    assert done.stdout.splitlines()[-1] == f"a core can start from {tmp_path / 'run'}"


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_verify_prints_one_object_for_programs(template, tmp_path, form):
    shutil.copytree(template, tmp_path / "run")
    DAMAGE["newest snapshot is cut"].damage(tmp_path / "run")
    done = type_verify(tmp_path / "run", "-o", form)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["directory"] == str(tmp_path / "run")
    states = {each["part"]: each["state"] for each in found["parts"]}
    assert [*states] == ["ledger pages", "initial parameters", "snapshots", "start", "payloads", "ledger rows"]
    assert {part for part, state in states.items() if state != "ok"} == {"snapshots"}
    [snapshots] = (each for each in found["parts"] if each["part"] == "snapshots")
    assert snapshots["intact_files"] == snapshots["files"] - 1
    assert len(found["warnings"]) == 1


def test_verify_finds_a_ledger_with_random_bytes_in_its_middle(template, tmp_path):
    shutil.copytree(template, tmp_path / "run")
    sql(tmp_path / "run", f"PRAGMA user_version={database.SCHEMA_VERSION}")
    path = tmp_path / "run" / "ledger.sqlite"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 6000] = random.Random(1).randbytes(6000)
    path.write_bytes(content)
    done = type_verify(tmp_path / "run")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "restore" in done.stderr
    assert done.stderr.count("\n") == 1


def test_verify_refuses_while_a_core_uses_the_directory(tmp_path):
    with core(tmp_path) as running:
        train(running.address, "a", steps=8)
        with pytest.raises(UserError, match=r"a core uses .*: stop the core, or check a copy"):
            verify(running.directory)


def test_verify_finds_a_damaged_payload_that_waits_for_its_merge(tmp_path):
    over = threading.Event()
    with core(tmp_path) as running:
        slow = Trainee(running.address, "slow", lambda _: over.wait(100), drain_s=0.0)  # ends without a step
        slow.start()
        eventually(lambda: running.status().learners)
        fast = Trainee(running.address, "fast", lambda _: over.is_set(), drain_s=0.0)
        fast.start()
        eventually(lambda: running.status().contributions.pending > 0)
        running.kill()
        verify(running.directory)
        for path in (running.directory / "spool").rglob("*.frames"):
            flip(path, 0.9)
        with pytest.raises(UserError, match="does not match its checksum: the disk lost acknowledged data"):
            verify(running.directory)
        over.set()
        for trainee in (slow, fast):
            trainee.done()


def test_each_quick_start_is_of_a_known_damage():
    assert set(DAMAGE) > QUICK


@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.ci) for each in DAMAGE])
def test_a_damaged_directory_is_recovered_or_refused_in_one_line(template, tmp_path, name):
    case, directory = DAMAGE[name], tmp_path / "run"
    shutil.copytree(template, directory)
    sound = read_run(directory)
    case.damage(directory)
    command = [sys.executable, "-m", "atoll.cli", "core", "--dir", str(directory), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        served = process.stdout.readline().startswith("atoll core listens on")
        if served:
            process.terminate()
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    print(said)
    assert served == case.recovers
    assert case.says in said
    assert "Traceback" not in said
    if case.recovers:
        assert process.returncode == 0
        assert [s.checksums() for s in read_run(directory).states.values()] == [
            s.checksums() for s in sound.states.values()
        ]
    else:
        assert process.returncode == 1
        error = said.splitlines()[-1]
        assert error.startswith("error: ")
        assert any(word in error for word in (str(tmp_path), "ledger", "row of", "contribution", "run"))


def test_the_document_lists_each_damage_with_its_message():
    listed = dict(re.findall(r"^\| ([a-z].*?) \| `(.*?)` \|", DOCUMENT.read_text(), re.MULTILINE))
    missing = {name: case.says for name, case in DAMAGE.items() if listed.get(name) != case.says}
    assert not missing, f"add to the table in docs/concepts/failures.md: {json.dumps(missing, indent=1)}"
