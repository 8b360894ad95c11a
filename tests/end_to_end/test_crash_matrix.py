"""A real core is killed at each crash point and restarted, while real learners train."""

from __future__ import annotations

import random
import re
import shutil
import threading
from pathlib import Path

import atoll_server
import grpc
import pytest
from atoll_server.cli.run_directory import read_run
from atoll_server.storage import crash_points
from atoll_wire import outer_pb2 as pb

from tests.end_to_end.test_kill import each_merged_once
from tests.end_to_end.test_refusals import Hand, _rescale
from tests.end_to_end.world import Core, Trainee, core, eventually, train

OPTIONS = ("--record", "--snapshot-every-s", "0.3", "--keep-snapshots", "2", "--max-staleness", "1")
RARE = ("eviction.committed", "pause.committed")
EVERY_DAY = {"contribution.committed", "merge.committed"}  # `make test` runs these
IN_CI = {"initial.renamed", "ledger.rows written", "snapshot.committed", "spool.renamed", "start.epoch raised"}
ELSEWHERE = {"refusal.committed", "spool.removed", "contribution.refused", "eviction.committed", "pause.committed"}
OF_OTHERS = (
    "rollback.",
    "manifest.",
    "kept.",
    "stage.",
    "begun.",
    "reshard.",
    "backup.",
    "restoring.",
    "units.",
)  # tested in test_restore, test_sharded*, test_reshard, test_backup and test_data_units
AT_START = [point for point in crash_points.POINTS if point.startswith("start.")]
AT_FIRST = [point for point in crash_points.POINTS if point.startswith("initial.")]


def crashes(running: Core, point: str, nth: int, monkeypatch) -> None:
    """Makes the next core die when it reaches a crash point for the nth time."""
    running.kill()
    monkeypatch.setenv("ATOLL_CRASH_AT", f"{point}:{nth}")


def came_back_as_it_was(running: Core, directory) -> None:
    """Checks that replays from the newest snapshot and from the beginning give the core's state."""
    shutil.copytree(running.directory, directory)
    came_back, replayed = read_run(directory), read_run(directory, from_start=True)
    for mine, other in zip(came_back.states.values(), replayed.states.values(), strict=True):
        assert mine.version == other.version
        assert mine.checksums() == other.checksums()


def test_the_crash_points_in_the_code_are_the_listed_ones():
    sources = Path(atoll_server.__file__).parent.rglob("*.py")
    found = [name for path in sources for name in re.findall(r'crash_points\.point\("(.*?)"\)', path.read_text())]
    assert sorted(set(found)) == sorted(crash_points.POINTS)


def test_other_tests_have_the_points_that_this_file_leaves_out():
    here = Path(__file__)
    others = "".join(path.read_text() for path in here.parent.glob("test_*.py") if path != here)
    for point in crash_points.POINTS:
        if point.startswith(OF_OTHERS):
            group = re.escape(point.partition(".")[0])
            assert f'"{point}"' in others or re.search(rf'startswith\([^)]*"{group}\."', others), point


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(p, marks=() if p in EVERY_DAY else pytest.mark.ci if p in IN_CI else pytest.mark.slow)
        for p in crash_points.POINTS
        if p not in ELSEWHERE and not p.startswith(OF_OTHERS)
    ],
)
def test_a_core_killed_at_a_crash_point_loses_and_repeats_no_work_and_returns_bit_by_bit(tmp_path, monkeypatch, point):
    stop, rng = threading.Event(), random.Random(point)
    nth = 1 if point in AT_START + AT_FIRST else rng.randrange(1, 4)
    print("point", point, nth)
    with core(tmp_path, *OPTIONS) as running:
        trainees = [Trainee(running.address, name, lambda _: stop.is_set(), pace_s=0.004) for name in ("a", "b")]
        if point not in AT_FIRST:
            for trainee in trainees:
                trainee.start()
            eventually(lambda: all(len(t.losses) > 20 for t in trainees))
        crashes(running, point, nth, monkeypatch)
        if point in AT_START:
            with pytest.raises(Exception, match="core exited with status -9"):
                running.start()
        else:
            running.start()
            for trainee in trainees:
                if not trainee.is_alive():
                    trainee.start()
            assert running.child.process.wait(30) == -9
        monkeypatch.delenv("ATOLL_CRASH_AT")
        if point not in AT_FIRST:
            came_back_as_it_was(running, tmp_path / "dead")
        running.start()
        before = [len(t.losses) for t in trainees]
        eventually(lambda: all(len(t.losses) > b + 10 for t, b in zip(trainees, before, strict=True)))
        eventually(lambda: all(t.learner.stats().connected for t in trainees))
        stop.set()
        for trainee in trainees:
            trainee.done()
        eventually(lambda: running.status().contributions.pending == 0)
        counts = running.status().contributions
        versions = [f.version for f in running.status().fragments]
    assert counts.accepted == counts.merged + counts.refused
    each_merged_once(running.directory / "ledger.sqlite")
    final = read_run(running.directory, from_start=True)
    assert [state.version for state in final.states.values()] == versions
    told = sum(t.learner.stats().merged for t in trainees)
    assert counts.merged - 2 * len(trainees) <= told <= counts.merged  # others are merged after Leave


