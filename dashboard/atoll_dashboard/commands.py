"""The subcommand that runs a dashboard."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from atoll_wire.errors import need


def register(app: typer.Typer) -> None:
    """Adds it."""
    app.command()(dashboard)


def dashboard(
    server: Annotated[str, typer.Option(help="Address of a core, or of a front.", metavar="HOST:PORT")] = "127.0.0.1:7070",
    listen: Annotated[str, typer.Option(help="Where the page is. Port 0: any free one.", metavar="HOST:PORT")] = "127.0.0.1:7080",
    plaintext: Annotated[bool, typer.Option("--plaintext", help="Allow an address beyond loopback: the page is plain HTTP, and whoever reaches it may look.")] = False,
    host: Annotated[list[str], typer.Option(help="A name that the page may be asked for by, beside localhost and addresses; may be given several times.")] = [],  # noqa: B006 - typer copies it
    tls: Annotated[Path | None, typer.Option("--tls", help="Directory of an operator's certificate, see atoll certs.", envvar="ATOLL_TLS")] = None,
    insecure_plaintext: Annotated[bool, typer.Option("--insecure-plaintext", help="Allow a core beyond loopback without TLS.")] = False,
    token: Annotated[str, typer.Option(help="To look with, where the core asks for one; acts are done with the token that is typed into the page.", envvar="ATOLL_TOKEN")] = "",
    price_per_gb: Annotated[float, typer.Option(help="Of the WAN, in US dollars, for what is shown as its cost.", min=0)] = 0.09,
    log_json: Annotated[bool, typer.Option("--log-json", help="One JSON object a line.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:  # fmt: skip
    """Show a run on a page: regions, learners, rounds, receipts, cost; and pause, evict or take a checkpoint there."""
    need("dashboard", "dashboard", "fastapi", "uvicorn")
    from atoll_wire.access import Access
    from atoll_wire.logs import configure

    from atoll_dashboard.server import Settings, serve

    configure(log_level, json=log_json)
    settings = Settings(server, listen, plaintext, tuple(host), Access(tls, insecure_plaintext), token, price_per_gb)
    asyncio.run(serve(settings, announce=lambda address: print(f"atoll dashboard serves {address}", flush=True)))
