"""The registrar's gRPC service for fronts, which announce themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator

from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.security.certificate import Role

from atoll_server.access.identity import Caller, caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.processes.core import Core
from atoll_server.rpc.calls import Context, InterruptibleWaits, abort, discard_rest


class FrontService(rpc.FrontsServicer):
    """Records the reports of fronts."""

    def __init__(self, core: Core) -> None:
        self._run = core.run
        self._waits = InterruptibleWaits()

    def stop(self) -> None:
        """Ends all calls, so that fronts announce themselves to the next registrar process."""
        self._waits.end("the core is stopping: announce the front again")

    async def Announce(self, requests: AsyncIterator[pb.FrontReport], context: Context) -> AsyncIterator[pb.FrontReply]:
        """Answers each report immediately until the front leaves or either side ends the call."""
        links, now, wait = self._run.links, self._run.clock.monotonic, self._waits.begin()
        try:
            who = _front(context)
            report: pb.FrontReport | None = await wait.first(requests, "an Announce stream")
            assert report is not None, "`first` returns a message"
            front = links.announced(report, who.name, context.peer().rpartition(":")[0], now())
            while report is not None:
                links.heard(front, report, now())
                yield pb.FrontReply()
                report = await wait.next(requests)
        except Refused as refused:
            await abort(context, refused)
        finally:
            await discard_rest(requests)


def _front(context: Context) -> Caller:
    """Returns the caller. Raises Refused unless it has a front's certificate."""
    who = caller(context)
    if who.role not in {None, Role.FRONT}:
        text = f"only a front may make this call, not {who}: use a front's certificate"
        raise Refused(Status.PERMISSION_DENIED, text)
    return who
