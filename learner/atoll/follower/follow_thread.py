"""The follower's thread: one event loop for the network, and worker threads for decoding."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import structlog
from atoll_wire.codec import frame_codec
from atoll_wire.codec.compiling import compiling_is_logged
from atoll_wire.errors import ExitStatus, UserError
from atoll_wire.process import logs
from atoll_wire.process.clock import Clock

from atoll.errors import FollowerError
from atoll.follower.cuts import CutExchange
from atoll.follower.follow_session import FollowSession, Source
from atoll.transfers.event_loop import ignore_known_grpc_errors, started_workers

log = structlog.get_logger()

ENDING_S = 5.0  # longest wait for the thread's end
ENDED = "the follower was closed: create a new Follower"


class FollowThread:
    """Runs a FollowSession. It can be started only once. exchange: passes cuts and the final error to other threads."""

    def __init__(self, source: Source, clock: Clock) -> None:
        self.exchange = CutExchange()
        self._source = source
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._ending = False

    def start(self) -> None:
        """Starts the thread. Raises FollowerError if the source is unusable."""
        self._source.check()
        logs.configure_unless()
        self._thread = threading.Thread(target=self._run, name="atoll follower", daemon=True)
        self._thread.start()

    def timed_out(self, option: str) -> FollowerError:
        """Returns the error for a first model that did not arrive in time. option: the name of the time limit."""
        address, timeout_s = self._source.addresses[0], self._source.connect_timeout_s
        text = f"no model arrived from {address} within {timeout_s:.0f} s"
        fix = self.exchange.cause or f"start a core and a learner, correct the server address, or raise {option}"
        return FollowerError(f"{text}: {fix}", ExitStatus.UNREACHABLE)

    def end(self) -> None:
        """Ends the thread and its connections."""
        self._ending = True
        self.exchange.end(FollowerError(ENDED))
        if self._loop is not None and self._main is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._main.cancel)
        if self._thread is not None:
            self._thread.join(ENDING_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except asyncio.CancelledError:
            if not self._ending:
                self._fail(RuntimeError("the follower's task was cancelled"))
        except Exception as error:
            self._fail(error)

    async def _live(self) -> None:
        self._main, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        self._loop.set_exception_handler(ignore_known_grpc_errors)
        self._loop.set_default_executor(started_workers())
        if self._ending:
            return
        with compiling_is_logged():
            await asyncio.to_thread(frame_codec.warm_up)
        await FollowSession(self._source, self.exchange, self._stop, self._clock).live()

    def _stop(self, error: Exception) -> None:
        """Ends the follower with an error from one of its tasks."""
        self._fail(error)
        if self._main is not None:
            self._main.cancel()

    def _fail(self, error: Exception) -> None:
        known = isinstance(error, UserError)
        text = str(error) if known else f"the follower failed ({error!r}): restart it and report this bug"
        self.exchange.end(error if isinstance(error, FollowerError) else FollowerError(text))
        log.error("the follower stopped", error=text, exc_info=None if known else error)
