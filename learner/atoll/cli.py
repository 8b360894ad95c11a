"""The `atoll` command: its subcommands come from the installed Atoll packages.

Each package registers its subcommands under the entry-point group `atoll.commands`. A subcommand imports its heavy
dependencies only when it runs. The command prints errors that a user can fix as one line, and all other errors with a
traceback.
"""

from __future__ import annotations

from importlib.metadata import entry_points, version
from typing import Annotated

import typer
from atoll_wire.cli import application

app = application.application()


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"atoll {version('atoll')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, show_envvar=False, help="Show the version."),
    ] = False,
) -> None:
    """Train one model on many islands of compute that never wait for each other."""


def main() -> None:
    """Runs the command line."""
    for entry in sorted(entry_points(group="atoll.commands"), key=lambda entry: entry.name):
        entry.load()(app)
    application.run(app)


if __name__ == "__main__":
    main()
