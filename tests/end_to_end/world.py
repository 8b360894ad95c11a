"""A real core as a process, and learners in threads of the test, for most end-to-end tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import atoll
import torch
from atoll.demo.processes import Child, Children, children, free_port
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.security.transport import TransportSecurity
from torch import nn

from benchmarks.process_state import Metrics, metrics

torch.set_num_threads(1)


class Core:
    """One core process, which can be killed and started again on the same port."""

    def __init__(
        self, group: Children, directory: Path, options: list[str], name: str = "core", address: str = "127.0.0.1:0"
    ) -> None:
        self.group, self.directory, self._options, self._name = group, directory, options, name
        self.security = TransportSecurity()
        self.address = address
        self.child: Child
        self.start()

    def kill(self) -> None:
        self.child.kill()

    def stop(self) -> None:
        self.group.stop(self.child)

    def start(self) -> None:
        self.launch()
        self.address = self.group.serving(self.child)

    def launch(self) -> None:
        """Starts the process, but does not wait until it serves."""
        self.child = self.group.launch_core(self._name, self.directory, self.address, self._options)

    def log(self) -> str:
        return self.child.log.read_text()

    def status(self) -> pb.StatusReply:
        with self.operator() as stub:
            return stub.Status(pb.StatusRequest(), timeout=20, wait_for_ready=True)

    @contextlib.contextmanager
    def operator(self) -> Iterator[rpc.OperatorStub]:
        with self.security.dial_and_wait(self.address) as channel:
            yield rpc.OperatorStub(channel)

    @contextlib.contextmanager
    def outer(self) -> Iterator[rpc.OuterStub]:
        with self.security.dial_and_wait(self.address) as channel:
            yield rpc.OuterStub(channel)


class Front:
    """One front process, which calls a core."""

    def __init__(self, group: Children, name: str, core: str, options: list[str]) -> None:
        self.group, self.metrics_port = group, free_port()
        options += ["--metrics-listen", f"127.0.0.1:{self.metrics_port}"]
        self._name, self._core, self._options = name, core, options
        self.address = "127.0.0.1:0"
        self.start()

    def kill(self) -> None:
        self.child.kill()

    def start(self) -> None:
        self.child, self.address = self.group.start_front(self._name, self.address, self._core, self._options)

    def stop(self) -> None:
        self.group.stop(self.child)

    def metrics(self) -> Metrics:
        return metrics(self.metrics_port)

    def wan_bytes(self, direction: str, kind: str) -> float:
        """Returns the payload bytes of one kind between this front and its core."""
        return self.metrics().total("atoll_front_wan_bytes_total", direction=direction, kind=kind)


def open_calls(read: Metrics, side: str) -> dict[str, float]:
    """Returns the numbers of long-lived open calls by method. Other calls are short."""
    return {name: read.total("atoll_open_calls", method=name, side=side) for name in ("Follow", "Report")}


@contextlib.contextmanager
def front(directory: Path, core: str, *options: str, name: str = "front") -> Iterator[Front]:
    """Context manager for a front, which ends with the block."""
    with children(directory) as group:
        yield Front(group, name, core, list(options))


@contextlib.contextmanager
def core(directory: Path, *options: str) -> Iterator[Core]:
    """Context manager for a core, which ends with the block. By default, the run has two fragments and H = 4."""
    chosen = list(options)
    for name, value in (("--fragments", "2"), ("--inner-steps", "4")):
        if name not in chosen:
            chosen += [name, value]
    with children(directory) as group:
        yield Core(group, directory / "run", chosen)


def small_model(seed: int = 0) -> nn.Module:
    """Predicts (7 x + 3) mod 32 from x."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 32))


class Placed(nn.Module):
    """`small_model` on a device, with inputs and outputs on the CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.model = small_model().to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.model(x.to(self._device)).cpu()
        return y


def task(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 32, (32,), generator=generator)
    return x, (x * 7 + 3) % 32


class Trainee(threading.Thread):
    """A learner in a thread.

    until: called after each step; the thread ends when it returns True. `done` joins the thread and raises its error.
    """

    def __init__(
        self, address: str, name: str, until: Callable[[Trainee], bool], *, model: nn.Module | None = None,
        pace_s: float = 0.01, **options: object,
    ) -> None:  # fmt: skip
        super().__init__(name=name, daemon=True)
        self.model = model if model is not None else small_model()
        self._address, self._until, self._pace_s, self._options = address, until, pace_s, options
        self.learner: atoll.Learner
        self.losses: list[float] = []
        self.longest_step_s = 0.0
        self.error: BaseException | None = None
        self._breath = threading.Event()  # never set; the loop waits on it between steps

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.error = error

    def _train(self) -> None:
        import time

        generator = torch.Generator().manual_seed(sum(self.name.encode()))
        optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3)
        settings = {"connect_timeout_s": 30.0, "drain_s": 10.0} | self._options
        with atoll.Learner(self.model, optimizer, server=self._address, name=self.name, **settings) as self.learner:
            while not self._until(self):
                x, y = task(generator)
                loss = nn.functional.cross_entropy(self.model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.losses.append(loss.item())
                self._breath.wait(self._pace_s)
                began = time.perf_counter()
                self.learner.step(tokens=32, loss=self.losses[-1])
                self.longest_step_s = max(self.longest_step_s, time.perf_counter() - began)

    def done(self, timeout_s: float = 60.0) -> Trainee:
        self.join(timeout_s)
        stats = self.learner.stats() if hasattr(self, "learner") else "it has not joined"
        assert not self.is_alive(), f"learner {self.name} still runs: {stats}"
        if self.error is not None:
            raise self.error
        return self


def train(address: str, *names: str, steps: int = 120, **options: object) -> list[Trainee]:
    """Trains learners in parallel, each for `steps` steps. All must end without an error."""
    trainees = [Trainee(address, name, lambda t: len(t.losses) >= steps, **options) for name in names]
    for trainee in trainees:
        trainee.start()
    return [trainee.done() for trainee in trainees]


def eventually(found: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Polls until `found` returns True. Raises AssertionError after `timeout_s`."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.05)):
        if found():
            return
        pause.wait(0.05)
    raise AssertionError(f"the condition did not hold within {timeout_s} s")


class Sharded:
    """The processes of a run with several shards: a registrar with shard 0, and other shards."""

    def __init__(
        self, group: Children, directory: Path, count: int, options: list[str], common: list[str], *, alone: bool
    ) -> None:
        """alone: whether the registrar has no fragments. common: options of the registrar and the shards."""
        first = ["--registrar-only"] if alone else ["--shard", f"0/{count}"]
        self.registrar = Core(group, directory / "registrar", [*first, *options, *common], "registrar")
        numbers = range(0 if alone else 1, count)
        self.shards = {
            number: Core(
                group,
                directory / f"shard{number}",
                ["--shard", f"{number}/{count}", "--registrar", self.registrar.address, *common],
                f"shard{number}",
            )
            for number in numbers
        }

    @property
    def address(self) -> str:
        return self.registrar.address

    def status(self) -> pb.StatusReply:
        return self.registrar.status()


@contextlib.contextmanager
def sharded(
    directory: Path, count: int, *options: str, alone: bool = False, common: Sequence[str] = ()
) -> Iterator[Sharded]:
    """Context manager for a run over several shards. By default, the run has four fragments and H = 4.

    options: of the registrar. common: of the registrar and the shards.
    """
    chosen = list(options)
    for name, value in (("--fragments", "4"), ("--inner-steps", "4")):
        if name not in chosen:
            chosen += [name, value]
    with children(directory) as group:
        yield Sharded(group, directory, count, chosen, list(common), alone=alone)
