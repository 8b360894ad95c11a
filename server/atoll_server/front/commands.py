"""The subcommand that runs a front."""

from __future__ import annotations

import asyncio

import typer
from atoll_wire.process import lazy_commands


def register(app: typer.Typer) -> None:
    """Adds `atoll front`."""
    text = "Run a front, the gateway of a region. Each update crosses the WAN once for all learners that use the front."
    lazy_commands.add(app, "front", text, _front)


def _front() -> lazy_commands.Command:
    from atoll_wire.process.settings import Logs, command

    from atoll_server.front.settings import FrontSettings

    def front(settings: FrontSettings, logs: Logs) -> None:
        from atoll_server.front.server import serve

        logs.begin()
        asyncio.run(serve(settings, announce=lambda address: print(f"atoll front listens on {address}", flush=True)))

    return command(front, FrontSettings, Logs)
