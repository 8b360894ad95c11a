"""Implements `atoll status`, which prints a run's status once or refreshes it every second."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from atoll_wire import outer_pb2 as pb
from atoll_wire.cli.output import Format, as_data, console, show
from atoll_wire.process.clock import SYSTEM
from rich.console import Group
from rich.live import Live

from atoll_server.cli.operator_client import TIMEOUT_S, CoreUnreachableError, OperatorTarget, operator
from atoll_server.cli.tables import FEW, shown

EVERY_S = 1.0
REFRESH_S = 1.5  # timeout of all calls except the first, which bounds the time until the screen shows an outage's end


def show_status(remote: OperatorTarget, form: Format) -> None:
    """Prints a run's state once."""
    with operator(remote) as stub:
        reply = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S)
    show(as_data(reply), form, lambda: shown(reply, form))


def watch_status(remote: OperatorTarget, form: Format) -> None:
    """Shows a run's state every second until Ctrl-C: on the whole screen, or as one line of JSON.

    Without a terminal, prints one table after another. While the core does not answer, the screen shows the last status
    and its age, a warning without a table is printed, and no line of JSON is.
    """
    with contextlib.suppress(KeyboardInterrupt):
        if form.is_json:
            for seen in _statuses(remote):
                if not seen.age_s:
                    show(as_data(seen.reply), form, lambda: "")
            return
        screen = console()
        if not screen.is_terminal:
            for seen in _statuses(remote):
                screen.print(*(_warning(seen) if seen.age_s else [shown(seen.reply, form)]), end="\n\n")
            return
        with Live(console=screen, auto_refresh=False, screen=True) as live:
            for seen in _statuses(remote):
                live.update(Group(*_warning(seen), shown(seen.reply, form, FEW)), refresh=True)


@dataclass(frozen=True, slots=True)
class Seen:
    """The newest status of a run. age_s: seconds since its arrival; 0 if the core answers."""

    reply: pb.StatusReply
    age_s: float = 0.0


def _warning(seen: Seen) -> Iterator[str]:
    if seen.age_s:
        since = datetime.fromtimestamp(seen.reply.at, UTC).strftime("%H:%M:%S UTC")
        yield f"[bold red]core unreachable since {since}: this status is {seen.age_s:.0f} s old[/]"


def _statuses(remote: OperatorTarget) -> Iterator[Seen]:
    """Yields the status once per second. If the core is unreachable, only the first call raises CoreUnreachableError.

    Later calls yield the last status. Each attempt after an outage uses a new connection, since gRPC waits longer and
    longer before it reconnects an old one. An attempt that takes longer than EVERY_S is repeated at once.
    """
    reply, seen_at = pb.StatusReply(), SYSTEM.monotonic()
    while True:
        began = SYSTEM.monotonic()
        try:
            with operator(remote) as stub:
                while True:
                    began = SYSTEM.monotonic()
                    reply = stub.Status(pb.StatusRequest(), timeout=REFRESH_S if reply.run else TIMEOUT_S)
                    seen_at = SYSTEM.monotonic()
                    yield Seen(reply)
                    time.sleep(EVERY_S)
        except CoreUnreachableError:
            if not reply.run:
                raise
            yield Seen(reply, SYSTEM.monotonic() - seen_at)
            time.sleep(max(0.0, began + EVERY_S - SYSTEM.monotonic()))
