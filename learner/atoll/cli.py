"""The `atoll` command: its subcommands come from the installed Atoll packages.

Each package registers its subcommands under the entry-point group `atoll.commands`. A subcommand imports its heavy
dependencies only when it runs. The command prints errors that a user can fix as one line, and others with a traceback.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, version
from typing import Annotated

import typer
from atoll_wire.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"atoll {version('atoll')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train one model on many islands of compute that never wait for each other."""


def main() -> None:
    """Runs the command line. Exit status: 0 for success, 1 for an error that the user can fix, 2 for wrong usage."""
    for entry in sorted(entry_points(group="atoll.commands"), key=lambda entry: entry.name):
        entry.load()(app)
    try:
        app(auto_envvar_prefix="ATOLL")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
