"""`atoll reshard`: a killed run is divided among other shards, and running learners continue."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from atoll.demo.processes import Children, DemoError, children
from atoll_server.checkpoints.restore import LEDGER
from atoll_server.cli.replay import replay
from atoll_server.cli.run_directory import read_run
from atoll_server.ledger import shard_ledger
from atoll_server.ledger.database import read_ledger
from atoll_server.storage import crash_points
from atoll_wire import outer_pb2 as pb

from tests.end_to_end.test_kill import each_merged_once
from tests.end_to_end.test_restore import take
from tests.end_to_end.test_sharded_operators import meta
from tests.end_to_end.world import Core, Trainee, eventually, front, train

pytestmark = pytest.mark.ci  # each test starts several processes

OPTIONS = ["--fragments", "4", "--inner-steps", "4", "--record", "--snapshot-every-s", "3600"]


def reshard(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as an operator would."""
    command = [sys.executable, "-m", "atoll_server", "reshard", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


class Division:
    """A run's processes, with their directories in one folder. address: where the registrar listens."""

    def __init__(
        self,
        group: Children,
        folder: Path,
        count: int,
        address: str,
        *,
        alone: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        first = ["--registrar-only"] if alone else ["--shard", f"0/{count}"] if count > 1 else []
        directory = folder / ("registrar" if alone else "shard-0")
        self.registrar = Core(group, directory, [*first, *options], "registrar", address)
        address = self.registrar.address
        self.cores = [self.registrar]
        for number in range(0 if alone else 1, count):
            options = ["--shard", f"{number}/{count}", "--registrar", address]
            self.cores.append(Core(group, folder / f"shard-{number}", options, f"shard{number}"))

    def kill(self) -> None:
        for each in self.cores:
            each.kill()

    def stop(self) -> None:
        for each in reversed(self.cores):
            each.stop()


def states(*directories: Path) -> dict[int, tuple[int, ...]]:
    """Returns each fragment's version and checksums."""
    found = {}
    for directory in directories:
        for index, state in read_run(directory).states.items():
            found[index] = (state.version, *state.checksums())
    return found


def rows(*directories: Path) -> dict[tuple[object, ...], str]:
    """Returns the fate of each contribution."""
    found = {}
    for directory in directories:
        with read_ledger(directory / LEDGER) as db:
            found |= {tuple(row.key): fate.fate.value for row, fate in shard_ledger.contributions(db, 1)}
    return found


def moved(group: Children, division: Division, new: Path, count: int, *, alone: bool = False) -> Division:
    """Kills a run, moves it to another number of shards, compares the directories, and starts it again."""
    division.kill()
    old = [each.directory for each in division.cores]
    before, fates = states(*old), rows(*old)
    done = reshard(*old, "--shards", str(count), "--out", new, *(["--registrar-only"] if alone else []))
    assert done.returncode == 0, done.stderr
    assert "4 fragments with" in done.stdout
    directories = sorted(path for path in new.iterdir() if path.is_dir())
    assert states(*directories) == before
    assert rows(*directories) == fates
    again = Division(group, new, count, division.registrar.address, alone=alone)
    eventually(lambda: len(again.registrar.status().fragments) == 4)
    eventually(lambda: all(f.version > before[f.fragment][0] + 2 for f in again.registrar.status().fragments), 60)
    assert take(again.registrar).id > 0
    return again


@pytest.mark.timeout(300)  # 52 s on a quiet machine
def test_learners_continue_over_every_number_of_shards_and_nothing_acknowledged_is_lost(tmp_path):
    stop = threading.Event()
    with children(tmp_path) as group:
        run = Division(group, tmp_path / "old", 1, "127.0.0.1:0", options=OPTIONS)
        address = run.registrar.address
        with front(tmp_path / "front", address) as gateway:
            trainees = [
                Trainee(where, name, lambda _: stop.is_set(), pace_s=0.01)
                for name, where in (("a", address), ("b", gateway.address), ("c", gateway.address))
            ]
            for trainee in trainees:
                trainee.start()
            eventually(lambda: run.registrar.status().merges >= 24, 60)
            three = moved(group, run, tmp_path / "three", 3)
            two = moved(group, three, tmp_path / "two", 2, alone=True)
            four = moved(group, two, tmp_path / "four", 4)
            one = moved(group, four, tmp_path / "one", 1).registrar
            stop.set()
            for trainee in trainees:
                trainee.done()
            assert {each.incarnation for each in one.status().learners} == {1}, "no learner may restart"
            eventually(lambda: one.status().contributions.pending == 0)
            counts = one.status().contributions
            assert counts.accepted == counts.merged + counts.refused
            one.stop()
    each_merged_once(one.directory / LEDGER)
    assert replay(one.directory, (), lambda *_: None).identical, "a replay must repeat the merges of all five divisions"


def test_status_counts_the_same_work_and_traffic_after_resharding(tmp_path):
    with children(tmp_path) as group:
        run = Core(group, tmp_path / "run", OPTIONS)
        address = run.address
        train(address, "a", "b", steps=80)
        eventually(lambda: run.status().contributions.pending == 0)
        before = run.status()
        run.stop()
        assert reshard(tmp_path / "run", "--shards", "2").returncode == 0
        run = Division(group, tmp_path / "run-2-shards", 2, address).registrar
        eventually(lambda: len(run.status().fragments) == 4)
        eventually(lambda: run.status().contributions == before.contributions)
        after = run.status()
        assert (after.tokens_trained, after.tokens_merged) == (before.tokens_trained, before.tokens_merged)
        assert after.wire == before.wire
        assert after.merges == before.merges
        with run.operator() as stub:
            receipts = stub.ListReceipts(pb.ListReceiptsRequest(limit=1000), timeout=20).receipts
            assert len(receipts) == before.contributions.accepted
        assert (tmp_path / "run-2-shards" / "shard-0" / "audit.jsonl").is_file()


@pytest.mark.parametrize("point", [each for each in crash_points.POINTS if each.startswith("reshard.")])
def test_a_killed_reshard_leaves_one_run_that_can_start(tmp_path, point):
    old, new = tmp_path / "run", tmp_path / "new"
    with children(tmp_path) as group:
        run = Core(group, old, OPTIONS)
        address = run.address
        train(address, "a", steps=60)
        run.stop()
        before = states(old)
        killed = reshard(old, "--shards", "2", "--out", new, ATOLL_CRASH_AT=point)
        assert killed.returncode == -9
        assert new.exists() == (point == "reshard.renamed")
        if point != "reshard.written":
            with pytest.raises(DemoError, match=f"the run was moved to {new} by atoll reshard"):
                run.start()
        if point == "reshard.renamed":
            again = reshard(old, "--shards", "2", "--out", new)
            assert again.returncode == 1
            assert "exists: remove it, or give another --out" in again.stderr
        else:
            assert reshard(old, "--shards", "2", "--out", new).returncode == 0
        assert states(new / "shard-0", new / "shard-1") == before
        division = Division(group, new, 2, address)
        [trainee] = train(address, "a", steps=60)
        assert trainee.learner.stats().merged > 0
        division.stop()


@pytest.mark.parametrize("point", ["reshard.marked:1", "reshard.marked:2"])
def test_a_reshard_killed_after_some_of_the_old_directories_are_marked_is_repeated(tmp_path, point):
    """A partly marked run must not train. The registrar is therefore marked first, wherever the command names it."""
    new = tmp_path / "new"
    with children(tmp_path) as group:
        run = Division(group, tmp_path, 2, "127.0.0.1:0", options=OPTIONS)
        address, old = run.registrar.address, [each.directory for each in reversed(run.cores)]
        train(address, "a", "b", steps=60)
        run.stop()
        before, fates = states(*old), rows(*old)
        assert reshard(*old, "--shards", "3", "--out", new, ATOLL_CRASH_AT=point).returncode == -9
        assert not new.exists()
        assert (states(*old), rows(*old)) == (before, fates)
        assert [meta(each).get("moved") for each in run.cores] == [str(new), None if point[-1] == "1" else str(new)]
        with pytest.raises(DemoError, match=f"the run was moved to {new} by atoll reshard"):
            run.registrar.start()
        assert reshard(*old, "--shards", "3", "--out", new).returncode == 0
        moved_to = [new / f"shard-{number}" for number in range(3)]
        assert (states(*moved_to), rows(*moved_to)) == (before, fates)
        division = Division(group, new, 3, address)
        [trainee] = train(address, "a", steps=60)
        assert trainee.learner.stats().merged > 0
        division.stop()


def test_wrong_directories_are_refused_and_nothing_changes(tmp_path):
    with children(tmp_path) as group:
        run = Core(group, tmp_path / "run", OPTIONS)
        address = run.address
        used = reshard(tmp_path / "run", "--shards", "2")
        assert "a core uses" in used.stderr
        run.stop()
        assert "has no parameters yet" in reshard(tmp_path / "run", "--shards", "2").stderr
        run.start()
        train(address, "a", steps=40)
        run.stop()
        other = Core(group, tmp_path / "other", OPTIONS)
        train(other.address, "a", steps=20)
        other.stop()
        assert "holds no run" in reshard(tmp_path / "nothing", "--shards", "2").stderr
        assert "--shards 9: 9 shards are too many for 4 fragments" in reshard(tmp_path / "run", "--shards", "9").stderr
        both = reshard(tmp_path / "run", tmp_path / "other", "--shards", "2")
        assert "2 of the directories belong to a registrar" in both.stderr
        assert reshard(tmp_path / "run", "--shards", "3", "--out", tmp_path / "three").returncode == 0
        three = tmp_path / "three"
        missing = reshard(three / "shard-0", three / "shard-2", "--shards", "2")
        assert "the directory of shard 1 is missing" in missing.stderr
        without = reshard(three / "shard-1", three / "shard-2", "--shards", "2")
        assert "0 of the directories belong to a registrar" in without.stderr
        foreign = reshard(tmp_path / "other", three / "shard-1", "--shards", "2")
        assert "give the directories of one run" in foreign.stderr
        twice = reshard(three / "shard-0", three / "shard-1", three / "shard-1", "--shards", "2")
        assert "a core uses" in twice.stderr or "two directories" in twice.stderr
        moved = reshard(tmp_path / "run", "--shards", "2")
        assert f"was moved to {three}: give the directories there" in moved.stderr
        assert meta(other).get("moved") is None
        for folder in tmp_path.iterdir():
            assert not folder.name.endswith(".part")


def test_a_damaged_directory_is_not_moved(tmp_path):
    with children(tmp_path) as group:
        run = Core(group, tmp_path / "run", OPTIONS)
        train(run.address, "a", steps=60)
        run.stop()
        state = read_run(tmp_path / "run").states[1]
        assert np.isfinite(state.theta).all()
        for payload in (tmp_path / "run" / "spool").rglob("*.frames"):
            payload.write_bytes(b"\0" * payload.stat().st_size)
        for snapshot in (tmp_path / "run" / "snapshots").iterdir():
            snapshot.unlink()
        done = reshard(tmp_path / "run", "--shards", "2", "--out", tmp_path / "new")
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "new").exists()
        assert meta(run).get("moved") is None
