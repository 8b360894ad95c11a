"""The history file, an SQLite database that keeps the histories and events of a dashboard for its next process."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
from atoll_wire.errors import UserError

from atoll_dashboard.feed.history import History
from atoll_dashboard.feed.run_rates import POINTS, Kept
from atoll_dashboard.models.api_models import Event

log = structlog.get_logger()

APPLICATION, VERSION = 0x41746F6C, 1  # SQLite's application_id and user_version
MAX_LEARNERS = 1000  # the file omits the histories of learners if the run has more of them
DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
TABLES = """
CREATE TABLE state (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE points (history TEXT, at REAL, shown TEXT NOT NULL, PRIMARY KEY (history, at));
CREATE TABLE events (number INTEGER PRIMARY KEY, event TEXT NOT NULL);
"""


class HistoryFileError(UserError):
    """The history file cannot be used. The message is one line with the fix."""


class _DamagedError(Exception):
    """The file is damaged, or another version of Atoll wrote it."""


class HistoryFile:
    """The file at a path. Its size is bounded, as are the histories and events. A damaged file is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._times: dict[str, set[float]] = {}  # by history: the times of points in the file
        self._number = 0  # the newest event in the file
        self._problem = ""

    def open(self) -> Kept | None:
        """Returns the file's contents, or None for a new file. Raises HistoryFileError."""
        try:
            return self._load()
        except _DamagedError as error:
            self._replace(error)
        except sqlite3.Error as error:
            if _code(error) not in DAMAGED:
                raise self._unusable(error) from error
            self._replace(error)
        return None

    def save(self, kept: Kept) -> None:
        """Makes the file's contents equal to `kept` by writing only the differences. Logs one warning if this fails."""
        with self._lock:
            try:
                self._write(kept)
                self._problem = ""
            except sqlite3.Error as error:
                self._failed(error)

    def _failed(self, error: sqlite3.Error) -> None:
        try:
            if _code(error) in DAMAGED:
                return self._replace(error)
            raise self._unusable(error)
        except HistoryFileError as failed:
            if str(failed) != self._problem:
                self._problem = str(failed)
                log.warning("the history is not saved", problem=self._problem)

    def close(self) -> None:
        """Closes the file, so that another process may open it."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _connect(self) -> sqlite3.Connection:
        self._db = sqlite3.connect(self._path, timeout=2.0, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        return self._db

    @contextlib.contextmanager
    def _transaction(self, db: sqlite3.Connection) -> Iterator[None]:
        db.execute("BEGIN EXCLUSIVE")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def _load(self) -> Kept | None:
        db = self._connect()
        with self._transaction(db):  # also fails if the file is read-only, or in use
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if not tables:
                self._create(db)
                return None
            if _pragma(db, "application_id") != APPLICATION:
                raise HistoryFileError(f"--history {self._path} belongs to another program: give another path")
            if _pragma(db, "user_version") != VERSION:
                raise _DamagedError("another version of Atoll wrote it")
            if (found := _pragma(db, "quick_check")) != "ok":
                raise _DamagedError(str(found).splitlines()[0])
            try:
                return self._read(db)
            except (KeyError, TypeError, ValueError) as error:
                raise _DamagedError(f"its contents are invalid: {error!r:.80}") from error

    def _create(self, db: sqlite3.Connection) -> None:
        for statement in TABLES.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {VERSION}")
        self._times, self._number = {name: set() for name in POINTS}, 0

    def _read(self, db: sqlite3.Connection) -> Kept | None:
        self._times, self._number = {name: set() for name in POINTS}, 0
        state = {name: json.loads(value) for name, value in db.execute("SELECT name, value FROM state")}
        if not state:
            return None
        run, generation, at = state["poll"]
        histories = {}
        for name, most in POINTS.items():
            rows = db.execute("SELECT at, shown FROM points WHERE history = ? ORDER BY at", (name,))
            points = [(float(each), json.loads(shown)) for each, shown in rows]
            gaps = [(float(start), float(end)) for start, end in state[f"{name} gaps"]]
            histories[name] = History[str].restored(most, points, gaps, float(at))
            self._times[name] = {each for each, _ in points}
        events = [Event.model_validate_json(each) for (each,) in db.execute("SELECT event FROM events ORDER BY number")]
        self._number = events[-1].number if events else 0
        log, number = state["position"]
        return Kept((str(run), int(generation), float(at)), histories, events, (int(log), int(number)))

    def _write(self, kept: Kept) -> None:
        if self._db is None:
            return
        state: dict[str, Any] = {"poll": kept.poll, "position": kept.position}
        times = {}
        with self._transaction(self._db):
            for name, history in kept.histories.items():
                state[f"{name} gaps"] = history.gaps
                times[name] = self._write_points(self._db, name, history)
            events = [(each.number, each.model_dump_json()) for each in kept.events if each.number > self._number]
            self._db.executemany("INSERT INTO events VALUES (?, ?)", events)
            if kept.events:
                self._db.execute("DELETE FROM events WHERE number < ?", (kept.events[0].number,))
            rows = [(name, json.dumps(value)) for name, value in state.items()]
            self._db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", rows)
        self._times = times
        self._number = kept.events[-1].number if kept.events else self._number

    def _write_points(self, db: sqlite3.Connection, name: str, history: History[str]) -> set[float]:
        """Writes the new points and deletes those that the history dropped. Returns the times of the file's points."""
        old = self._times[name]
        fits = len(history.names()) <= 2 * MAX_LEARNERS  # two columns per learner: loss and tokens
        times = set(history.at) if fits else set[float]()
        db.executemany("DELETE FROM points WHERE history = ? AND at = ?", [(name, at) for at in old - times])
        new = ((name, at, json.dumps(values)) for at, values in history.points(without=old) if fits)
        db.executemany("INSERT INTO points VALUES (?, ?, ?)", new)
        return times

    def _replace(self, error: Exception) -> None:
        """Moves a damaged file aside and creates a new one. Raises HistoryFileError if this fails."""
        aside = self._path.with_name(f"{self._path.name}.damaged")
        log.warning("the history file cannot be read: a new one replaces it", moved_to=str(aside), problem=str(error))
        if self._db is not None:
            self._db.close()
            self._db = None
        try:
            self._path.replace(aside)
            self._path.with_name(f"{self._path.name}-journal").unlink(missing_ok=True)
            with self._transaction(db := self._connect()):
                self._create(db)
        except (OSError, sqlite3.Error) as failed:
            raise self._unusable(failed) from failed

    def _unusable(self, error: Exception) -> HistoryFileError:
        fix = "give a path in a writable directory that no other dashboard uses"
        return HistoryFileError(f"--history {self._path} cannot be used ({error}): {fix}")


def _pragma(db: sqlite3.Connection, name: str) -> Any:  # noqa: ANN401 - a number or a text
    return db.execute(f"PRAGMA {name}").fetchone()[0]


def _code(error: sqlite3.Error) -> int:
    """Returns SQLite's primary result code."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
