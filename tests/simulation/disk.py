"""A disk in memory that guarantees only synced data. A crash loses, keeps or tears (at 4 KiB) other data.

Names are separate from contents, as in a real file system. A synced file with an unsynced name is lost.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from atoll_server.storage.disk import Disk

from tests.simulation.loop import Dead, Process

SECTOR = 4096


class Content:
    """The bytes of one file, and the bytes that unsynced writes replaced, so that a crash can undo them."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.rotten = False
        self.unsynced: list[tuple[int, bytes, bytes, int]] = []  # offset, new, old, length before

    def write(self, offset: int, new: bytes) -> None:
        length = len(self.data)
        if offset > length:
            self.data.extend(bytes(offset - length))
        self.unsynced.append((offset, new, bytes(self.data[offset : offset + len(new)]), length))
        self.data[offset : offset + len(new)] = new

    def truncate(self, size: int) -> None:
        length = len(self.data)
        self.unsynced.append((size, b"", bytes(self.data[size:]), length))
        del self.data[size:]

    def sync(self) -> None:
        self.unsynced.clear()

    def crash(self, rng: random.Random, keep: float) -> None:
        """Undoes all unsynced writes, then writes some of their sectors again, each with probability `keep`."""
        writes, self.unsynced = self.unsynced, []
        for offset, new, old, length in reversed(writes):
            if new:
                self.data[offset : offset + len(new)] = old
            else:
                self.data[offset:] = old
            del self.data[length:]
        for offset, new, _, _ in writes:
            if not new:
                if rng.random() < keep:
                    del self.data[offset:]
                continue
            place = offset
            while place < offset + len(new):
                end = min(offset + len(new), (place // SECTOR + 1) * SECTOR)
                if rng.random() < keep:
                    if len(self.data) < place:
                        self.data.extend(bytes(place - len(self.data)))
                    self.data[place:end] = new[place - offset : end - offset]
                place = end


class Platter:
    """The file names and contents on a disk, which outlive the processes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names: dict[str, Content] = {}
        self.directories: set[str] = set()
        self.unsynced: list[tuple[str, str, Callable[[], None], Callable[[], None]]] = []  # directory, what, undo, redo
        self.locks: dict[str, Process] = {}
        self.at_end: list[Callable[[], None]] = []  # called at the end of the seed
        self.full = False
        self.broken = False  # syncs fail
        self.syncs = self.lost_writes = 0

    def change(self, path: str, content: Content | None) -> None:
        """Gives the content a name, or removes the name. A crash undoes this unless its directory is synced."""
        old = self.names.get(path)

        def put(what: Content | None) -> None:
            if what is None:
                self.names.pop(path, None)
            else:
                self.names[path] = what

        put(content)
        self.unsynced.append((parent(path), path, lambda: put(old), lambda: put(content)))

    def rename(self, old: str, new: str) -> None:
        """Renames a file. A crash undoes both changes of names, or none."""
        content, replaced = self.names[old], self.names.get(new)

        def undo() -> None:
            self.names[old] = content
            if replaced is None:
                self.names.pop(new, None)
            else:
                self.names[new] = replaced

        def redo() -> None:
            self.names.pop(old, None)
            self.names[new] = content

        redo()
        self.unsynced.append((parent(new), new, undo, redo))

    def sync_directory(self, directory: str) -> None:
        self.syncs += 1
        self.unsynced = [change for change in self.unsynced if change[0] != directory]

    def rot(self, files: Iterable[str]) -> bool:
        """Flips a bit in the last of these files that is undamaged. Returns whether an undamaged copy remains."""
        there = [name for name in files if name in self.names]
        sound = [name for name in there if not self.names[name].rotten and self.names[name].data]
        if len(sound) < 2:  # the design does not cover a disk that damages all copies
            return False
        content = self.names[sound[-1]]
        content.data[self.rng.randrange(len(content.data))] ^= 1 << self.rng.randrange(8)
        content.rotten = True
        return True

    def crash(self) -> None:
        """Simulates a power failure. Unsynced data is lost, or kept in part or completely."""
        keep = self.rng.choice((0.0, 0.0, 0.5, 1.0))
        for content in list(self.names.values()):
            self.lost_writes += len(content.unsynced)
            content.crash(self.rng, keep)
        kept = round(keep * len(self.unsynced))  # a file system's journal keeps the order
        for _, _, undo, _ in reversed(self.unsynced):
            undo()
        for _, _, _, redo in self.unsynced[:kept]:
            redo()
        self.unsynced.clear()


def parent(path: str) -> str:
    return path.rpartition("/")[0]


class SimulatedDisk(Disk):
    """The platter as one process sees it. A dead process sees nothing."""

    def __init__(self, platter: Platter, process: Process, connect: Callable[[SimulatedDisk, str], Any]) -> None:
        self.platter, self.process, self._connect = platter, process, connect

    def make_directory(self, path: Path) -> None:
        self.process.touch()
        self.platter.directories.add(str(path))

    def lock(self, path: Path) -> Callable[[], None]:
        self.process.touch()
        holder = self.platter.locks.get(str(path))
        if holder is not None and holder.alive:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        self.platter.locks[str(path)] = self.process
        return lambda: self.platter.locks.pop(str(path)) and None

    def create(self, path: Path) -> Any:
        self.process.touch()
        self._room()
        content = Content()
        self.platter.change(str(path), content)
        return _Handle(self, content)

    def create_large(self, path: Path) -> Any:
        return self.create(path)

    def open(self, path: Path) -> Any:
        return _Handle(self, self._content(path))

    def map(self, path: Path) -> np.ndarray:
        return np.frombuffer(bytes(self._content(path).data), np.uint8)

    def rename(self, old: Path, new: Path) -> None:
        self.process.touch()
        self.platter.rename(str(old), str(new))

    def remove(self, path: Path) -> bool:
        self.process.touch()
        if str(path) not in self.platter.names:
            return False
        self.platter.change(str(path), None)
        return True

    def exists(self, path: Path) -> bool:
        self.process.touch()
        return str(path) in self.platter.names

    def files(self, directory: Path) -> list[Path]:
        self.process.touch()
        return [Path(name) for name in self.platter.names if name.startswith(f"{directory}/")]

    def sync_directory(self, path: Path) -> None:
        self.process.touch()
        self.check_sync()
        self.platter.sync_directory(str(path))

    def free_bytes(self, path: Path) -> int:
        return 1 << 40

    def connect(self, path: Path) -> Any:
        self.process.touch()
        return self._connect(self, str(path))

    def check_sync(self) -> None:
        if self.platter.broken:
            raise OSError(errno.EIO, "Input/output error")

    def _room(self) -> None:
        if self.platter.full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _content(self, path: Path) -> Content:
        self.process.touch()
        content = self.platter.names.get(str(path))
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return content


class _Handle:
    """An open file, written at its end, or read at offsets."""

    def __init__(self, disk: SimulatedDisk, content: Content) -> None:
        self._disk, self._content = disk, content
        self.size = len(content.data)

    def write(self, *pieces: bytes | memoryview) -> None:
        self._disk.process.touch()
        self._disk._room()
        self._content.write(len(self._content.data), b"".join(pieces))

    def sync(self) -> None:
        self._disk.process.touch()
        self._disk.check_sync()
        self._disk.platter.syncs += 1
        self._content.sync()

    def read_at(self, offset: int, length: int) -> bytes:
        self._disk.process.touch()
        return bytes(self._content.data[offset : offset + length])

    def forget(self) -> None:
        self._disk.process.touch()

    def close(self) -> None:
        pass


__all__ = ["Content", "Dead", "Platter", "SimulatedDisk"]
