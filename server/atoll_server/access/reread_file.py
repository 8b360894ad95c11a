"""A file that a process reads again after each change, such as a list of tokens or of revoked certificates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import structlog
from atoll_wire.errors import SettingsError

log = structlog.get_logger()

T = TypeVar("T")
Stamp: TypeAlias = tuple[int, int, int]  # modification time, inode and size


class RereadFile(Generic[T]):
    """The content of a file. If a changed file cannot be used, the previous content stays in force.

    option: the option that names the file. parse: function that returns the parsed content of a text, or raises
    SettingsError. fix: remedy to show if the file cannot be read.
    """

    def __init__(self, option: str, path: Path, parse: Callable[[str], T], fix: str) -> None:
        self._named = f"{option} {path}"
        self._path = path
        self._parse = parse
        self._fix = fix
        self._stamp: Stamp = (0, 0, 0)
        self._content: T | None = None

    def load(self) -> T:
        """Reads the file and returns its content. Raises SettingsError if the file is unreadable or invalid."""
        stamp = self._look()
        try:
            text = self._path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{self._named} cannot be read ({error}): {self._fix}") from error
        self._stamp, self._content = stamp, self._parse(text)
        return self._content

    def newest(self) -> T:
        """Returns the newest valid content. Logs one warning for each change that makes the file invalid."""
        if self._content is None or self._stamp != (now := self._look()):
            try:
                return self.load()
            except SettingsError as error:
                if self._content is None:
                    raise
                self._stamp = now
                text = "a changed file cannot be used, so its previous content stays in force: correct the file"
                log.warning(text, error=str(error))
        return self._content

    def _look(self) -> Stamp:
        try:
            stat = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
