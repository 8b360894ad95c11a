"""One peer of hivemind's DiLoCo: hivemind_worker.py NUMBER PEERS SIZE SYNCS FOLDER.

The peers average pseudo-gradients with 8 bits. Each peer then takes the outer step itself, with one thread. A sync
includes the search for the group of peers.
A peer creates `NUMBER.ready.K` before sync K, begins when `go.K` exists, and writes the time of its end to `NUMBER.K`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from atoll.reference.model import SIZES, Transformer
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Uniform8BitQuantization

BREATH_S = 0.002
MAX_WAIT_S = 120.0


def await_mark(path: Path) -> None:
    """Waits until a file exists."""
    while not path.exists():
        time.sleep(BREATH_S)


def mark(path: Path, text: str = "") -> None:
    """Creates a file with `text` atomically, so that a reader sees all of it or none."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)


def noise_of(seed: int, shapes: list[torch.Size]) -> list[torch.Tensor]:
    """Returns noise as large as some inner steps, one tensor per shape."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=made) * 1e-3 for shape in shapes]


def joined(place: Path, number: int) -> DHT:
    """Joins the DHT. The first peer publishes its addresses in a file. place: the folder of the files."""
    at, known = place / "dht", list[str]()
    if number:
        await_mark(at)
        known = at.read_text().splitlines()
    dht = DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=known, start=True)
    if not number:
        mark(at, "\n".join(map(str, dht.get_visible_maddrs())))
    return dht


def main() -> None:
    """Runs one peer through all syncs. Sync 0 warms up, and checks that all peers were averaged."""
    number, peers, size, syncs, place = (int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], Path(sys.argv[5]))
    torch.set_num_threads(1)
    dht = joined(place, number)
    torch.manual_seed(0)
    model = Transformer(SIZES[size])
    parameters = list(model.parameters())
    noise = noise_of(number + 1, [p.shape for p in parameters])
    before = [p.detach().clone() for p in parameters]
    averager = DecentralizedAverager(
        [torch.zeros_like(p, requires_grad=False) for p in parameters],
        dht,
        start=True,
        prefix="outer",
        target_group_size=peers,
        min_group_size=peers,
        compression=Uniform8BitQuantization(),
    )
    outer = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
    for sync in range(int(syncs) + 1):
        with torch.no_grad():
            for parameter, change in zip(parameters, noise, strict=True):
                parameter.add_(change)
        mark(place / f"{number}.ready.{sync}")
        await_mark(place / f"go.{sync}")
        with torch.no_grad(), averager.get_tensors() as tensors:
            for tensor, parameter, old in zip(tensors, parameters, before, strict=True):
                torch.sub(old, parameter, out=tensor)
                parameter.copy_(old)
        group = averager.step(timeout=MAX_WAIT_S)
        assert len(group or ()) == peers, f"averaged with {group}"
        with averager.get_tensors() as tensors:
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.grad = tensor
            outer.step()
            largest = max(range(len(parameters)), key=lambda n: parameters[n].numel())
            found = tensors[largest].clone() if sync == 0 else None
        for parameter, old in zip(parameters, before, strict=True):
            old.copy_(parameter.detach())
        mark(place / f"{number}.{sync}", str(time.monotonic()))
        if found is not None:
            shapes = [p.shape for p in parameters]
            mean = -torch.stack([noise_of(seed + 1, shapes)[largest] for seed in range(peers)]).mean(0)
            assert (found - mean).norm() < 0.1 * mean.norm(), "hivemind's result is not the mean of all peers"
    await_mark(place / "leave")
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
