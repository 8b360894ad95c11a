"""Prints a run's status once, or refreshes it every second, for `atoll status`."""

from __future__ import annotations

import contextlib
import time

import grpc
from atoll_wire import outer_pb2 as pb
from atoll_wire.process.clock import SYSTEM
from google.protobuf.json_format import MessageToJson
from rich.console import Group, RenderableType
from rich.live import Live

from atoll_server.cli.operator_client import TIMEOUT_S, OperatorTarget, operator
from atoll_server.cli.tables import FEW, console, shown

EVERY_S = 1.0


def show_status(remote: OperatorTarget, *, as_json: bool) -> None:
    """Prints a run's state as tables, or as one JSON object."""
    with operator(remote) as stub:
        reply = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S)
    if as_json:
        print(MessageToJson(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
    else:
        console().print(shown(reply))


def watch_status(remote: OperatorTarget) -> None:
    """Shows a run's state as tables, refreshed every second, until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        _watch(remote)


def _watch(remote: OperatorTarget) -> None:
    """Refreshes the screen. While the core does not answer, shows the last status and its age."""
    with operator(remote) as stub, Live(console=console(), auto_refresh=False, screen=True) as live:
        reply, seen_at = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S), SYSTEM.monotonic()
        live.update(shown(reply, FEW), refresh=True)
        while True:
            time.sleep(EVERY_S)
            try:
                reply, seen_at = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S), SYSTEM.monotonic()
                picture: RenderableType = shown(reply, FEW)
            except grpc.RpcError as error:
                if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                    raise
                old_s = SYSTEM.monotonic() - seen_at
                warning = f"[bold red]the core does not answer: this status is {old_s:.0f} s old[/]"
                picture = Group(warning, shown(reply, FEW))
            live.update(picture, refresh=True)
