"""Ledger, spool and snapshots: acknowledged data is durable, and damage is found and named."""

from __future__ import annotations

import asyncio
import re
import sqlite3

import numpy as np
import pytest
from atoll_server.checkpoints.snapshot import SnapshotError, SnapshotWriter, load_snapshot, snapshot_path
from atoll_server.ledger import database, lineage, run_ledger, shard_ledger
from atoll_server.ledger.database import LedgerError
from atoll_server.ledger.ledger_writer import LedgerWriter
from atoll_server.ledger.lineage import Line
from atoll_server.ledger.rows import ContributionRow, FateRow, LearnerRow, MergeRow, SnapshotRow
from atoll_server.merging import merge
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.storage.payload_writer import ChecksumError, PayloadWriter
from atoll_server.storage.spool import Spool, SpoolError, SpoolFull
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.codec.frame_codec import FrameError
from atoll_wire.contract import Fate
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import FRAME_PARAMETERS, MergeKind, TensorSpec, plan
from atoll_wire.messages.frame_messages import WireFrame
from atoll_wire.process.clock import SYSTEM

LAYOUT = plan([TensorSpec("w", (FRAME_PARAMETERS + 9_000,), "float32", MergeKind.DIRECTION)], 1)
FRAGMENT = LAYOUT.fragments[0]
KEY = ContributionKey("a", 1, 0, 1)
ROW = ContributionRow(KEY, 1, 0, 100, 4, 3, 2, 50, bytes(32), (1.5, 2.5), 1.0, 7.0)
RULE = {"lr": 0.9, "momentum": 0.5, "codec": 3, "heat": 1.0, "staleness_exponent": 0.5}
MERGE = MergeRow(0, 1, 1, (("a", 1, 1, 1.0, 0),), RULE, 40, 2, 1, 2, 3, 99, 5.0)


def frames() -> list[bytes]:
    vector = np.random.default_rng(0).standard_normal(FRAGMENT.length).astype(np.float32)
    return [frame_codec.encode_frame(vector, span, Codec.INT4) for span in FRAGMENT.frames]


def part_file(spool: Spool, payloads: list[bytes], **changes) -> PayloadWriter:
    table = [(len(p), crc32c(p)) for p in payloads]
    declared = {"size_bytes": sum(map(len, payloads)), "digest": frame_codec.frames_digest(table)} | changes
    return PayloadWriter(KEY, FRAGMENT, Codec.INT4, final=spool.path(1, KEY), kept=spool.kept, **declared)


@pytest.fixture
def spool(tmp_path) -> Spool:
    (tmp_path / "spool").mkdir()
    made = Spool(tmp_path / "spool", 1 << 30, 1 << 20)
    made.prepare(1, [0])
    return made


def test_frames_arrive_in_any_order_and_twice_and_are_read_by_index(spool):
    payloads = frames()
    growing = part_file(spool, payloads)
    for index in (1, 0, 1):
        growing.write([WireFrame(index, crc32c(payloads[index]), payloads[index])])
    assert growing.complete
    assert growing.finish(np.zeros(1), 1.0).path == spool.path(1, KEY)
    stored = spool.open(1, KEY, Codec.INT4, np.zeros(1), 1.0)
    assert [stored.payload(index) for index in range(2)] == payloads
    stored.close()


def test_a_corrupted_frame_can_be_sent_again(spool):
    payloads = frames()
    growing = part_file(spool, payloads)
    with pytest.raises(ChecksumError, match="send it again"):
        growing.write([WireFrame(0, crc32c(payloads[0]) ^ 1, payloads[0])])
    growing.write([WireFrame(0, crc32c(payloads[0]), payloads[0])])
    assert set(growing.received) == {0}


def test_more_or_other_bytes_than_declared_are_refused(spool):
    payloads = frames()
    growing = part_file(spool, payloads, size_bytes=len(payloads[0]))
    growing.write([WireFrame(0, crc32c(payloads[0]), payloads[0])])
    with pytest.raises(FrameError, match="more than"):
        growing.write([WireFrame(1, crc32c(payloads[1]), payloads[1])])
    other = part_file(spool, payloads, digest=bytes(32))
    for index, payload in enumerate(payloads):
        other.write([WireFrame(index, crc32c(payload), payload)])
    with pytest.raises(FrameError, match="differ from the size or digest in its header"):
        other.check()
    growing.discard()
    assert len(list(spool.directory.rglob("*.part"))) == 1  # a new upload of the same key has its own file
    other.discard()
    assert list(spool.directory.rglob("*.part")) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_to_an_acknowledged_payload_is_found_and_named(spool, damage):
    payloads = frames()
    growing = part_file(spool, payloads)
    for index, payload in enumerate(payloads):
        growing.write([WireFrame(index, crc32c(payload), payload)])
    path = growing.finish(np.zeros(1), 1.0).path
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        content[100] ^= 1
        path.write_bytes(content if damage == "flip" else content[:-5])
    with pytest.raises(SpoolError, match=KEY.learner):
        spool.open(1, KEY, Codec.INT4, np.zeros(1), 1.0).payload(0)


def test_space_is_reserved_before_bytes_arrive_and_released(spool):
    spool.limit_bytes = 100
    spool.reserve(80)
    with pytest.raises(SpoolFull, match="try again later"):
        spool.reserve(30)
    spool.release(80)
    spool.reserve(100)


def test_a_start_deletes_only_files_without_a_row(spool):
    known, unknown = spool.path(1, KEY), spool.path(1, ContributionKey("b", 1, 0, 1))
    for path in (known, unknown):
        path.write_bytes(b"x")
    assert spool.sweep({known}) == 1
    assert known.exists()
    assert not unknown.exists()


