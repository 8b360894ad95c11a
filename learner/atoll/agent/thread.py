"""The agent's thread: one event loop for the network, and worker threads for slow work.

The training thread starts the agent, submits pseudo-gradients to it, and ends it. All other data goes through the
ThreadExchange.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.compiling import compiling_is_logged
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import Layout
from atoll_wire.process import allocator, logs
from atoll_wire.process.clock import Clock

from atoll.agent.join_request import Identity, ModelDescription
from atoll.agent.member_session import MemberSession
from atoll.agent.run_session import RunSession
from atoll.errors import LearnerError
from atoll.fragments import segments
from atoll.fragments.exchange import Submission, ThreadExchange
from atoll.fragments.segments import Coder
from atoll.ranks.messages import RankMessages
from atoll.stats import Counters
from atoll.transfers.call_errors import GOODBYE_S
from atoll.transfers.event_loop import Doorbell, ignore_known_grpc_errors, started_workers

log = structlog.get_logger()

ENDING_S = 1.0  # the main thread ends at most this many seconds after the interpreter closes its thread pools


class Agent:
    """A learner's agent. It can be started only once. failure: the error that stopped the agent, or None."""

    def __init__(
        self,
        identity: Identity,
        model: ModelDescription,
        exchange: ThreadExchange,
        counters: Counters,
        clock: Clock,
        messages: RankMessages | None = None,
        coder: Coder = segments,
    ) -> None:
        """messages: the connection to the other ranks of this learner, or None if there are none.

        coder: computes the changes to the parameters.
        """
        self._clock = clock
        self._messages = messages
        self._identity = identity
        self._model = model
        self._exchange = exchange
        self._counters = counters
        self._coder = coder
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._session: RunSession | None = None
        self._bell: Doorbell | None = None
        self._goodbye: asyncio.Task[None] | None = None
        self._leaving = False
        self._ready: Future[Layout] = Future()
        self.failure: LearnerError | None = None
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------ called by the training thread

    def start(self) -> None:
        """Starts the thread, which joins the run."""
        logs.configure_unless()
        self._thread = threading.Thread(target=self._run, name=f"atoll {self._identity.name}", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> bool | LearnerError:
        """Waits at most timeout_s seconds for the first anchors. Returns whether they arrived, or the agent's error."""
        wait((self._ready,), timeout_s)
        return self.failure or self._ready.done()

    @property
    def layout(self) -> Layout:
        """The run's layout. Available after `wait_ready`."""
        return self._ready.result(0.0)

    @property
    def run_codec(self) -> Codec:
        """The codec of contributions and updates. Available after `wait_ready`."""
        assert self._session is not None, "call wait_ready first"
        return Codec(self._session.core.settings.codec)

    @property
    def run(self) -> tuple[str, int]:
        """The run's id and generation. Available after `wait_ready`."""
        assert self._session is not None, "call wait_ready first"
        session = self._session.core.session
        return session.run, session.generation

    @property
    def began_run(self) -> bool:
        """Whether the run began with this learner's parameters. Available after `wait_ready`."""
        assert self._session is not None, "call wait_ready first"
        return self._session.began_run

    def submit(self, taken: Submission) -> None:
        """Passes a pseudo-gradient to the agent, which sends it. Idempotent."""
        assert self._session is not None, "call wait_ready first"
        self._exchange.submitted(taken)
        session, bell = self._session, self._bell
        if bell is not None:
            bell.call(lambda: session.submit(taken))

    def lease_units(
        self, request: Callable[[], pb.LeaseUnitsRequest], after_s: float
    ) -> Future[tuple[pb.LeaseUnitsReply, int]]:
        """Asks for units of a dataset (see `unit_leasing`). The future is cancelled if the agent ends first."""
        assert self._session is not None and self._loop is not None, "call wait_ready first"  # noqa: PT018
        return asyncio.run_coroutine_threadsafe(self._session.lease_units(request, after_s), self._loop)

    def leave(self) -> None:
        """Leaves the run if the core is connected, then ends the thread. This also works before joining."""
        self._leaving = True
        if self._loop is not None and self.failure is None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._say_goodbye)
        if self._thread is not None:
            self._thread.join(GOODBYE_S)
        if self._messages is not None:
            self._messages.end()

    # ------------------------------------------------------------------------------ the loop's side

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except asyncio.CancelledError:
            if not self._leaving and self.failure is None:  # an unexpected cancellation
                self._fail(RuntimeError("the agent's task was cancelled"))
        except Exception as error:
            self._fail(error)

    async def _live(self) -> None:
        self._main, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        self._loop.set_exception_handler(ignore_known_grpc_errors)
        self._loop.set_default_executor(started_workers())
        if self._leaving:
            return
        with compiling_is_logged():
            await asyncio.to_thread(frame_codec.warm_up)
            await asyncio.to_thread(segments.warm_up)
        await asyncio.to_thread(allocator.drop_library_pages, "libllvmlite")  # 65 MB of the compiler
        parts = (self._identity, self._model, self._exchange, self._counters, self._ready.set_result, self._stop)
        leads = self._messages is None or self._messages.rank == 0
        self._session = (RunSession if leads else MemberSession)(
            *parts, self._clock, messages=self._messages, coder=self._coder
        )
        self._bell = Doorbell(self._loop)
        try:
            await self._session.live()
        except Exception as error:  # recorded before the loop closes, because closing makes other tasks fail
            self._fail(error)
        finally:
            self._bell.close()

    def _stop(self, error: Exception) -> None:
        """Ends the learner with an error that a part of the agent raised. Later errors change nothing."""
        if self.failure is not None:
            return  # another cancellation would interrupt the end of the session
        self._fail(error)
        if self._main is not None:
            self._main.cancel()

    def _fail(self, error: Exception) -> None:
        known = isinstance(error, LearnerError)
        if self.failure is not None or (not known and _interpreter_ends()):
            return
        text = (
            str(error) if known else f"the learner's agent failed ({error!r}): restart the learner and report this bug"
        )
        self.failure = LearnerError(text, error.exit_status if isinstance(error, LearnerError) else None)
        self._exchange.end()
        self._counters.last_error = text
        if not self._ready.done():
            self._ready.set_exception(self.failure)
        log.error("the learner stopped", learner=self._identity.name, error=text, exc_info=None if known else error)

    def _say_goodbye(self) -> None:
        async def leave_and_end() -> None:
            try:
                if self._session is not None:
                    await self._session.say_goodbye()
            finally:
                if self._main is not None:
                    self._main.cancel()

        self._goodbye = asyncio.get_running_loop().create_task(leave_and_end())


def _interpreter_ends() -> bool:
    """Returns whether the interpreter is ending.

    At that time, thread pools fail, and the original error must remain the last output.
    """
    main = threading.main_thread()
    main.join(ENDING_S)
    return not main.is_alive()
