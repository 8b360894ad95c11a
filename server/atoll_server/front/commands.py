"""The subcommand that runs a front."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds it."""
    app.command()(front)


def front(
    core: Annotated[str, typer.Option(help="The core that calls are passed on to.", metavar="HOST:PORT")],
    listen: Annotated[list[str], typer.Option(help="May be given several times. Port 0: any free one.", metavar="HOST:PORT")] = ["127.0.0.1:7071"],  # noqa: B006 - typer copies it
    region: Annotated[str, typer.Option(help="Its name in metrics.")] = "",
    metrics_listen: Annotated[str | None, typer.Option(help="Serve Prometheus metrics there.", metavar="HOST:PORT")] = None,
    metrics_plaintext: Annotated[bool, typer.Option("--metrics-plaintext", help="Allow metrics beyond loopback: they are plain HTTP.")] = False,
    tls: Annotated[Path | None, typer.Option("--tls", help="Directory of certificates, see atoll certs.", envvar="ATOLL_TLS")] = None,
    insecure_plaintext: Annotated[bool, typer.Option("--insecure-plaintext", help="Allow an address beyond loopback without TLS.")] = False,
    audit_log: Annotated[Path | None, typer.Option(help="Write down who was refused, as JSON lines.")] = None,
    cache_mib: Annotated[int, typer.Option(help="Memory for updates and whole fragments; what does not fit is passed through.", min=1)] = 48,
    log_json: Annotated[bool, typer.Option("--log-json", help="One JSON object a line.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:  # fmt: skip
    """Run the gateway of a region: learners near it call it, and each update crosses the WAN once for all of them."""
    from atoll_wire.access import Access
    from atoll_wire.logs import configure

    from atoll_server.front.server import serve
    from atoll_server.front.settings import FrontSettings

    configure(log_level, json=log_json)
    settings = FrontSettings(
        listen=tuple(listen), core=core, region=region, metrics_listen=metrics_listen,
        access=Access(tls, insecure_plaintext), metrics_plaintext=metrics_plaintext, cache_bytes=cache_mib << 20,
        audit_log=audit_log,
    )  # fmt: skip
    asyncio.run(serve(settings, announce=lambda address: print(f"atoll front serves {address}", flush=True)))
