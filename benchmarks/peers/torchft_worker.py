"""One replica of torchft's DiLoCo over gloo.

torchft_worker.py NUMBER HOST REPLICAS SIZE SYNCS LIGHTHOUSE RESULT.json

HOST: the host at which the other replicas reach this one. LIGHTHOUSE is a file: the first replica runs the lighthouse
and writes its address to it. Between two syncs, the replica adds noise as large as some inner steps, which is not
measured.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from atoll.reference.model import SIZES, Transformer
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

PATIENCE = timedelta(seconds=120)


def lighthouse_at(path: Path, number: int, host: str, replicas: int) -> tuple[LighthouseServer | None, str]:
    """Starts the lighthouse on the first replica. Other replicas wait for its address."""
    if number == 0:
        server = LighthouseServer(bind="[::]:0", min_replicas=replicas)
        part = path.with_suffix(".part")
        address = f"http://{host}:{server.address().rpartition(':')[2]}"
        part.write_text(address)
        part.rename(path)
        return server, address
    while not path.exists():
        time.sleep(0.05)
    return None, path.read_text()


def main() -> None:
    """Runs one replica. Writes the seconds and CPU seconds of each sync except the first."""
    number, host, replicas, size, syncs, place, result = sys.argv[1:8]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer(SIZES[size])
    torch.manual_seed(int(number) + 1)
    noise = [torch.randn(p.shape) * 1e-3 for p in model.parameters()]
    server, address = lighthouse_at(Path(place), int(number), host, int(replicas))
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        min_replica_size=int(replicas),
        use_async_quorum=False,
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        replica_id=f"replica{number}",
        store_addr=host,
        hostname=host,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
    )
    times = []
    with DiLoCo(manager, [model], inner, outer, sync_every=1):
        for _ in range(1 + int(syncs)):
            with torch.no_grad():
                for parameter, values in zip(model.parameters(), noise, strict=True):
                    parameter.add_(values)
            began, began_cpu = time.monotonic(), time.process_time()
            inner.step()  # DiLoCo's hook runs the sync here
            times.append((time.monotonic() - began, time.process_time() - began_cpu))
    assert manager.current_step() >= 1 + int(syncs), "every sync was committed"
    Path(result).write_text(json.dumps({"wall_s": [t[0] for t in times[1:]], "cpu_s": [t[1] for t in times[1:]]}))
    manager.shutdown(wait=False)
    if server is not None:
        server.shutdown()


if __name__ == "__main__":
    main()
