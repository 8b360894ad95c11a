"""This machine's loopback interface: its traffic, and the placement of a measured sync's processes on it.

`benchmarks.links.sites` places them behind emulated links instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeAlias

from atoll.demo.processes import Children


class Loopback:
    """All processes share this machine's loopback interface.

    listen: address on which cores listen, with port 0. core_options: further options of cores.
    """

    listen = "127.0.0.1:0"
    core_options: Sequence[str] = ()

    def at_core(self, words: Sequence[str]) -> list[str]:
        """Returns a command line that runs `words` where the cores run."""
        return list(words)

    def at_worker(self, number: int, words: Sequence[str]) -> list[str]:
        """Returns a command line that runs `words` where a learner, or a peer's worker, runs. number: from 0."""
        del number
        return list(words)

    def reached(self, number: int, address: str) -> str:
        """Returns the address at which a learner reaches a core. address: HOST:PORT on which the core listens."""
        del number
        return address

    def worker_host(self, number: int) -> str:
        """Returns the host at which other workers reach a worker."""
        del number
        return "localhost"

    def worker_device(self, number: int) -> str:
        """Returns the network interface of a worker."""
        del number
        return "lo"


Placed: TypeAlias = Callable[[Children, Path], AbstractContextManager[Loopback]]


def on_loopback(_: Children, __: Path) -> AbstractContextManager[Loopback]:
    """Returns a context manager that places all processes on loopback."""
    return nullcontext(Loopback())
