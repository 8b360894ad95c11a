"""The journal: each entry is recorded once, and reaches all subscribers in one order."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import structlog
from atoll_server.access.audit_log import AuditLog
from atoll_server.access.refusals import Refused, Status
from atoll_server.ledger.rows import FateRow
from atoll_server.processes.core import Core
from atoll_server.rounds.syncer_events import Cause, ContributionKey, Lapse, Merge, Share
from atoll_server.settings import CoreSettings, Limits
from atoll_server.shard.follower_log import FollowerLog
from atoll_server.shard.intake import Intake
from atoll_server.telemetry import entries
from atoll_server.telemetry.audited import audited
from atoll_server.telemetry.entries import Arrival
from atoll_server.telemetry.journal import Journal
from atoll_server.telemetry.logs import AGAIN_S, JournalLog
from atoll_server.uploads.uploads import Upload
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.contract import Fate
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import MergeKind, TensorSpec, plan
from atoll_wire.process.clock import SYSTEM
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from tests.bare_shard import Rows, bare_shard

KEY = ContributionKey("a", 1, 0, 1)
NO = Refused(Status.PERMISSION_DENIED, "no")
MERGE = Merge(0, 1, 1, (Share(KEY, 1.0, 0.0),), (), 1.0, None, Cause.ALL_ANSWERED, "every live learner has answered")
FOLLOWERS, COUNTS, TIMELINE, EVENTS, LOG, AUDIT = "followers", "counts", "timeline", "events", "log", "audit"

# Each kind of entry, and its subscribers. A round's entries are in order, because the timeline needs the opening first.
SHOWN: list[tuple[entries.Entry, set[str]]] = [
    (entries.Started(1), {EVENTS}),
    (entries.Restored(1, 2), {EVENTS, LOG}),
    (entries.TakenUp(1, 2, 3, 9, 6, 1), {COUNTS, LOG}),
    (entries.InitialParameters(10, 1), {EVENTS, LOG}),
    (entries.InitialParametersRefused("too long"), {LOG}),
    (entries.PauseChanged("by ann"), {FOLLOWERS, EVENTS, LOG}),
    (entries.SnapshotTaken(1, 1, 10), {EVENTS, LOG}),
    (entries.SnapshotFailed("no room"), {LOG}),
    (entries.Trouble("disk", "the disk is full"), {EVENTS}),
    (entries.Joined("a", "eu", 1, Arrival.NEW, 0.0, "", 1), {EVENTS, LOG, AUDIT}),
    (entries.Left("a", 1), {EVENTS, LOG, AUDIT}),
    (entries.Evicted("a", "bad"), {EVENTS, LOG}),
    (entries.Readmitted("a"), {EVENTS, LOG}),
    (entries.Silenced("a", 9.0), {EVENTS}),
    (entries.Recovered("a"), {EVENTS}),
    (entries.FrontConnected("eu", "eu", 0.0), {EVENTS, LOG}),
    (entries.FrontSilenced("eu", 2), {EVENTS, LOG}),
    (entries.JoinRefused("a", "ipv4:10.0.0.1:1", NO), {LOG, AUDIT}),
    (entries.SessionRefused("a", "ipv4:10.0.0.2:1", NO), {AUDIT}),
    (entries.CallLimited("Push", "ipv4:10.0.0.3:1", "slow down"), {AUDIT}),
    (entries.OperatorRefused("evict", "ipv4:10.0.0.4:1", NO), {AUDIT}),
    (entries.OperatorActed("evict", "ann", "ipv4:10.0.0.5:1", {"learner": "a"}), {LOG, AUDIT}),
    (entries.RoundOpened(0, 1), {FOLLOWERS, TIMELINE}),
    (entries.UploadBegan(KEY, 1, 0), {TIMELINE, LOG}),
    (entries.TurnedAway("a", NO), {COUNTS, EVENTS, LOG}),
    (entries.Clamped("a", 10, 2, 5, 1), {COUNTS, LOG}),
    (entries.Declined("b", 0, 1, "it was just started"), {TIMELINE}),
    (entries.ArrivalRefused(FateRow(ContributionKey("c", 1, 0, 1), Fate.REFUSED), 1), {COUNTS, TIMELINE, EVENTS, LOG}),
    (entries.PendingRefused(FateRow(KEY, Fate.REFUSED)), {FOLLOWERS, COUNTS, EVENTS}),
    (entries.Acknowledged(KEY, 1), {COUNTS, TIMELINE, LOG}),
    (entries.RoundClosed(MERGE), {TIMELINE}),
    (entries.MergeComputed(0, 1), {TIMELINE}),
    (entries.Published(MERGE, 9, 100, 0), {FOLLOWERS, COUNTS, TIMELINE, LOG}),
    (entries.Adopted("a", 0, 1), {TIMELINE}),
    (entries.RoundLapsed(Lapse(0, 2, Cause.ALL_SILENT, "no learner is expected")), {TIMELINE, LOG}),
]


class Shown:
    """A core, and the output of each of its journal's subscribers."""

    def __init__(self, directory: Path) -> None:
        self.core = Core(CoreSettings(listen=("127.0.0.1:0",), directory=directory), {})
        self.follower_log = FollowerLog(100, pb.FullState)
        self.core.journal.subscribe(self.follower_log.on, only_shows=False)
        self.audit_log = Lines()
        self.core.journal.subscribe(partial(audited, self.audit_log), only_shows=True)  # type: ignore[arg-type]
        self.logged: list[Any] = []

    def now(self) -> dict[str, str]:
        core = self.core
        core.events.tell_refused(1e9)
        metrics = generate_latest(core.metrics.registry).decode().splitlines()
        return {
            FOLLOWERS: repr(self.follower_log._kept),
            COUNTS: repr([line for line in metrics if line.startswith("atoll_contributions_total")]),
            TIMELINE: repr(list(core.timeline.newest())),
            EVENTS: repr([event.text for event in core.events.after(0, 0)]) + str(core.events._refused),
            LOG: repr(self.logged),
            AUDIT: repr(self.audit_log.lines),
        }


