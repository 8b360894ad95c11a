"""The processes that `atoll chaos` runs: a core and reference learners, or the processes of a Procfile."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from atoll.chaos.schedule import CORE
from atoll.demo.processes import ATOLL, DemoError, free_port

NAMES = ("eu-west", "us-east", "ap-south", "us-west", "eu-north", "sa-east")
LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*):\s*(\S.*)")


@dataclass(frozen=True, slots=True)
class Deployment:
    """The processes of a deployment. commands: each process's command line, by name. address: the core's HOST:PORT."""

    address: str
    commands: dict[str, list[str]] = field(default_factory=dict)

    @property
    def learners(self) -> list[str]:
        """Names of all processes except the core."""
        return [name for name in self.commands if name != CORE]


def reference(
    directory: Path, learners: int, size: str, batch: int, total_tokens: int, seed: int, core_options: list[str]
) -> Deployment:
    """Returns a deployment with a core and with learners of equal speed, which train the reference model."""
    address = f"127.0.0.1:{free_port()}"
    core = ["core", "--dir", str(directory / "run"), "--listen", address, "--total-tokens", str(total_tokens)]
    commands = {CORE: [*ATOLL, *core, *core_options]}
    for number in range(learners):
        name = NAMES[number] if number < len(NAMES) else f"island-{number + 1}"
        commands[name] = [
            *(*ATOLL, "learner", "--server", address, "--name", name, "--region", name),
            *("--size", size, "--batch", str(batch), "--seed", str(seed), "--device", "cpu"),
        ]
    return Deployment(address, commands)


def procfile(path: Path, address: str) -> Deployment:
    """Returns the deployment of a Procfile, which has one `name: command` per line. The core must be named `core`. All
    other processes are learners. Raises DemoError if the file cannot be read or is invalid."""
    commands: dict[str, list[str]] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise DemoError(f"--procfile {path} cannot be read ({error.strerror}): give another path") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = LINE.fullmatch(line.strip())
        if found is None or found[1] in commands:
            raise DemoError(f"line {number} of {path} is not `name: command`, or repeats a name: correct this line")
        commands[found[1]] = shlex.split(found[2])
    if CORE not in commands or len(commands) < 2:
        raise DemoError(f"{path} lacks a core or a learner: add a line `core: ...` and a line for each learner")
    return Deployment(address, commands)
