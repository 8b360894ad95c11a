"""`python -m atoll_server`: the commands for cores, fronts and certificates, if `atoll` is not installed."""

import sys

import typer
from atoll_wire.errors import UserError

from atoll_server.cli import certs, commands
from atoll_server.front import commands as front_commands

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
commands.register(app)
front_commands.register(app)
certs.register(app)
try:
    app(auto_envvar_prefix="ATOLL")
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(1) from None