class Lines:
    """Stands in for an audit log."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def note(self, *what: Any, **more: Any) -> None:
        self.lines.append((what, more))

    moved = refused = note


def test_each_kind_of_entry_reaches_only_its_subscribers(tmp_path: Path):
    structlog.reset_defaults()  # another test may have raised the level, and some kinds are at debug
    assert {type(entry) for entry, _ in SHOWN} == set(get_args(entries.Entry)), "each kind must appear once"
    assert len(SHOWN) == len(get_args(entries.Entry))

    async def found() -> list[tuple[str, set[str]]]:
        shown = Shown(tmp_path)
        changed = []
        for number, (entry, _) in enumerate(SHOWN):
            before = shown.now()
            with capture_logs() as lines:
                shown.core.journal.record(entry, 10.0 + number)
            shown.logged += lines
            after = shown.now()
            changed.append((type(entry).__name__, {name for name in before if before[name] != after[name]}))
        assert shown.core.journal.faults == 0
        return changed

    assert asyncio.run(found()) == [(type(entry).__name__, where) for entry, where in SHOWN]


def test_the_log_names_a_learners_state():
    structlog.reset_defaults()
    with capture_logs() as lines:
        JournalLog().on(entries.Joined("a", "eu", 1, Arrival.NEW, 0.0, "", 2), 0.0)
    assert [line["state"] for line in lines] == ["initialise"]


def test_only_a_pause_has_a_reason_in_the_log():
    structlog.reset_defaults()
    with capture_logs() as lines:
        for reason in ("by ann: night", ""):
            JournalLog().on(entries.PauseChanged(reason), 0.0)
    assert [(line["event"], line.get("reason")) for line in lines] == [
        ("run paused", "by ann: night"),
        ("run resumed", None),
    ]


@pytest.mark.parametrize(
    ("tokens", "steps", "level"), [(1094, 71, "debug"), (1000, 71, "warning"), (1136, 60, "warning")]
)
def test_a_contribution_that_counts_almost_whole_is_no_accusation(tokens, steps, level):
    structlog.reset_defaults()
    with capture_logs() as lines:
        JournalLog().on(entries.Clamped("a", 1136, 71, tokens, steps), 0.0)
    assert [line["log_level"] for line in lines] == [level]


def test_of_a_learners_many_refusals_the_log_has_one_warning_per_minute():
    structlog.reset_defaults()
    journal_log = JournalLog()
    with capture_logs() as lines:
        for second in range(47):
            journal_log.on(entries.TurnedAway("a", NO), second / 10)
        journal_log.on(entries.TurnedAway("b", NO), 5.0)
        journal_log.on(entries.ArrivalRefused(FateRow(KEY, Fate.REFUSED), 1), AGAIN_S)
    warnings = [line for line in lines if line["log_level"] == "warning"]
    assert [(line["learner"], line.get("others_before")) for line in warnings] == [("a", None), ("b", None), ("a", 46)]
    assert len(lines) == 49, "debug level shows each"


def test_subscribers_are_called_in_the_order_of_subscription():
    journal, heard = Journal(), list[str]()
    for name in ("first", "second", "third"):
        journal.subscribe(lambda *_, name=name: heard.append(name), only_shows=name != "first")
    journal.record(entries.Started(1), 0.0)
    assert heard == ["first", "second", "third"]


def test_followers_of_a_shard_are_notified_before_other_subscribers(tmp_path: Path):
    layout = plan((TensorSpec("w", (8192,), "float32", MergeKind.AVERAGE),), 1)
    shard, heard = bare_shard(tmp_path, layout, Limits(), Rows(), []), list[int]()
    shard.context.journal.subscribe(lambda *_: heard.append(len(shard.follower_log._kept)), only_shows=True)
    shard._record(entries.RoundOpened(0, 1))
    assert heard == [1], "followers must hear of the entry first"


def broken(*_: Any) -> None:
    raise ZeroDivisionError("a fault of Atoll")


def test_a_fault_in_a_subscriber_stops_nothing_and_is_counted():
    journal, heard = Journal(), list[entries.Entry]()
    journal.subscribe(broken, only_shows=True)
    journal.subscribe(lambda entry, _: heard.append(entry), only_shows=True)
    with capture_logs() as said:
        journal.record(entries.Started(1), 0.0)
    assert heard == [entries.Started(1)]
    assert journal.faults == 1
    assert [(line["log_level"], line["entry"]) for line in said] == [("error", "Started")]


def test_a_fault_in_notifications_is_raised_by_the_record():
    journal = Journal()
    journal.subscribe(broken, only_shows=False)
    with pytest.raises(ZeroDivisionError):
        journal.record(entries.Started(1), 0.0)


def test_a_contribution_is_acknowledged_and_merged_although_subscribers_fail(tmp_path: Path):
    layout = plan((TensorSpec("w", (8192,), "float32", MergeKind.AVERAGE),), 1)
    (fragment,) = layout.fragments
    vector = np.random.default_rng(1).standard_normal(fragment.length).astype(np.float32)
    payloads = [frame_codec.encode_frame(vector, span, Codec.INT4) for span in fragment.frames]
    table = [(len(payload), crc32c(payload)) for payload in payloads]
    header = pb.PushHeader(
        session=pb.Session(learner="a", incarnation=1), fragment=0, seq=1, cycle=1, tokens=10, steps=1,
        codec=pb.CODEC_INT4, frames=len(payloads), size_bytes=sum(map(len, payloads)),
        digest=frame_codec.frames_digest(table),
    )  # fmt: skip

    async def pushed() -> tuple[pb.Receipt, int, int]:
        failures = list[BaseException]()
        shard = bare_shard(tmp_path, layout, Limits(), Rows(), failures)
        shard.context.journal.subscribe(broken, only_shows=True)
        shard.syncer.fragments[0].cycle = 1
        intake = Intake(shard)
        upload = intake.offer(header, 0.0)
        assert isinstance(upload, Upload)
        frames = [pb.Frame(index=n, crc32c=table[n][1], payload=payload) for n, payload in enumerate(payloads)]
        await intake.take(upload, frames, 0.0)
        receipt = await intake.receipt(upload)
        await shard._merge(MERGE)
        assert not failures
        await shard.work.stop()
        return receipt, shard.fragments[0].version, shard.context.journal.faults

    with capture_logs():
        receipt, version, faults = asyncio.run(pushed())
    assert receipt.fate == pb.FATE_PENDING
    assert version == 1
    assert faults == 3, "each of three entries must count as a fault"


def test_the_audit_log_has_the_expected_lines(tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    log, journal = AuditLog(path, SYSTEM), Journal()
    log.start()
    journal.subscribe(partial(audited, log), only_shows=True)
    for entry, _ in SHOWN:
        journal.record(entry, 1.0)
    log.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for line in found:
        del line["at"]
    refused = {"status": "permission_denied", "detail": "no"}
    assert found == [
        {"act": "joined", "learner": "a", "incarnation": "1", "region": "eu", "by": ""},
        {"act": "left", "learner": "a", "incarnation": "1"},
        {"act": "refused", "learner": "a", **refused, "peer": "ipv4:10.0.0.1:1"},
        {"act": "refused", "learner": "a", **refused, "peer": "ipv4:10.0.0.2:1"},
        {"act": "limited", "method": "Push", "detail": "slow down", "peer": "ipv4:10.0.0.3:1"},
        {"act": "operator refused", "asked": "evict", **refused, "peer": "ipv4:10.0.0.4:1"},
        {"act": "evict", "operator": "ann", "peer": "ipv4:10.0.0.5:1", "learner": "a"},
    ]
