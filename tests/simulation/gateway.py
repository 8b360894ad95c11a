"""A front's process in the simulation: the real servicer on the simulated network."""

from __future__ import annotations

import random

from atoll_server.access.audit_log import AuditLog
from atoll_server.front.answering import Answering
from atoll_server.front.metrics import FrontMetrics
from atoll_server.front.service import FrontService
from atoll_server.upstream.routes import Routes
from atoll_wire.security.transport import LOCAL

from tests.simulation.loop import Process
from tests.simulation.network import CORE, Network, SimulatedLink


class Gateway:
    """A front that serves at the address of its name until it is killed."""

    def __init__(self, network: Network, name: str, life: int, rng: random.Random) -> None:
        self.process = Process(f"{name}#{life}")
        self.name, self._network = name, network
        self._cache_bytes = rng.choice((600, 6_000, 1 << 20))  # no items fit; some fragments fit; all fit
        rng.choice((1, 64))  # unused; still drawn, so that seeds keep their meaning
        self.process.start(self._serve(), name=self.process.name)

    async def _serve(self) -> None:
        clock = self._network.loop.clock
        routes = Routes(CORE, LOCAL, clock, lambda address, *_: SimulatedLink(self._network, self.process, address))
        metrics = FrontMetrics(self.name)
        answering = Answering(routes, metrics, AuditLog(None, clock))
        service = FrontService(routes, metrics, self._cache_bytes, answering)
        self._network.servers[self.name] = (service, self.process)
        await routes.watch()
