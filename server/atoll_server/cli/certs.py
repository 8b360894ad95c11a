"""Issues and shows certificates for `atoll certs`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from atoll_wire.cli.option_groups import output, takes
from atoll_wire.cli.output import Format, pairs, show

Folder = Annotated[
    Path,
    typer.Option(
        "--dir",
        help="Directory of the certificate authority and the certificates that it issued.",
        envvar="ATOLL_CERTS_DIR",
    ),
]


def register(app: typer.Typer) -> None:
    """Adds `atoll certs` and its subcommands."""
    certs = typer.Typer(
        no_args_is_help=True,
        help="Create and show certificates, which give processes and operators their roles in a run.",
    )
    certs.command("init")(init_command)
    certs.command("issue")(issue_command)
    certs.command("show")(show_command)
    app.add_typer(certs, name="certs")


def init_command(directory: Folder = Path("certs")) -> None:
    """Create a certificate authority. Keep its key, ca-key.pem, secret: it can sign certificates for any name and role."""
    from atoll_server.access.certificate_authority import init

    print(f"wrote the certificate authority {init(directory)}; issue certificates with `atoll certs issue`")


def issue_command(
    role: Annotated[
        str, typer.Argument(help="Role of the process or person: core, front, learner, reader or operator.")
    ],
    name: Annotated[
        str,
        typer.Argument(
            help="Unique name. A learner joins under this name. A learner's name may end in *: eu-* covers all names that begin with eu-."
        ),
    ],
    host: Annotated[
        list[str], typer.Option(help="Host name or address of this core or front. You may repeat this option.")
    ] = [],  # noqa: B006 - typer copies it
    days: Annotated[float, typer.Option(help="Days until the certificate expires.", min=0.001, max=3650.0)] = 365.0,
    directory: Folder = Path("certs"),
) -> None:
    """Create or renew the certificate directory of a process. Give the process this directory as --tls."""
    from atoll_wire.security.certificate import Role, read_certificate

    from atoll_server.access.certificate_authority import issue

    if not math.isfinite(days):
        raise typer.BadParameter(f"{days} is not finite: give a finite number", param_hint="--days")
    roles = {each.value: each for each in Role}
    if role not in roles:
        raise typer.BadParameter(f"{role} is not a role: use one of {', '.join(roles)}", param_hint="ROLE")
    out = issue(directory, roles[role], name, host, days)
    print(
        f"wrote {out} ({role} {name}, valid until {read_certificate(out).ends:%Y-%m-%d %H:%M} UTC); give the process this directory as --tls"
    )


@takes(form=output)
def show_command(
    form: Format,
    path: Annotated[Path, typer.Argument(help="Certificate file, or certificate directory of a process.")],
) -> None:
    """Show a certificate's role, name, hosts and validity."""
    from atoll_wire.security.certificate import read_certificate

    cert = read_certificate(path)
    found = {
        "identity": cert.identity,
        "hosts": list(cert.hosts),
        "issuer": cert.issuer,
        "begins": cert.begins.timestamp(),
        "ends": cert.ends.timestamp(),
        "days_left": cert.days_left,
        "fingerprint": cert.fingerprint,
    }
    rows = [
        ("identity", cert.identity),
        ("hosts", " ".join(cert.hosts) or "none"),
        ("issuer", cert.issuer),
        ("valid", f"{cert.begins:%Y-%m-%d %H:%M} to {cert.ends:%Y-%m-%d %H:%M} UTC, {cert.days_left:.1f} days left"),
        ("fingerprint", cert.fingerprint),
    ]
    show(found, form, lambda: pairs(rows))
