"""Settings of a front."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll_wire import scrape
from atoll_wire.access import LOCAL, Access


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """One front process. core: the address that it passes calls on to."""

    listen: tuple[str, ...]
    core: str
    region: str = ""
    metrics_listen: str | None = None
    access: Access = LOCAL
    metrics_plaintext: bool = False
    cache_bytes: int = 48 << 20  # of updates and whole fragments; what does not fit is passed through
    calls: int = 16_384  # at a time, of any kind
    audit_log: Path | None = None

    def check(self) -> None:
        """Refuses an address that would offer the run to a network in plain text."""
        self.access.check((*self.listen, self.core))
        scrape.check(self.metrics_listen, plaintext=self.metrics_plaintext)
