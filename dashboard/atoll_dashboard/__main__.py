"""`python -m atoll_dashboard dashboard`, for images without the command `atoll`."""

import sys

import typer
from atoll_wire.errors import UserError

from atoll_dashboard import commands

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.callback()(lambda: None)  # without a callback, typer drops the name of a single subcommand
commands.register(app)
try:
    app(auto_envvar_prefix="ATOLL")
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(1) from None
