"""`python -m atoll_server`: a core's subcommands where the learner's package, and so `atoll`, is not installed."""

import sys

import typer
from atoll_wire.errors import UserError

from atoll_server.commands import register

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
register(app)
try:
    app(auto_envvar_prefix="ATOLL")
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(1) from None
