"""The real SQLite on a simulated file system, which loses unsynced data at a crash."""

from __future__ import annotations

import itertools
import random
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import apsw

from tests.simulation.disk import Content, SimulatedDisk, parent
from tests.simulation.loop import Dead

POWERSAFE_OVERWRITE = 0x1000  # as SQLite declares for real file systems
_numbers = itertools.count()


class Connection:
    """The part of `sqlite3.Connection` that the ledger uses, with apsw."""

    def __init__(self, disk: SimulatedDisk, path: str) -> None:
        self._system = FileSystem(disk)
        self._db = apsw.Connection(path, vfs=self._system.vfs_name)
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # replaces shared memory, which cannot be simulated
        disk.platter.at_end.append(self._end)

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Rows:
        try:
            return Rows(self._db.execute(statement, values), self._db)
        except apsw.FullError as error:
            full = sqlite3.OperationalError(str(error))
            full.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise full from error
        except apsw.Error as error:
            raise sqlite3.DatabaseError(str(error)) from error

    @property
    def in_transaction(self) -> bool:
        return self._db.in_transaction

    def executescript(self, statements: str) -> None:
        self.execute(statements)

    def close(self) -> None:
        try:
            self._db.close()
        except apsw.Error as error:
            raise sqlite3.DatabaseError(str(error)) from error

    def _end(self) -> None:
        """Removes the file system. SQLite would otherwise keep the seed's data forever."""
        self._db.close(True)
        self._system.unregister()


class Rows:
    """A cursor."""

    def __init__(self, cursor: apsw.Cursor, db: apsw.Connection) -> None:
        self._cursor, self.rowcount = cursor, db.changes()

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._cursor)

    def fetchone(self) -> tuple[Any, ...] | None:
        return next(iter(self._cursor), None)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return list(self._cursor)


class FileSystem(apsw.VFS):
    """The files of one process on the platter. A dead process can read, but cannot write."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.vfs_name = f"simulated-{next(_numbers)}"
        self._random = random.Random(self.disk.platter.rng.random())
        super().__init__(self.vfs_name, "")

    def xOpen(self, name: Any, flags: list[int]) -> File:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        names = self.disk.platter.names
        if path not in names:
            names_it = Content()
            if path is not None and self.touched():
                self.disk.platter.change(path, names_it)
            return File(self.disk, path, names_it)
        return File(self.disk, path, names[path])

    def touched(self) -> bool:
        return touched(self.disk)

    def xAccess(self, pathname: str, flags: int) -> bool:
        return pathname in self.disk.platter.names

    def xDelete(self, filename: str, syncdir: bool) -> None:
        if touched(self.disk):
            self.disk.platter.change(filename, None)
            if syncdir:
                self.disk.platter.sync_directory(parent(filename))

    def xFullPathname(self, name: str) -> str:
        return name

    def xRandomness(self, numbytes: int) -> bytes:
        return self._random.randbytes(numbytes)


def touched(disk: SimulatedDisk) -> bool:
    """Counts an access. Returns False if the process is dead, because an exception cannot pass through SQLite."""
    try:
        disk.process.touch()
    except Dead:
        return False
    return True


class File:
    """An open file. Like SQLite, it syncs the directory of a new log with the log's first sync."""

    def __init__(self, disk: SimulatedDisk, path: str | None, content: Content) -> None:
        self._disk, self._path, self._content = disk, path, content

    def xRead(self, amount: int, offset: int) -> bytes:
        return bytes(self._content.data[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:
        if touched(self._disk):
            if self._disk.platter.full:
                raise apsw.FullError
            self._content.write(offset, bytes(data))

    def xTruncate(self, newsize: int) -> None:
        if touched(self._disk):
            self._content.truncate(newsize)

    def xSync(self, flags: int) -> None:
        if touched(self._disk):
            if self._disk.platter.broken:
                raise apsw.IOError
            self._disk.platter.syncs += 1
            self._content.sync()
            if self._path is not None and self._path.endswith(("-wal", "-journal")):
                self._disk.platter.sync_directory(parent(self._path))

    def xFileSize(self) -> int:
        return len(self._content.data)

    def xLock(self, level: int) -> None:
        pass

    def xUnlock(self, level: int) -> None:
        pass

    def xCheckReservedLock(self) -> bool:
        return False

    def xFileControl(self, op: int, ptr: int) -> bool:
        return False

    def xSectorSize(self) -> int:
        return 4096

    def xDeviceCharacteristics(self) -> int:
        return POWERSAFE_OVERWRITE

    def xClose(self) -> None:
        pass
