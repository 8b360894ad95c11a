"""`atoll context`: adds, chooses and shows named connections to cores."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll_wire.cli import contexts
from atoll_wire.cli.contexts import CoreContext
from atoll_wire.cli.option_groups import output, takes
from atoll_wire.cli.output import Format, columns, pairs, show

Name = Annotated[str, typer.Argument(help="Name of the context.", autocompletion=contexts.complete)]


def register(app: typer.Typer) -> None:
    """Adds `atoll context` and its subcommands."""
    context = typer.Typer(
        no_args_is_help=True, help="Name the connections to your cores, and choose the one to use by default."
    )
    context.command("add")(add_command)
    context.command("use")(use_command)
    context.command("list")(list_command)
    context.command("show")(show_command)
    context.command("remove")(remove_command)
    app.add_typer(context, name="context")


def add_command(
    name: Annotated[str, typer.Argument(help="Name of the context. An earlier context with this name is replaced.")],
    server: Annotated[
        str, typer.Option(help="Address of a core or a front.", metavar="HOST:PORT", envvar="ATOLL_SERVER")
    ],
    tls: Annotated[
        Path | None, typer.Option("--tls", help="Directory of certificates (see atoll certs).", envvar="ATOLL_TLS")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File that holds the operator's token.", envvar="ATOLL_TOKEN_FILE")
    ] = None,
    insecure_plaintext: Annotated[
        bool, typer.Option("--insecure-plaintext", help="Allow an address beyond loopback without TLS.")
    ] = False,
) -> None:
    """Add or replace a context. The first context becomes the current one."""
    from atoll_wire.security.transport import check_address

    contexts.check_name(name)
    check_address(server)
    known = contexts.load()
    known.contexts[name] = CoreContext(server, _whole(tls), _whole(token_file), insecure_plaintext)
    known.current = known.current or name
    contexts.save(known)
    for path in (tls, token_file):
        if path is not None and not path.exists():
            print(f"warning: {path} does not exist, so commands with this context fail until it does", file=sys.stderr)
    print(
        f"added context {name}{' (current)' if known.current == name else f'; use it with `atoll context use {name}`'}"
    )


def use_command(name: Name) -> None:
    """Make a context the current one. Commands that call a core use it unless you name another core."""
    known = contexts.load()
    known.named(name)
    known.current = name
    contexts.save(known)
    print(f"the current context is {name}")


@takes(form=output)
def list_command(form: Format) -> None:
    """List all contexts."""
    known = contexts.load()
    found = [_as_data(name, each, known.current) for name, each in sorted(known.contexts.items())]
    names = ("current", "name", "server", "tls", "token_file", "insecure_plaintext")
    rows = [["*" if each["current"] else "", *(str(each[name] or "") for name in names[1:])] for each in found]
    show(found, form, lambda: columns(names, names[:4], form, rows))


@takes(form=output)
def show_command(
    form: Format,
    name: Annotated[
        str | None,
        typer.Argument(help="Name of the context. Default: the current one.", autocompletion=contexts.complete),
    ] = None,
) -> None:
    """Show a context."""
    known = contexts.load()
    name = name or known.current
    found = _as_data(name, known.named(name), known.current)
    show(found, form, lambda: pairs((key, str(each)) for key, each in found.items()))


def remove_command(name: Name) -> None:
    """Remove a context. The command does not remove the certificates or the token file."""
    known = contexts.load()
    known.named(name)
    del known.contexts[name]
    known.current = "" if known.current == name else known.current
    contexts.save(known)
    print(f"removed context {name}")


def _as_data(name: str, context: CoreContext, current: str) -> dict[str, Any]:
    return {
        "name": name,
        "current": name == current,
        "server": context.server,
        "tls": context.tls,
        "token_file": context.token_file,
        "insecure_plaintext": context.insecure_plaintext,
    }


def _whole(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
