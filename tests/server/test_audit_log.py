"""The audit log: no peer's lines can push other lines out of the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from atoll_server.access.audit_log import FILE_BYTES, FILES, LINES_PER_MINUTE, AuditLog
from atoll_server.access.refusals import LONGEST

from tests.clocks import SetClock


@pytest.fixture
def clock() -> SetClock:
    return SetClock(steady=1000.0)


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_refusals_whose_text_differs_are_left_out_and_counted(tmp_path: Path, clock: SetClock):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, clock)
    log.start()
    for minute in range(3):
        for n in range(1000):
            log.refused("refused", f"ipv4:10.0.0.1:{n}", detail=f"{minute} {n}")
        log.refused("refused", "ipv4:10.0.0.2:5", detail="of another address")
        log.note("evict", operator="alice")
        clock.steady += 60.0
    log.close()
    found = lines(path)
    of = [line for line in found if line["act"] == "refused" and line["peer"].startswith("ipv4:10.0.0.1:")]
    assert len(of) == 3 * LINES_PER_MINUTE
    left_out = [(line["of"], line["lines"]) for line in found if line["act"] == "left out"]
    assert left_out == 3 * [("refused ipv4:10.0.0.1", 1000 - LINES_PER_MINUTE)]
    assert sum(line.get("detail") == "of another address" for line in found) == 3
    assert sum(line["act"] == "evict" for line in found) == 3


def test_repeated_joins_are_left_out_and_counted(tmp_path: Path, clock: SetClock):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, clock)
    log.start()
    for n in range(500):
        log.moved("joined", "a", incarnation=str(n))
    log.moved("joined", "b", incarnation="1")
    log.close()
    joined, left_out = (sum(line["act"] == act for line in lines(path)) for act in ("joined", "left out"))
    assert (joined, left_out) == (LINES_PER_MINUTE + 1, 1)


def test_repeated_lines_become_one_line_with_a_count(tmp_path: Path, clock: SetClock):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, clock)
    log.start()
    for _ in range(100):
        log.refused("refused", "ipv4:10.0.0.1:7", detail="x")
    clock.steady += 61.0
    log.refused("refused", "ipv4:10.0.0.1:7", detail="x")
    log.close()
    assert [line.get("repeated") for line in lines(path)] == [None, 99]


def test_the_files_last_half_a_day_whatever_one_peer_does():
    longest = 2 * LONGEST  # with the text around the detail
    assert FILE_BYTES * (FILES - 1) / (longest * LINES_PER_MINUTE * 60) > 12, "the files must last 12 hours"
