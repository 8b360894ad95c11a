"""`python -m atoll_server`: the commands for cores, fronts and certificates, if `atoll` is not installed.

The images of the core and the front run this module.
"""

from atoll_wire.cli.application import application, run

from atoll_server.cli import certs, commands
from atoll_server.front import commands as front_commands

app = application()
commands.register(app)
commands.register_doctor(app)
front_commands.register(app)
certs.register(app)
run(app)
