"""The demo's core: one process, or a process for each shard (shard 0 has the registrar) and a front."""

from __future__ import annotations

from pathlib import Path

from atoll.demo.processes import Child, Children


class Cores:
    """The core processes of one run. shards: number of shards, with one process each. options: options of the
    registrar.

    all: the processes by shard. address: HOST:PORT of the core or registrar.
    """

    def __init__(self, group: Children, directory: Path, shards: int, options: list[str]) -> None:
        self._group = group
        self._directory = directory
        self.all: list[Child] = []
        self._addresses: list[str] = []
        for number in range(shards):
            shard = ["--shard", f"{number}/{shards}"] if shards > 1 else []
            mine = options if number == 0 else ["--registrar", self.address]
            name = "core" if shards == 1 else "registrar" if number == 0 else f"shard {number}"
            child = self._group.launch_core(name, self._place(number), "127.0.0.1:0", [*shard, *mine])
            self.all.append(child)
            self._addresses.append(self._group.serving(child))

    @property
    def address(self) -> str:
        return self._addresses[0]

    def _place(self, number: int) -> Path:
        return self._directory / ("run" if number == 0 else f"run-shard-{number}")

    def restart(self, number: int) -> None:
        """Kills a shard's process and starts it again at the same address. Returns when it serves."""
        child = self.all[number]
        child.kill()
        command = [word if word != "127.0.0.1:0" else self._addresses[number] for word in child.command]
        self.all[number] = self._group.start(child.name, command, piped=True)
        self._group.serving(self.all[number])

    def stop(self) -> None:
        """Stops all processes cleanly, the registrar last."""
        for child in reversed(self.all):
            self._group.stop(child)


class LocalFront:
    """A front on this machine. core: HOST:PORT of the registrar."""

    def __init__(self, group: Children, core: str) -> None:
        self._group = group
        self._core = core
        self.child, self.address = group.start_front("front", "127.0.0.1:0", core)

    def restart(self) -> None:
        """Kills the front, and starts another front at the same address."""
        self.child.kill()
        self.child, _ = self._group.start_front("front", self.address, self._core)
