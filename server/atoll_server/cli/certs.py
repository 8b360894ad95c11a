"""Subcommands that make certificates: `atoll certs`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[
    Path, typer.Option("--dir", help="Where the authority and what it issued lie.", envvar="ATOLL_CERTS_DIR")
]


def register(app: typer.Typer) -> None:
    """Adds them."""
    certs = typer.Typer(no_args_is_help=True, help="Make and show certificates: who may be what in a run.")
    certs.command("init")(init_command)
    certs.command("issue")(issue_command)
    certs.command("show")(show_command)
    app.add_typer(certs, name="certs")


def init_command(directory: Folder = Path("certs")) -> None:
    """Make an authority. Its key, ca-key.pem, is for nobody else: whoever has it can be anybody."""
    from atoll_server.access.certificates import init

    print(f"{init(directory)}: the authority; issue certificates with `atoll certs issue`")


def issue_command(
    role: Annotated[str, typer.Argument(help="core, front, learner or operator.")],
    name: Annotated[str, typer.Argument(help="Unique; of a learner the one that it joins with, or eu.* for any that begins so.")],
    host: Annotated[list[str], typer.Option(help="A name or address by which a core or front is called; may be given several times.")] = [],  # noqa: B006 - typer copies it
    days: Annotated[float, typer.Option(help="How long it is valid.", min=0.001, max=3650.0)] = 365.0,
    directory: Folder = Path("certs"),
) -> None:  # fmt: skip
    """Make, or renew, the directory of certificates that a process is given as --tls."""
    from atoll_wire.certificate import Role, show

    from atoll_server.access.certificates import issue

    if not math.isfinite(days):
        raise typer.BadParameter(f"{days}: give a finite number", param_hint="--days")
    roles = {each.value: each for each in Role}
    if role not in roles:
        raise typer.BadParameter(f"{role}: use one of {', '.join(roles)}", param_hint="ROLE")
    out = issue(directory, roles[role], name, host, days)
    print(
        f"{out}: {role} {name}, valid until {show(out).ends:%Y-%m-%d %H:%M} UTC; give the process this directory as --tls"
    )


def show_command(path: Annotated[Path, typer.Argument(help="A certificate, or the directory of a process.")]) -> None:
    """Show what a certificate says."""
    from atoll_wire.certificate import show

    found = show(path)
    print(f"who          {found.identity}\nhosts        {' '.join(found.hosts) or 'none'}\nissuer       {found.issuer}")
    print(
        f"valid        {found.begins:%Y-%m-%d %H:%M} to {found.ends:%Y-%m-%d %H:%M} UTC, {found.days_left:.1f} days left"
    )
    print(f"fingerprint  {found.fingerprint}")
