"""Issues and shows certificates for `atoll certs`."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from atoll_wire.cli.option_groups import output, takes
from atoll_wire.cli.output import Format, columns, pairs, show

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
    certs.command("list")(list_command)
    app.add_typer(certs, name="certs")


def init_command(directory: Folder = Path("certs")) -> None:
    """Create a certificate authority.

    Keep its key, ca-key.pem, secret: the key can sign certificates for any name and role.
    """
    from atoll_server.access.certificate_authority import init

    print(f"wrote the certificate authority {init(directory)}; issue certificates with `atoll certs issue`")


def issue_command(
    role: Annotated[
        str, typer.Argument(help="Role of the process or person: core, front, learner, reader, viewer or operator.")
    ],
    name: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="Unique name. A learner joins under this name. A fleet of learners can share a certificate: give all names, or eu-* for all names that begin with eu-.",
        ),
    ],
    host: Annotated[
        list[str], typer.Option(help="Host name or address of this core or front. You may repeat this option.")
    ] = [],  # noqa: B006 - typer copies it
    days: Annotated[float, typer.Option(help="Days until the certificate expires.", min=0.001, max=3650.0)] = 365.0,
    directory: Folder = Path("certs"),
) -> None:
    """Create or renew the certificate directory of a process. Pass this directory to the process as --tls."""
    from atoll_wire.security.certificate import Role, brief, read_certificate

    from atoll_server.access.certificate_authority import issue

    if not math.isfinite(days):
        raise typer.BadParameter(f"{days} is not finite: give a finite number", param_hint="--days")
    roles = {each.value: each for each in Role}
    if role not in roles:
        raise typer.BadParameter(f"{role} is not a role: use one of {', '.join(roles)}", param_hint="ROLE")
    out = issue(directory, roles[role], name[0], host, days, name[1:])
    made = read_certificate(out)
    print(
        f"wrote {out} ({role} {brief(' '.join(name))}, valid until {made.ends:%Y-%m-%d %H:%M} UTC, serial number {made.serial}); give the process this directory as --tls"
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
        "serial": cert.serial,
        "fingerprint": cert.fingerprint,
    }
    left = f"{cert.days_left:.1f} days left" if cert.days_left > 0 else "expired"
    rows = [
        ("identity", cert.identity),
        ("hosts", " ".join(cert.hosts) or "none"),
        ("issuer", cert.issuer),
        ("valid", f"{cert.begins:%Y-%m-%d %H:%M} to {cert.ends:%Y-%m-%d %H:%M} UTC, {left}"),
        ("serial", cert.serial),
        ("fingerprint", cert.fingerprint),
    ]
    show(found, form, lambda: pairs(rows))


@takes(form=output)
def list_command(form: Format, directory: Folder = Path("certs")) -> None:
    """List the certificates that the authority has issued, oldest first. To revoke one, add its serial number to the --revoked file of the cores and fronts."""
    from atoll_wire.security.certificate import brief

    from atoll_server.access.certificate_authority import issued

    found = issued(directory)
    names = ("serial", "until", "identity", "fingerprint")
    rows = [
        (
            each["serial"],
            f"{datetime.fromtimestamp(each['ends'], UTC):%Y-%m-%d}",
            brief(each["identity"]),
            each["fingerprint"],
        )
        for each in found
    ]
    show(found, form, lambda: columns(names, names[:3], form, rows))
