"""Polls the core and keeps the core's last answers during an outage."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar, get_args

import grpc.aio
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost
from atoll_wire.connections.link import core_away, is_unreachable
from atoll_wire.contract import LinkState
from atoll_wire.security.transport import TransportSecurityError

from atoll_dashboard.feed.core_client import CoreClient
from atoll_dashboard.feed.history import History
from atoll_dashboard.feed.history_file import HistoryFile
from atoll_dashboard.feed.run_rates import DOWN, MIN_LONG_S, UP, RunRates
from atoll_dashboard.models import conversion
from atoll_dashboard.models.api_models import Cost, Event, Kind, Learner, Now, Region, Run

log = structlog.get_logger()

EVERY_S, UNWATCHED_EVERY_S = 1.0, 5.0  # seconds between two polls: while a page is open, and otherwise
SHARE = 0.1  # largest share of the time that polls may take
WATCHED_S = 10.0  # seconds after a request during which a page counts as open
ROUNDS, MAX_EVENTS = 64, 5000
DOTS = 48
FEW_DOTS = 8
LINKS = 16
MANY_REGIONS = 16
CALLS = 4  # limit on concurrent calls to the core, in addition to polls
SAVE_EVERY_S = 10.0  # seconds between two writes of the history file
T = TypeVar("T")
MONTH_S = 30 * 86400.0
NO_TOKENS = (
    "the core accepts no operator tokens: run `atoll token NAME --file FILE`, and restart the core with "
    "--operator-tokens FILE"
)


@dataclass(slots=True)
class CoreAnswers:
    """The core's answers to one poll. links: links by region: fronts first, then links without a connection."""

    status: pb.StatusReply = field(default_factory=pb.StatusReply)
    rounds: list[pb.Round] = field(default_factory=list)
    at: float = -math.inf  # monotonic seconds
    links: dict[str, list[pb.LinkStatus]] = field(default_factory=dict)


