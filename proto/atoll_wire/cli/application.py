"""Makes and runs the `atoll` application."""

from __future__ import annotations

import os
import sys

import typer

from atoll_wire.errors import UserError

# gRPC's own log is plain text, even with --log-json. Atoll logs each fault's cause and fix.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

NAMES = {"help_option_names": ["-h", "--help"]}


def application() -> typer.Typer:
    """Returns an application without subcommands. It has options that install shell completion."""
    return typer.Typer(
        no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich", context_settings=NAMES
    )


def run(app: typer.Typer) -> None:
    """Runs the command line and exits with a status from `errors.ExitStatus`.

    Prints one line for an error that the user can fix, and a traceback for any other error.
    """
    try:
        app(prog_name="atoll", auto_envvar_prefix="ATOLL")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from None
