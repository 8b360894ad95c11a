"""`atoll.Follower`: a PyTorch model that follows the published model of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from atoll_wire import forking
from atoll_wire.process.clock import SYSTEM
from atoll_wire.security.transport import TransportSecurity
from torch import nn

from atoll.errors import FollowerError
from atoll.follower.cuts import Cut
from atoll.follower.follow_session import Source
from atoll.follower.follow_thread import FollowThread
from atoll.follower.model_tensors import ModelTensors

NOT_ENTERED = "the Follower is not in a `with` block: use it as `with atoll.Follower(...) as follower`"
NO_FORKS = (
    "this process cannot fork while it follows a run: grpc was imported before atoll; import atoll first, or start the "
    f"process with {forking.SETTING}=0"
)


class Follower:
    """Keeps a PyTorch model at the published parameters of a run, for evaluation or inference.

    A follower only reads. It is not a learner, and it cannot slow the run down. Entering the `with` block waits up to
    `connect_timeout_s` seconds for the run's parameters, and then writes them into the model. A background thread
    fetches new versions. A call of `update` writes them into the model. The model then has the same values as an export
    at these versions (`atoll checkpoint export`), including frozen parameters and buffers.

    Args:
        model: A model with the run's parameters and buffers, on any device. Its tensors must be whole, not divided
            among ranks.
        server: HOST:PORT of a core or front, or several addresses, which are tried in turn.
        on_update: A function that is called with this follower after the model has changed. Only entering the block,
            `update` and `wait` call it, in their own thread. One call may follow several new versions.
        connect_timeout_s: Longest wait for the first parameters, in seconds.
        tls: Directory of a reader's certificate (`atoll certs issue reader NAME`). Without it, only loopback addresses
            are allowed.
        insecure_plaintext: Allow server addresses other than loopback without TLS.
        token: An operator's token, for a core with operator tokens and without TLS.

    Raises:
        FollowerError: If an argument is invalid, or if the model does not have the run's tensors.

    Example:
        ```python
        with atoll.Follower(model, server="127.0.0.1:7070") as follower:
            while True:
                serve(model)  # your evaluation or inference
                follower.update()  # applies new versions
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        server: str | Sequence[str],
        *,
        on_update: Callable[[Follower], None] | None = None,
        connect_timeout_s: float = 600.0,
        tls: str | Path | None = None,
        insecure_plaintext: bool = False,
        token: str = "",
    ) -> None:
        addresses = [server] if isinstance(server, str) else list(server)
        security = TransportSecurity(None if tls is None else Path(tls), insecure_plaintext)
        self._source = Source(addresses, connect_timeout_s, security, token)
        self._tensors = ModelTensors(model)
        self._on_update = on_update
        self._thread: FollowThread | None = None
        self._forks = forking.refused(FollowerError(NO_FORKS))

    def __enter__(self) -> Follower:
        """Waits for the run's parameters and writes them into the model. Raises FollowerError."""
        if self._thread is not None:
            raise FollowerError("a Follower can be entered only once: create a new Follower")
        self._thread = FollowThread(self._source, SYSTEM)
        self._forks.__enter__()
        try:
            self._thread.start()
            if not self.wait(timeout_s=self._source.connect_timeout_s):
                raise self._thread.timed_out("connect_timeout_s")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the connections. The model keeps its values."""
        self._end()

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.end()
        self._forks.__exit__(None, None, None)

    def update(self) -> bool:
        """Writes the newest versions that have arrived into the model. Does not wait for the network.

        Returns:
            Whether the model changed.

        Raises:
            FollowerError: If the block was not entered, or the follower failed permanently.

        Example:
            ```python
            if follower.update():
                print(follower.versions)
            ```
        """
        if self._thread is None:
            raise FollowerError(NOT_ENTERED)
        cut = self._thread.exchange.newest
        return cut is not None and self._apply(cut)

    def wait(self, version: int | None = None, timeout_s: float | None = None) -> bool:
        """Waits for a new version and writes it into the model.

        Args:
            version: The lowest version that every fragment must have. None waits for any new version.
            timeout_s: Longest wait, in seconds. None means no limit.

        Returns:
            Whether a version arrived in time.

        Raises:
            FollowerError: If the block was not entered, or the follower failed permanently.

        Example:
            ```python
            follower.wait(version=follower.versions[0] + 1, timeout_s=60.0)
            ```
        """
        if self._thread is None:
            raise FollowerError(NOT_ENTERED)
        cut = self._thread.exchange.wait(self._tensors.applied, timeout_s, version)
        if cut is None:
            return False
        self._apply(cut)
        return True

    def _apply(self, cut: Cut) -> bool:
        changed = self._tensors.apply(cut)
        if changed and self._on_update is not None:
            self._on_update(self)
        return changed

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment in the model. Empty before the block is entered."""
        return self._tensors.applied.versions if self._tensors.applied is not None else ()

    @property
    def run(self) -> str:
        """The id of the run. Empty before the block is entered."""
        return self._tensors.applied.run.run if self._tensors.applied is not None else ""

    @property
    def generation(self) -> int:
        """The run's generation, which grows when an operator restores a checkpoint. 0 before the block is entered."""
        return self._tensors.applied.run.generation if self._tensors.applied is not None else 0