# ------------------------------------------------------------------------------------------------- ledger


def filled(path) -> sqlite3.Connection:
    db = database.open_ledger(path)
    run_ledger.put_learner(db, LearnerRow("a", "eu", 1, [77], {"x": 1}, ""))
    shard_ledger.add_contribution(db, 1, ROW)
    shard_ledger.add_merge(db, 1, MERGE, [FateRow(KEY, Fate.MERGED, 1, 1.0, 0)])
    return db


def test_rows_are_read_as_written(tmp_path):
    filled(tmp_path / "ledger").close()
    db = database.open_ledger(tmp_path / "ledger")
    ((row, fate),) = shard_ledger.contributions(db, 1)
    assert row == ROW
    assert fate == FateRow(KEY, Fate.MERGED, 1, 1.0, 0)
    assert lineage.merges(db, Line(), 0, after=0) == [(1, MERGE)]
    assert run_ledger.learners(db)[0].region == "eu"
    assert (lineage.last_merge(db, Line(), 0), lineage.last_merge(db, Line(), 1)) == ((1, 5.0), (0, None))
    assert list(shard_ledger.contributions(db, 2)) == []


def test_a_key_is_accepted_once_and_has_one_fate(tmp_path):
    db = filled(tmp_path / "ledger")
    with pytest.raises(sqlite3.IntegrityError):
        shard_ledger.add_contribution(db, 1, ROW)
    with pytest.raises(AssertionError, match="was not pending"):
        shard_ledger.put_fates(db, 1, [FateRow(KEY, Fate.REFUSED)])


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ("UPDATE contributions SET tokens=7", lambda db: list(shard_ledger.contributions(db, 1))),
        ("UPDATE merges SET theta=7", lambda db: lineage.merges(db, Line(), 0, 0)),
        ("UPDATE learners SET account='{}'", run_ledger.learners),
        ("UPDATE merges SET version=5", lambda db: lineage.merges(db, Line(), 0, 0)),
    ],
)
def test_a_damaged_row_is_found(tmp_path, change, read):
    db = filled(tmp_path / "ledger")
    db.execute(change)
    with pytest.raises(LedgerError, match="restore a backup"):
        read(db)


def test_the_error_for_a_damaged_row_contains_no_secret(tmp_path):
    db = filled(tmp_path / "ledger")
    run_ledger.put_meta(db, "session_key", "5ec4e7")
    for table, read in (("meta", run_ledger.get_meta), ("learners", run_ledger.learners)):
        db.execute(f"UPDATE {table} SET checksum=checksum+1")  # noqa: S608 - constants
        with pytest.raises(LedgerError, match=f"a row of the ledger table {table} does not match") as error:
            read(db)
        assert not {"5ec4e7", "77"} & set(re.findall("[0-9a-f]+", str(error.value)))


def test_a_missing_merge_is_named(tmp_path):
    db = filled(tmp_path / "ledger")
    shard_ledger.add_merge(db, 1, MergeRow(0, 3, *list(_fields(MERGE))[2:]), [])
    db.execute("DELETE FROM merges WHERE version=1")
    with pytest.raises(LedgerError, match="lacks version 1 of fragment 0"):
        lineage.merges(db, Line(), 0, after=0)


def _fields(row):
    return (getattr(row, name) for name in row.__slots__)


@pytest.mark.parametrize("content", [b"garbage" * 1000, None])
def test_a_file_that_is_no_ledger_or_has_another_version_is_named(tmp_path, content):
    path = tmp_path / "ledger"
    if content is None:
        filled(path).execute("PRAGMA user_version=99")
    else:
        path.write_bytes(content)
    with pytest.raises(LedgerError, match="backup" if content else "schema 99"):
        database.open_ledger(path)


def test_a_commit_is_on_disk_when_it_returns_and_many_share_one(tmp_path):
    async def run() -> int:
        writer = LedgerWriter(database.open_ledger(tmp_path / "ledger"), print, SYSTEM)
        writer.start()
        await asyncio.gather(*(writer.commit(lambda db, n=n: run_ledger.put_meta(db, f"k{n}", n)) for n in range(50)))
        with sqlite3.connect(tmp_path / "ledger") as other:
            found = len(run_ledger.get_meta(other))
        await writer.stop()
        return found

    assert asyncio.run(run()) == 50


# ------------------------------------------------------------------------------------------------- snapshots


def snapshot(tmp_path):
    state = merge.start(np.arange(FRAGMENT.length, dtype=np.float32))
    state.version = 4
    writer = SnapshotWriter(snapshot_path(tmp_path, 1), LAYOUT.fragments)
    writer.begin()
    writer.add(0, state)
    writer.finish()
    return state, SnapshotRow(1, 1, writer.versions, writer.checksums, {}, 0.0, writer.size_bytes)


def test_a_snapshot_restores_the_state_bit_by_bit(tmp_path):
    state, row = snapshot(tmp_path)
    (again,) = load_snapshot(snapshot_path(tmp_path, 1), LAYOUT.fragments, row).values()
    assert again.version == 4
    assert again.checksums() == state.checksums()
    assert snapshot_path(tmp_path, 1).stat().st_size == row.size_bytes


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_snapshot_is_not_trusted(tmp_path, damage):
    _, row = snapshot(tmp_path)
    path = snapshot_path(tmp_path, 1)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[:-100])
    with pytest.raises(SnapshotError):
        load_snapshot(path, LAYOUT.fragments, row)
