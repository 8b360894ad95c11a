"""One learner of `benchmarks.sync`: python -m benchmarks.sync_learner NAME ADDRESS SIZE SYNCS RESULT.json.

It trains nothing: whenever a fragment was adopted, noise of the size of some inner steps is added to it. What that
costs in processor time is not counted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from atoll import Learner
from atoll.reference.model import SIZES, Transformer
from atoll_wire.logs import configure

BREATH_S = 0.004  # an inner step, nearly


def resident_bytes() -> int:
    """Of this process, at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10


def main() -> None:
    """Counts from the moment when every fragment was merged once."""
    name, address, size, syncs, result = sys.argv[1:6]
    out, wanted = Path(result), int(syncs)
    configure("warning", json=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer(SIZES[size])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(int(name) + 1)
    noise = {p: torch.randn(p.shape) * 1e-3 for p in model.parameters()}
    before = resident_bytes()
    with Learner(model, optimizer, address, name) as learner:
        marks = Marks(learner, noise)
        while min(marks.versions) < 1:
            marks.step()
        began = marks.so_far()
        out.with_suffix(".begun").touch()
        while marks.so_far()["adopted"] < began["adopted"] + wanted * len(marks.versions):
            marks.step()
        ended = marks.so_far()
        out.with_suffix(".ended").touch()
        stats = {key: ended[key] - began[key] for key in began}
    parameters = sum(p.numel() for p in noise)
    out.write_text(json.dumps(stats | {"parameters": parameters, "added_bytes": resident_bytes() - before}))


class Marks:
    """Steps, with noise after each adoption."""

    def __init__(self, learner: Learner, noise: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        self._learner, self._noise = learner, noise
        self.versions = learner.stats().versions
        self._noise_s = 0.0
        for fragment in range(len(self.versions)):
            self._train(fragment)

    def step(self) -> None:
        """One."""
        self._learner.step(tokens=1)
        versions = self._learner.stats().versions
        for fragment, (old, new) in enumerate(zip(self.versions, versions, strict=True)):
            if old != new:
                self._train(fragment)
        self.versions = versions
        while self._learner.stats().pending > len(versions) // 2:
            time.sleep(BREATH_S)
        time.sleep(BREATH_S)

    def so_far(self) -> dict[str, float]:
        """Wall and processor seconds, bytes, and versions adopted of all fragments together."""
        stats = self._learner.stats()
        return {
            "wall_s": time.monotonic(), "cpu_s": time.process_time() - self._noise_s,
            "bytes": stats.bytes_up + stats.bytes_down, "adopted": sum(self.versions), "merged": stats.merged,
        }  # fmt: skip

    def _train(self, fragment: int) -> None:
        began = time.thread_time()
        with torch.no_grad():
            layout = self._learner._layout
            assert layout is not None, "joined"
            for parameter in self._learner._mine().of(layout.fragments[fragment]):
                parameter.add_(self._noise[parameter])
        self._noise_s += time.thread_time() - began


if __name__ == "__main__":
    main()
