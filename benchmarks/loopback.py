"""What went over this machine's loopback interface, headers included, each byte once."""

from __future__ import annotations

from pathlib import Path

SENT = Path("/sys/class/net/lo/statistics/tx_bytes")


def loopback_bytes() -> int:
    """So far."""
    return int(SENT.read_text())
