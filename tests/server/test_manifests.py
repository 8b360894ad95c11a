"""The checkpoints that a run with several shards keeps, and the snapshots that a shard keeps."""

from __future__ import annotations

import json

from atoll_server.ledger.database import open_ledger
from atoll_server.ledger.manifests import (
    KEPT,
    MANIFESTS,
    RESTORED,
    KeptSnapshots,
    Manifest,
    RestoredManifest,
    dropped,
    kept_of,
    manifests_of,
    put_kept,
    put_manifests,
    put_restored,
    restored_of,
)
from atoll_server.ledger.run_ledger import get_meta


def manifest(number: int, generation: int = 1) -> Manifest:
    return Manifest(number, generation, 0, {0: number, 1: number + 5}, {0: 3, 1: 4}, 1.5, 100)


def test_the_newest_checkpoints_stay_and_after_a_restore_all_stay_until_there_are_two_new_ones():
    old = [manifest(number) for number in (1, 2, 3)]
    assert dropped(old, 1, keep=3) == []
    assert dropped(old, 1, keep=2) == old[:1]
    assert dropped(old, 2, keep=2) == []
    assert dropped([*old, manifest(4, 2)], 2, keep=2) == []
    assert dropped([*old, manifest(4, 2), manifest(5, 2)], 2, keep=2) == old


def test_a_snapshot_that_the_registrar_does_not_know_yet_stays_kept():
    kept = KeptSnapshots().plus(4)
    assert kept.told(frozenset(), 3).snapshots == {4}, "the registrar may still write its manifest"
    assert kept.told(frozenset({4}), 4).snapshots == {4}
    assert kept.told(frozenset({2}), 4).snapshots == {2}, "no manifest names the other snapshot any longer"


def test_kept_checkpoints_survive_the_ledger(tmp_path):
    db = open_ledger(tmp_path / "ledger.sqlite")
    kept, restored = KeptSnapshots(frozenset({1, 3}), 3), RestoredManifest(2, 1, {0: 1, 1: 6})
    assert (manifests_of({}), kept_of({}), restored_of({"generation": 1})) == ([], KeptSnapshots(), None)
    put_manifests(db, [manifest(1), manifest(2)])
    put_kept(db, kept)
    put_restored(db, restored)
    meta = get_meta(db)
    assert set(meta) == {MANIFESTS, KEPT, RESTORED}
    assert manifests_of(meta) == [manifest(1), manifest(2)]
    assert kept_of(meta) == kept
    assert restored_of(meta | {"generation": 2}) == restored
    assert restored_of(meta | {"generation": 3}) is None, "a later generation has another beginning"
    assert json.dumps(meta)
    db.close()
