"""The subcommand that runs a dashboard."""

from __future__ import annotations

import asyncio

import typer
from atoll_wire.errors import need
from atoll_wire.process import lazy_commands


def register(app: typer.Typer) -> None:
    """Adds `atoll dashboard`."""
    text = "Serve a web page with regions, learners, rounds, receipts and cost, and with operator actions."
    lazy_commands.add(app, "dashboard", text, _dashboard)


def _dashboard() -> lazy_commands.Command:
    from atoll_wire.process.settings import Logs, command

    from atoll_dashboard.settings import DashboardSettings

    def dashboard(settings: DashboardSettings, logs: Logs) -> None:
        need("dashboard", "dashboard", "fastapi", "markdown_it", "uvicorn")
        from atoll_dashboard.web.server import serve

        logs.begin()
        asyncio.run(
            serve(settings, announce=lambda address: print(f"atoll dashboard listens on {address}", flush=True))
        )

    return command(dashboard, DashboardSettings, Logs)
