"""One learner of `benchmarks.data_plane.sync`.

python -m benchmarks.data_plane.sync_learner NAME ADDRESS SIZE SYNCS FOLDER

The learner does not train. Between two syncs, it adds noise to the parameters, as large as a few inner steps. It
creates `NAME.ready.K` before sync K. When it has adopted every fragment, it writes `NAME.K`, a line of JSON. The
line has the time, the bytes of the learner's payloads, and its number of merged contributions.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from atoll.agent import sending
from atoll.fragments.exchange import Submission
from atoll.learner import Learner
from atoll.reference.model import SIZES, ModelSize, Transformer
from atoll_wire.connections.link_speed import LinkSpeed
from atoll_wire.layout.layout import FrameRun
from atoll_wire.messages.frame_messages import EncodedFrame
from atoll_wire.process.logs import configure

ALL_SIZES = SIZES | {"500m": ModelSize(width=1536, layers=17, heads=16, context=512)}
BREATH_S = 0.02  # pause between two calls of step(): on a fast GPU, a step of this model takes about as long
_messages, coded_bytes = sending._messages, [0]  # coded_bytes: size of all payloads, each counted once


def _counted(
    speed: LinkSpeed, taken: Submission, run: FrameRun, *, compressed: bool
) -> tuple[dict[int, EncodedFrame], tuple[tuple[int, int], ...]]:
    messages, table = _messages(speed, taken, run, compressed=compressed)
    coded_bytes[0] += sum(length for length, _ in table)
    return messages, table


class Watched(Learner):
    """Counts adoptions, and contributions that the core has acknowledged."""

    @property
    def adoptions(self) -> int:
        """The number of adoptions so far."""
        assert self._boundary is not None, "the learner has joined"
        return sum(int(track.version) for track in self._boundary.local.tracks)  # `stats()` would take longer

    @property
    def acknowledged(self) -> int:
        """The number of contributions that the core has acknowledged so far."""
        return self._exchange.settled


def resident_bytes(which: str) -> int:
    """Returns this process's resident memory. which: "VmRSS" for the memory now, "VmHWM" for its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:")) << 10


def main() -> None:
    """Runs one learner through all syncs. Sync 0 warms up: ignore its figures."""
    name, address, size, syncs, folder = sys.argv[1:6]
    place = Path(folder)
    configure("warning", json=False)
    sending._messages = _counted
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer(ALL_SIZES[size])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(int(name) + 1)
    noise = [torch.randn(p.shape) * 1e-3 for p in model.parameters()]
    parameters, before = list(model.parameters()), resident_bytes("VmRSS")
    learner = Watched(model, optimizer, address, name, insecure_plaintext=True)
    with learner:
        for number in range(int(syncs) + 1):
            with torch.no_grad():
                for parameter, change in zip(parameters, noise, strict=True):
                    parameter.add_(change)
            old, old_bytes = learner.stats(), coded_bytes[0]
            (place / f"{name}.ready.{number}").touch()
            uploaded = 0.0
            adopted = learner.adoptions
            while learner.adoptions - adopted < len(
                old.versions
            ):  # one contribution of each fragment, as `benchmarks.data_plane.sync` checks
                learner.step(tokens=1)
                time.sleep(BREATH_S)
                if not uploaded and learner.acknowledged == len(old.versions) * (number + 1):
                    uploaded = time.monotonic()
                    (place / f"{name}.uploaded.{number}").touch()
            ended, new = time.monotonic(), learner.stats()
            found = {
                "ended": ended,
                "uploaded": uploaded,
                "payload_bytes": coded_bytes[0] - old_bytes,
                "merged": new.merged - old.merged,
                "parameters": sum(p.numel() for p in parameters),
                "added_bytes": resident_bytes("VmHWM") - before,
            }
            part = place / f"{name}.part"
            part.write_text(json.dumps(found))
            part.rename(place / f"{name}.{number}")
        while not (place / "leave").exists():
            learner.step(tokens=1)
            time.sleep(BREATH_S)


if __name__ == "__main__":
    main()
