"""Flower's FedAvg: flower_worker.py server ADDRESS CLIENTS PARAMETERS ROUNDS RESULT.json, or client ADDRESS SEED.

A client's training adds noise as large as some inner steps. A round lasts from sending the parameters to the merge, so
it includes one download and one upload per client.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.client import NumPyClient, start_client
from flwr.common import FitIns, FitRes, Parameters, Scalar, ndarrays_to_parameters
from flwr.server import ClientManager, ServerConfig, start_server
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg

from benchmarks.peers.sync_cost import CostSoFar

ARRAYS = 148  # as many as a transformer of 12 layers has
LONGEST_MESSAGE = 2**31 - 1


class Noisy(NumPyClient):  # type: ignore[misc]
    """A client that adds the same noise in each round, and reports how long that took."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._noise = list[Any]()

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        """Runs a round's training: adds noise to the parameters in place."""
        del config
        if not self._noise:
            self._noise = [self._random.standard_normal(p.shape, np.float32) * np.float32(1e-3) for p in parameters]
        began, began_cpu = time.monotonic(), time.thread_time()
        for values, change in zip(parameters, self._noise, strict=True):
            np.add(values, change, out=values)
        return parameters, 1, {"wall_s": time.monotonic() - began, "cpu_s": time.thread_time() - began_cpu}


class Timed(FedAvg):  # type: ignore[misc]
    """FedAvg that records the costs at each round's beginning and end, and the duration of the clients' training."""

    def __init__(self, clients: int, initial: Parameters) -> None:
        super().__init__(
            fraction_evaluate=0.0,
            min_fit_clients=clients,
            min_evaluate_clients=0,
            min_available_clients=clients,
            initial_parameters=initial,
        )
        self.began = list[CostSoFar]()
        self.training = list[tuple[float, float]]()
        self.ended: CostSoFar | None = None

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Records the beginning of a round."""
        self.began.append(CostSoFar.of(os.getppid()))
        chosen: list[tuple[ClientProxy, FitIns]] = super().configure_fit(server_round, parameters, client_manager)
        return chosen

    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientProxy, FitRes]], failures: list[BaseException]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Records the end of a round. Raises SystemExit if a client has not answered."""
        if failures or len(results) != self.min_fit_clients:
            raise SystemExit(f"{len(results)} of {self.min_fit_clients} clients answered: {failures[:1]}")
        told = [result.metrics for _, result in results]
        self.training.append((max(one["wall_s"] for one in told), sum(one["cpu_s"] for one in told)))
        merged: tuple[Parameters | None, dict[str, Scalar]] = super().aggregate_fit(server_round, results, failures)
        self.ended = CostSoFar.of(os.getppid())
        return merged


def serve(address: str, clients: int, parameters: int, rounds: int, result: Path) -> None:
    """Runs the server for all rounds, then writes the file that `flower_sync.measure` reads."""
    arrays = np.array_split(np.random.default_rng(0).standard_normal(parameters, np.float32), ARRAYS)
    strategy = Timed(clients, ndarrays_to_parameters(arrays))
    del arrays
    start_server(
        server_address=address,
        config=ServerConfig(num_rounds=rounds),
        strategy=strategy,
        grpc_max_message_length=LONGEST_MESSAGE,
    )
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    assert strategy.ended is not None, "there was a round"
    moments = [one.data() for one in (*strategy.began, strategy.ended)]
    told = {"moments": moments, "training": strategy.training}
    result.write_text(json.dumps(told | {"peak_bytes": int(peak.split()[1]) << 10}))


def main() -> None:
    """Runs the server or a client, as the command line says."""
    if sys.argv[1] == "server":
        address, clients, parameters, rounds, result = sys.argv[2:7]
        serve(address, int(clients), int(parameters), int(rounds), Path(result))
    else:
        client = Noisy(int(sys.argv[3])).to_client()
        options = {"insecure": True, "grpc_max_message_length": LONGEST_MESSAGE}
        start_client(server_address=sys.argv[2], client=client, **options)


if __name__ == "__main__":
    main()
