"""The history file: it returns what was saved, stays small, and is replaced if it is damaged."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from atoll_dashboard.feed.history import History
from atoll_dashboard.feed.history_file import MAX_LEARNERS, HistoryFile, HistoryFileError
from atoll_dashboard.feed.run_rates import LEARNERS, LOSS, POINTS, RUN, Kept, column
from atoll_dashboard.models.api_models import Event
from structlog.testing import capture_logs


def kept(
    run: str, times: range, *, learners: int = 2, start: tuple[int, int] = (1, 1), gap_at: float | None = None
) -> Kept:
    """Returns histories with a point at each time, and one event per time. start: numbers of events, and their limit"""
    histories = {name: History[str](most) for name, most in POINTS.items()}
    for at in times:
        histories[RUN].add(float(at), {"loss": at / 7, "goodput": 1.0}, gap=at == gap_at)
        histories[LEARNERS].add(float(at), {column(LOSS, f"l{n}"): float(n) for n in range(learners)})
    events = [Event(number=at, at=float(at), kind="core", learner="", text=f"event {at}") for at in range(*start)]
    return Kept((run, 1, float(times[-1])), histories, events, (7, len(times)))


def same(one: Kept | None, other: Kept) -> bool:
    assert one is not None
    for name in POINTS:
        assert list(one.histories[name].points()) == list(other.histories[name].points())
        assert one.histories[name].gaps == other.histories[name].gaps
    return (one.poll, list(one.events), one.position) == (other.poll, list(other.events), other.position)


def saved(path: Path, *states: Kept) -> HistoryFile:
    file = HistoryFile(path)
    file.open()
    for state in states:
        file.save(state)
    return file


def test_a_new_process_gets_what_was_saved(tmp_path):
    path, state = tmp_path / "history", kept("r", range(100), start=(1, 9), gap_at=50)
    assert state.histories[RUN].gaps == [(49.0, 50.0)]
    file = HistoryFile(path)
    assert file.open() is None
    file.save(state)
    file.close()
    with closing(HistoryFile(path)) as again:
        loaded = again.open()
        assert same(loaded, state)
        loaded.histories[RUN].add(200.0, {"loss": 1.0}, gap=True)
        assert loaded.histories[RUN].gaps[-1] == (99.0, 200.0), "the time without a dashboard must be a gap"


def test_the_file_follows_thinned_histories_old_events_and_another_run(tmp_path):
    path = tmp_path / "history"
    states = [kept("r", range(last), start=(1, last // 9)) for last in range(100, 3000, 100)]
    states.append(kept("r", range(5000), start=(400, 600)))
    with closing(saved(path, *states)) as file:
        file.save(states[-1])
    with closing(HistoryFile(path)) as again:
        assert same(again.open(), states[-1])
        again.save(kept("another", range(9), start=(600, 602)))
    with closing(HistoryFile(path)) as again:
        assert same(again.open(), kept("another", range(9), start=(600, 602)))
    assert path.stat().st_size < 500_000
    assert [each.name for each in tmp_path.iterdir()] == ["history"]


def test_histories_of_very_many_learners_are_left_out(tmp_path):
    path = tmp_path / "history"
    with closing(saved(path, kept("r", range(5)), kept("r", range(9), learners=2 * MAX_LEARNERS + 1))):
        pass
    with closing(HistoryFile(path)) as again:
        loaded = again.open()
        assert len(loaded.histories[RUN].at) == 9
        assert len(loaded.histories[LEARNERS].at) == 0


def test_the_resolution_survives_a_restart(tmp_path):
    path = tmp_path / "history"
    saved(path, state := kept("r", range(0, 100_000, 10))).close()
    with closing(HistoryFile(path)) as again:
        history = again.open().histories[RUN]
        before = len(history.at)
        for second in range(100_000, 100_100):
            history.add(float(second), {})
        assert len(history.at) <= before + 1, "new points must not push out old ones"
        assert same(saved(tmp_path / "other", state).close() or HistoryFile(tmp_path / "other").open(), state)


@pytest.mark.parametrize("damage", ["text", "cut", "overwritten", "version", "row"])
def test_a_damaged_file_is_reported_in_one_line_and_replaced(tmp_path, damage):
    path = tmp_path / "history"
    saved(path, kept("r", range(900))).close()
    whole = path.read_bytes()
    if damage == "text":
        path.write_text("not a database, but notes that someone wants to keep")
    elif damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "overwritten":
        path.write_bytes(whole[:8192] + bytes(len(whole) - 8192))
    else:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE points SET shown = '{' WHERE at = 0" if damage == "row" else "PRAGMA user_version = 99")
    before = path.read_bytes()
    with capture_logs() as logs, closing(HistoryFile(path)) as file:
        assert file.open() is None
        file.save(kept("r", range(5)))
    assert [each["log_level"] for each in logs] == ["warning"]
    assert all("\n" not in str(value) for value in logs[0].values())
    assert (tmp_path / "history.damaged").read_bytes() == before
    with closing(HistoryFile(path)) as again:
        assert same(again.open(), kept("r", range(5)))


def test_an_error_during_the_run_is_one_warning(tmp_path):
    path = tmp_path / "history"
    with closing(saved(path, kept("r", range(5)))) as file:
        file._db.execute("DROP TABLE points")
        with capture_logs() as logs:
            file.save(kept("r", range(9)))
            file.save(kept("r", range(9)))
        assert [each["event"] for each in logs] == ["the history is not saved"], "one problem is one line"


def test_a_file_that_cannot_be_used_is_refused_with_the_fix(tmp_path):
    with closing(sqlite3.connect(tmp_path / "theirs")) as db, db:
        db.execute("CREATE TABLE ledger (a)")
    before = (tmp_path / "theirs").read_bytes()
    with pytest.raises(HistoryFileError, match="theirs belongs to another program: give another path"):
        HistoryFile(tmp_path / "theirs").open()
    assert (tmp_path / "theirs").read_bytes() == before
    for path in (tmp_path, tmp_path / "absent/history"):
        with pytest.raises(HistoryFileError, match=r"cannot be used .*: give a path in a writable directory"):
            HistoryFile(path).open()
    with (
        closing(saved(tmp_path / "history", kept("r", range(3)))),
        pytest.raises(HistoryFileError, match=r"locked.*that no other dashboard uses"),
    ):
        HistoryFile(tmp_path / "history").open()
