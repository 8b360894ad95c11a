"""`python -m atoll_dashboard dashboard`, for images without the command `atoll`."""

from atoll_wire.cli.application import application, run

from atoll_dashboard import commands

app = application()
app.callback()(lambda: None)  # without a callback, typer drops the name of a single subcommand
commands.register(app)
run(app)