class RunFeed:
    """The dashboard's view of a run. price_per_gb: price of a gigabyte over the WAN, in US dollars.

    file: the file of histories and events for the next process. problem: why the last poll failed, or "".
    """

    def __init__(self, core: CoreClient, price_per_gb: float, file: HistoryFile | None = None) -> None:
        self.core = core
        self.price_per_gb = price_per_gb
        self.seen = CoreAnswers()
        self.problem = "the dashboard has not polled the core yet"
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.watchers = 0
        self._began = time.monotonic()
        self._asked_at = -math.inf
        self._position = (0, 0)
        self._number = 0
        self._answers: dict[tuple[Any, ...], tuple[float, asyncio.Task[Any]]] = {}
        self._few = asyncio.Semaphore(CALLS)
        self.rates = RunRates()
        self._file = file
        self._saved_at = -math.inf
        self._unreachable_since: float | None = None  # last answer, on the core's clock; None: the core answers
        self._wanted = asyncio.Event()
        self._looked = asyncio.Event()
        self._told: tuple[CoreAnswers, float, str] | None = None

    # ------------------------------------------------------------------------------ polling

    def open_file(self) -> None:
        """Continues the histories and events of the history file, if there is one. Raises HistoryFileError."""
        kept = self._file.open() if self._file is not None else None
        if kept is not None:
            self.rates.restore(kept)
            self.events.extend(kept.events)
            self._number, self._position = kept.events[-1].number if kept.events else 0, kept.position
            text = f"no data since {time_of_day(kept.poll[2])}: the dashboard was not running"
            self._add_event(self.core_now(), "unreachable", text)

    def close_file(self) -> None:
        """Writes new points and events to the history file, and closes it."""
        self.save()
        if self._file is not None:
            self._file.close()

    def save(self) -> None:
        """Writes new points and events to the history file. Any thread may call this while no poll runs."""
        if self._file is not None and self.rates.poll is not None:
            self._file.save(self.rates.kept(list(self.events), self._position))
        self._saved_at = time.monotonic()

    async def keep(self) -> None:
        """Polls the core until this task is cancelled."""
        while True:
            began = time.monotonic()
            await self._look()
            if self._file is not None and began - self._saved_at >= SAVE_EVERY_S:
                await asyncio.to_thread(self.save)
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()
            took_s = time.monotonic() - began
            watched = self.watchers or time.monotonic() - self._asked_at < WATCHED_S
            rest_s = min(max(EVERY_S if watched else UNWATCHED_EVERY_S, took_s / SHARE) - took_s, UNWATCHED_EVERY_S)
            self._wanted.clear()
            try:
                async with asyncio.timeout(EVERY_S if self.problem else rest_s):
                    await self._wanted.wait()
            except TimeoutError:
                continue  # no page was opened during the wait

    async def changed(self) -> None:
        """Waits for the next poll, for at most one second, because the displayed ages also change without a poll."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVERY_S):
                await self._looked.wait()

    def watched(self) -> None:
        """Records a request, so that polls are frequent for the next WATCHED_S seconds."""
        if not self.watchers and time.monotonic() - self._asked_at >= WATCHED_S:
            self._wanted.set()
        self._asked_at = time.monotonic()

    async def _look(self) -> None:
        try:
            status, rounds, events = await asyncio.gather(
                self.core.status(), self.core.rounds(ROUNDS, brief=True), self.core.events(*self._position)
            )
            self.rates = self.rates.following(status)
            self.rates.take(status)
            self._take_events(events)
            self._poll_succeeded(status.at)
        except grpc.aio.AioRpcError as error:
            self._poll_failed(await explained(error, self.core), unreachable=is_unreachable(error))
        except TransportSecurityError as error:
            self._poll_failed(str(error))
        except LinkLost:
            self._poll_failed("the connection to the core was closed: the dashboard reconnects", unreachable=True)
        except Exception:
            log.exception("the core's answer is invalid")
            self._poll_failed(
                "the core's answer is invalid (the log has details): use the same version of Atoll on both sides"
            )
        else:
            if self.problem:
                log.info("the core answers", server=self.core.address, run=status.run, epoch=status.epoch)
            gap, self.problem = bool(self.problem), ""
            self.seen = CoreAnswers(status, rounds, time.monotonic(), conversion.links_by_region(status.links))
            self.rates.remember(status, self.run(), gap=gap)

    def _poll_failed(self, problem: str, *, unreachable: bool = False) -> None:
        """Records that a poll failed. unreachable: whether the core, or the way to it, is down."""
        if problem != self.problem:
            log.warning("a poll of the core failed", problem=problem)
        self.problem = problem
        if self._unreachable_since is None:
            self._unreachable_since = self.seen.status.at or time.time()
            what = "core unreachable" if unreachable else "no data from the core"
            self._add_event(self.core_now(), "unreachable", f"{what} since {time_of_day(self._unreachable_since)}")

    def _poll_succeeded(self, now: float) -> None:
        """Records the end of an outage. now: time on the core's clock."""
        if self._unreachable_since is not None:
            self._add_event(
                now, "reachable", f"core reachable again after {max(0.0, now - self._unreachable_since):.0f} s"
            )
            self._unreachable_since = None

    def core_now(self) -> float:
        """Returns the current time on the core's clock, or on this machine's clock before the core's first answer."""
        return self.seen.status.at + time.monotonic() - self.seen.at if self.seen.status.at else time.time()

    def time_axis(self, history: History[str]) -> dict[str, Any]:
        """Returns the fields of TimeAxis. An outage that has not ended is a gap up to now."""
        now = self.core_now()
        open_gaps = [(history.seen_at, now)] if (self.problem or self.rates.gap) and history.at else []
        return {"at": list(history.at), "gaps": history.gaps + open_gaps, "now": now}

    async def shared(self, ask: Callable[..., Awaitable[T]], *words: Any) -> T:  # noqa: ANN401 - the arguments of `ask`
        """Returns the core's answer to a call.

        Requests within a second share one answer, and at most CALLS run at a time.
        """
        now, key = time.monotonic(), (ask.__name__, *words)
        self._answers = {each: kept for each, kept in self._answers.items() if kept[0] > now - EVERY_S}
        if key not in self._answers:
            asked = asyncio.create_task(self._one_of_few(ask, *words))
            asked.add_done_callback(
                lambda ended: ended.cancelled() or ended.exception()
            )  # all requests that wait for this answer raise the error
            self._answers[key] = (now, asked)
        answer: T = await asyncio.shield(self._answers[key][1])
        return answer

    async def _one_of_few(self, ask: Callable[..., Awaitable[T]], *words: Any) -> T:  # noqa: ANN401
        async with self._few:
            return await ask(*words)

    def _take_events(self, reply: pb.ListEventsReply) -> None:
        for each in reply.events:
            kind = each.kind if each.kind in get_args(Kind) else "core"  # a newer core may send unknown kinds
            self._add_event(each.at, kind, each.text, each.learner)
            self._position = (reply.log, each.number)

    def _add_event(self, at: float, kind: str, text: str, learner: str = "") -> None:
        self._number += 1
        told = {"number": self._number, "at": at, "kind": kind, "learner": learner, "text": text}
        self.events.append(Event.model_validate(told))

    # ------------------------------------------------------------------------------ requests

    def now_json(self) -> str:
        """Returns the stream's next message as JSON. All pages share the message."""
        if self._told is None or self._told[0] is not self.seen or self._told[1] != self._second():
            now = Now(
                run=self.run(),
                regions=self.regions(),
                rounds=[conversion.round_of(each) for each in self.seen.rounds if each.outcome in conversion.GOES_ON],
                last_event=self._number,
            )
            self._told = (self.seen, self._second(), now.model_dump_json())
        return self._told[2]

    def _second(self) -> float:
        return time.monotonic() // EVERY_S

    def run(self) -> Run:
        """Returns the state of the run at the last poll, with the age of the core's answer."""
        status, now = self.seen.status, time.monotonic()
        rates = self.rates
        up, down = (self._whole_rate(way) for way in (UP, DOWN))
        return Run(
            reachable=not self.problem,
            problem=self.problem,
            age_s=min(now - self.seen.at, now - self._began),
            at=status.at,
            run=status.run,
            generation=status.generation,
            restored=conversion.restored(status),
            epoch=status.epoch,
            uptime_s=status.uptime_s,
            wall_s=status.wall_s,
            parameters=status.parameters,
            fragments=len(status.fragments),
            inner_steps=status.settings.inner_steps,
            overlap_steps=status.settings.overlap_steps,
            codec=conversion.codec(status.settings.codec),
            paused=status.paused,
            troubles=list(status.troubles),
            goodput=conversion.goodput(status.goodput, rates.recent()),
            tokens_trained=status.tokens_trained,
            tokens_merged=status.tokens_merged,
            total_tokens=status.settings.total_tokens,
            tokens_per_s=rates.sum_of_tokens_per_s(status.learners),
            loss=conversion.loss(status.learners),
            merges=status.merges,
            contributions=conversion.counts(status.contributions),
            datasets=list(map(conversion.units, status.datasets)),
            wire=conversion.wire(status.wire, up, down),
            cost=self._cost(),
            learners=conversion.states(status.learners),
            actions=not self.actions_problem(),
            actions_problem=self.actions_problem(),
            lost_window_s=rates.lost.span_s(),
            dashboard_s=now - self._began,
        )

    def actions_problem(self) -> str:
        """Returns why operator actions are not possible, or "" if they are possible with a token."""
        return "" if self.seen.status.accepts_tokens or self.seen.at == -math.inf else NO_TOKENS

    def _cost(self) -> Cost:
        """Returns the WAN cost. Rates cover the last hour, because contributions come in bursts."""
        wire, budget = self.seen.status.wire, self.seen.status.wan_budget_bytes
        price, rate = self.price_per_gb / 1e9, self.rates.long.rate("all")
        known_in_s = max(0.0, MIN_LONG_S - self.rates.long.span_s())
        return Cost(
            price_per_gb=self.price_per_gb,
            total=price * (wire.up + wire.down + wire.whole),
            per_day=price * 86400 * rate if not known_in_s else None,
            gb_per_month=MONTH_S * rate / 1e9 if not known_in_s else None,
            known_in_s=known_in_s,
            budget_gb=budget / 1e9 if budget else None,
        )

    def _regions(self) -> list[str]:
        status = self.seen.status
        fronts = {link.region for link in status.links if link.front}
        return sorted(fronts | {each.region for each in status.learners})

    def _whole_rate(self, way: str) -> float | None:
        """Returns the sum of the regions' rates, or None if one is unknown."""
        rates = [self._rate(region, way) for region in self._regions()]
        return None if None in rates else sum(each or 0.0 for each in rates)

    def _rate(self, region: str, way: str) -> float | None:
        """Returns the rate of the last minute, 0 if all links of the region are silent, or None if it is unknown."""
        links = self.seen.links.get(region, [])
        silent = bool(links) and all(each.state == LinkState.SILENT for each in links)
        return 0.0 if silent else self.rates.bytes_per_s(region, way)

    def regions(self) -> list[Region]:
        """Returns all regions. In each region, learners with problems come first."""
        members: defaultdict[str, list[pb.LearnerStatus]] = defaultdict(list)
        for each in self.seen.status.learners:
            members[each.region].append(each)
        return [self._region(name, members[name]) for name in self._regions()]

    def _region(self, name: str, members: list[pb.LearnerStatus]) -> Region:
        first = sorted(members, key=lambda each: (conversion.TROUBLE_FIRST[conversion.state(each)], each.learner))
        up, down = (sum(each.wire.up for each in members), sum(each.wire.down + each.wire.whole for each in members))
        provisioned = sum(each.goodput.provisioned_s for each in members)
        return Region(
            region=name,
            learners=conversion.states(members),
            dots=[conversion.dot(each, self.rates.lost_s(each.learner)) for each in first[: self._dots()]],
            links=[conversion.link(each) for each in self.seen.links.get(name, [])[:LINKS]],
            tokens_per_s=self.rates.sum_of_tokens_per_s(members),
            up_bytes=up,
            down_bytes=down,
            up_bytes_per_s=self._rate(name, UP),
            down_bytes_per_s=self._rate(name, DOWN),
            goodput=sum(each.goodput.useful_s for each in members) / provisioned if provisioned else 1.0,
            cost=self.price_per_gb / 1e9 * (up + down),
        )

    def _dots(self) -> int:
        """Returns the limit on the learners that the map shows per region. It is lower if there are many regions."""
        return DOTS if len(self._regions()) <= MANY_REGIONS else FEW_DOTS

    def learner(self, name: str) -> Learner | None:
        """Returns the learner with this name, or None."""
        found = next((each for each in self.seen.status.learners if each.learner == name), None)
        return None if found is None else conversion.learner(found, self.rates.tokens_per_s(found))

    def learners(self, region: str | None, state: str, search: str) -> list[Learner]:
        """Returns all learners that match.

        region: None matches any region; "" matches learners without one. state, search: "" matches any.
        """
        return [
            conversion.learner(each, self.rates.tokens_per_s(each))
            for each in self.seen.status.learners
            if (region is None or each.region == region)
            and (not state or each.state == state)
            and search.lower() in each.learner.lower()
        ]


def time_of_day(at: float) -> str:
    """Returns a time as text, in the time zone of the page and of `atoll status`."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S UTC")


async def explained(error: Exception, core: CoreClient) -> str:
    """Returns one line with the error and the fix for a failed call."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    if not is_unreachable(error):
        return f"the core at {core.address} refused the call: {error.details()}"
    if core_away(error):
        return f"the front at {core.address} answers, but {error.details()}"
    if fault := await core.tls_fault(error):
        return fault
    why = (error.details() or "").splitlines()[0][:200] if error.details() else error.code().name.lower()
    return f"no core answers at {core.address} ({why}): start the core, or check the network; learners keep training"
