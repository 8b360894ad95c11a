"""The list of revoked certificates. A server refuses new calls with these certificates and ends their open calls."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import structlog
from atoll_wire.errors import SettingsError
from atoll_wire.security.certificate import Role, brief

from atoll_server.access.identity import Caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.access.reread_file import RereadFile

log = structlog.get_logger()

End: TypeAlias = Callable[[Refused], None]

LOOK_S = 1.0  # seconds between two checks of whether the file has changed
SERIAL_BITS = 159  # limit on a serial number; a SHA-1 fingerprint, which Atoll does not accept, may be larger
ENTRY = re.compile(r"(?P<serial>[0-9a-f]{1,40})|(?P<fingerprint>[0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class RevokedList:
    """The content of the file. fingerprints: SHA-256 fingerprints, as hexadecimal digits."""

    serials: frozenset[int] = frozenset()
    fingerprints: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.serials) + len(self.fingerprints)

    def __contains__(self, who: Caller) -> bool:
        return who.fingerprint in self.fingerprints or who.serial in self.serials


class RevokedCertificates:
    """The revoked certificates of a process, and its open calls. path: the list; None if no certificate is revoked.

    refused: called for each call that is refused or ended.
    """

    def __init__(self, path: Path | None, refused: Callable[[], None] = lambda: None) -> None:
        fix = "make the file readable, or create an empty file"
        self._file = None if path is None else RereadFile("--revoked", path, partial(_parse, path), fix)
        self._refused = refused
        self._revoked = RevokedList()
        self._open: dict[End, Caller] = {}

    def __len__(self) -> int:
        return len(self._revoked)

    def load(self) -> None:
        """Reads the file. Raises SettingsError if the file is unreadable or invalid."""
        if self._file is not None:
            self._revoked = self._file.load()

    async def keep_reading(self) -> None:
        """Reads the file again after each change."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Reads the file again if it has changed, then ends open calls whose certificate is now revoked."""
        if self._file is None or (newest := self._file.newest()) == self._revoked:
            return
        self._revoked = newest
        log.info("the list of revoked certificates has changed", entries=len(newest))
        for end, who in list(self._open.items()):
            if who in newest:
                end(self._refusal(who))

    @contextmanager
    def calling(self, who: Caller, end: End) -> Iterator[None]:
        """Context manager for a call. Raises Refused if the caller's certificate is revoked.

        end: function that ends the call; used if the certificate is revoked during the call.
        """
        if who in self._revoked:
            raise self._refusal(who)
        self._open[end] = who
        try:
            yield
        finally:
            del self._open[end]

    def _refusal(self, who: Caller) -> Refused:
        self._refused()
        # With another status, the learners behind a front would stop, although they could use another front.
        status = Status.UNAVAILABLE if who.role is Role.FRONT else Status.PERMISSION_DENIED
        assert who.role is not None, "certificates have a role"
        owner = f'{who.role.value} "{brief(who.name)}"'
        text = f"the certificate of {owner} is revoked (serial number {who.serial:X}): use a new certificate"
        return Refused(status, f"{text} from the run's operator (atoll certs issue)")


def _parse(path: Path, text: str) -> RevokedList:
    """Parses a file's text, which contains one entry per line and comments after #. Raises SettingsError."""
    serials, fingerprints = set[int](), set[str]()
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip().replace(":", "").lower()
        if not entry:
            continue
        found = ENTRY.fullmatch(entry)
        if found is None or (found["serial"] and not 0 < int(entry, 16) < 1 << SERIAL_BITS):
            shown = f'line {number} ("{line.strip()[:80]}")'
            fix = "correct the line, for example with `atoll certs list`"
            raise SettingsError(
                f"--revoked {path}: {shown} is neither a serial number nor a SHA-256 fingerprint: {fix}"
            )
        if found["fingerprint"]:
            fingerprints.add(entry)
        else:
            serials.add(int(entry, 16))
    return RevokedList(frozenset(serials), frozenset(fingerprints))
