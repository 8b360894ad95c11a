"""Keeps a shard's call to its registrar open.

While the registrar is unavailable, the shard keeps serving and retries.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog
from atoll_wire import shards_pb2 as sh
from atoll_wire import shards_pb2_grpc
from atoll_wire.connections.calls import LinkLost, open_stream, tolerate_ended_call
from atoll_wire.connections.link import KEEPALIVE_OPTIONS, is_atoll_status
from atoll_wire.errors import SettingsError
from atoll_wire.security.transport import TransportSecurity

from atoll_server.access.refusals import Refused
from atoll_server.processes.shard_core import ShardCore
from atoll_server.run.summaries import Summarising
from atoll_server.telemetry.events import event_message

log = structlog.get_logger()

SUMMARY_S = 1.0  # interval of a shard's summaries
CONFIRM_S = 0.1  # shortest time between two confirmations
SHORTEST_S, LONGEST_S = 0.2, 5.0  # shortest and longest wait between two attempts to attach, in seconds
FINAL = {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED}  # statuses that a retry cannot change

# Opens a connection to the registrar and yields its stub.
Dial: TypeAlias = Callable[[], contextlib.AbstractAsyncContextManager[Any]]


class RegistrarRefusedError(SettingsError):
    """The registrar refused this shard permanently. The message is one line with the fix."""


def dial(address: str, security: TransportSecurity) -> Dial:
    """Returns the function that connects to the registrar at HOST:PORT."""

    @contextlib.asynccontextmanager
    async def dialled() -> AsyncIterator[shards_pb2_grpc.RegistryStub]:
        async with security.dial(address, KEEPALIVE_OPTIONS) as channel:
            yield shards_pb2_grpc.RegistryStub(channel)

    return dialled


class Attachment:
    """Keeps a shard attached.

    registrar: HOST:PORT to show in the log. address: address at which learners reach this shard.
    """

    def __init__(self, core: ShardCore, registrar: str, address: str, connect: Dial) -> None:
        self._core = core
        self._registrar = registrar
        self._address = address
        self._connect = connect
        self._said_away = False
        self._applied = 0  # sequence number of the newest message of the call that was applied
        self._news = asyncio.Event()
        self._sending = asyncio.Lock()

    async def keep(self) -> None:
        """Keeps the shard attached until cancelled.

        Raises the same errors as `ShardCore.welcomed`. Raises RegistrarRefusedError if a shard without parameters is
        refused.
        """
        wait_s = SHORTEST_S
        while True:
            began = self._core.clock.monotonic()
            try:
                async with self._connect() as stub:
                    await self._attached(stub)
                why = "the registrar ended the call"
            except grpc.aio.AioRpcError as error:
                why = error.details() or error.code().name
                final = is_atoll_status(error) and error.code() in FINAL
                if final and self._core.run.shard is None:  # a shard that serves learners continues
                    raise RegistrarRefusedError(
                        f"the registrar at {self._registrar} refused this shard: {why}"
                    ) from error
            except (LinkLost, Refused) as error:
                why = str(error)
            finally:
                self._core.run.attached = False
            if not self._said_away:
                self._said_away = True
                log.warning(
                    "not attached to the registrar: known learners and rounds continue", registrar=self._registrar,
                    error=" ".join(why.split()),
                )  # fmt: skip
            if self._core.clock.monotonic() - began > LONGEST_S:
                wait_s = SHORTEST_S
            await asyncio.sleep(wait_s)
            wait_s = min(LONGEST_S, 2 * wait_s)

    async def _attached(self, stub: Any) -> None:  # noqa: ANN401
        """Serves one call until it ends."""
        core = self._core
        with open_stream("Attach", stub.Attach()) as call:
            await self._send(call, sh.FromShard(hello=core.hello(self._address)))
            tasks = [asyncio.create_task(self._confirm(call))]
            self._applied, self._news = 0, asyncio.Event()
            try:
                async for message in call:
                    match message.WhichOneof("what"):
                        case "welcome":
                            await core.welcomed(message.welcome)
                            core.run.attached = True
                            self._said_away = False
                            log.info("attached to the registrar", registrar=self._registrar, run=core.run.run_id)
                            tasks.append(asyncio.create_task(self._summarise(call)))
                        case "stage":
                            await self._stage(stub, call, message.stage)
                        case "begun":
                            if core.run.shard is None and core.staged != message.begun.stage.sha256:
                                await self._stage(stub, call, message.begun.stage)
                            await core.told(message)
                        case _:
                            await core.told(message)
                    self._applied = message.sequence
                    self._news.set()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, call: Any, message: sh.FromShard) -> None:  # noqa: ANN401
        """Sends a message after all earlier messages. gRPC allows only one write at a time."""
        async with self._sending:
            with tolerate_ended_call():
                await call.write(message)

    async def _confirm(self, call: Any) -> None:  # noqa: ANN401
        """Confirms the newest applied message, at most once per CONFIRM_S."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self._send(call, sh.FromShard(confirmed=sh.Confirmed(sequence=self._applied)))
            await asyncio.sleep(CONFIRM_S)

    async def _stage(self, stub: Any, call: Any, stage: sh.Stage) -> None:  # noqa: ANN401
        core = self._core
        if core.staged != stage.sha256:
            assert core.settings.shard is not None
            request = sh.FetchInitialRequest(shard=core.settings.shard.number, sha256=stage.sha256)
            with open_stream("FetchInitial", stub.FetchInitial(request)) as chunks:
                await core.stage(stage, aiter(chunks))
        await self._send(call, sh.FromShard(staged=sh.Staged(sha256=stage.sha256)))

    async def _summarise(self, call: Any) -> None:  # noqa: ANN401
        core = self._core
        summaries, told = Summarising(core.run), 0
        while True:
            now = core.clock.monotonic()
            core.events.tell_refused(now)
            await self._send(call, sh.FromShard(summary=summaries.next(core.troubles(), now)))
            for event in core.events.after(core.events.log, told):
                told = event.number
                await self._send(call, sh.FromShard(event=event_message(event)))
            await asyncio.sleep(SUMMARY_S)