@pytest.mark.parametrize(
    "point",
    [
        "contribution.refused",
        *(pytest.param(p, marks=pytest.mark.ci) for p in ("eviction.committed", "pause.committed")),
    ],
)
def test_durable_refusals_evictions_and_pauses_survive_a_killed_core(tmp_path, monkeypatch, point):
    with core(tmp_path, *OPTIONS) as running:
        train(running.address, "a", steps=60)
        eventually(lambda: running.status().contributions.pending == 0)
        crashes(running, point, 1, monkeypatch)
        running.start()
        with running.outer() as stub, running.operator() as operator:
            hand = Hand(stub)
            if point == "contribution.refused":
                with pytest.raises(grpc.RpcError):
                    hand.push(lambda header, frames: _rescale(header, frames, 0x7FC0))
            elif point == "pause.committed":
                with pytest.raises(grpc.RpcError):
                    operator.Pause(pb.PauseRequest(reason="test"))
            else:
                assert hand.push(lambda header, _: header.ClearField("cycle")).fate == pb.FATE_PENDING
                with pytest.raises(grpc.RpcError):
                    operator.Evict(pb.EvictRequest(learner="hand", reason="test"))
        assert running.child.process.wait(30) == -9
        monkeypatch.delenv("ATOLL_CRASH_AT")
        came_back_as_it_was(running, tmp_path / "dead")
        running.start()
        eventually(lambda: running.status().contributions.pending == 0)
        status = running.status()
        assert status.contributions.accepted == status.contributions.merged + status.contributions.refused
        if point == "contribution.refused":
            assert status.contributions.refused == 1
        assert status.paused == ("by an operator: test" if point == "pause.committed" else "")
        if point == "eviction.committed":
            assert {each.learner: each.state for each in status.learners}["hand"] == "evicted"


@pytest.mark.slow
@pytest.mark.parametrize("point", ["refusal.committed", "spool.removed"])
def test_a_durable_refusal_survives_a_killed_core(tmp_path, monkeypatch, point):
    """Rounds with only refusals are rare, so this test lowers the limit after a stale contribution is acknowledged.

    With `--record`, the core deletes only payloads of refused contributions.
    """
    with core(tmp_path, *OPTIONS) as running:
        train(running.address, "a", steps=60)
        eventually(lambda: running.status().contributions.pending == 0)

        def stale(header, _frames) -> None:
            header.base_version -= 1

        with running.outer() as stub:
            assert Hand(stub).push(stale).fate == pb.FATE_PENDING
        crashes(running, point, 1, monkeypatch)
        running._options = [*running._options, "--max-staleness", "0"]
        running.start()
        assert running.child.process.wait(30) == -9
        monkeypatch.delenv("ATOLL_CRASH_AT")
        came_back_as_it_was(running, tmp_path / "dead")
        running.start()
        counts = running.status().contributions
    assert (counts.refused, counts.pending, counts.accepted) == (1, 0, counts.merged + 1)
