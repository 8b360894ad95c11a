"""The session of a rank other than 0: transfers this rank's frames and receives all other information from rank 0."""

from __future__ import annotations

import asyncio

from atoll_wire import ranks_pb2 as rk
from atoll_wire.process.tasks import first_ended

from atoll.agent.coordination import Coordination, Following, receive_on_loop, rows_of
from atoll.agent.run_session import RunSession
from atoll.ranks.messages import RankMessages

TOLD_S = 0.5  # seconds between two reports to rank 0


class MemberSession(RunSession):
    """The run session on a rank other than 0. Its calls carry rank 0's session, and it follows no shard."""

    def _coordinated(self, messages: RankMessages | None) -> Coordination:
        assert messages is not None, "a member has other ranks"
        self._inbox: asyncio.Queue[rk.RankMessage] = asyncio.Queue()
        self._following = Following(messages, self.core)
        receive_on_loop(messages, self._inbox.put_nowait, self._stop)
        return self._following

    async def live(self) -> None:
        """Transfers frames until cancelled."""
        works = [asyncio.ensure_future(work) for work in (self._handle_messages(), self._report())]
        try:
            await first_ended(works)
        finally:
            self.core.leaving = True
            for task in works:
                task.cancel()
            await self._close()

    async def say_goodbye(self) -> None:
        """Does nothing, because rank 0 leaves the run for all ranks."""

    async def _handle_messages(self) -> None:
        while True:
            await self._handle(await self._inbox.get())

    async def _handle(self, message: rk.RankMessage) -> None:
        match message.WhichOneof("what"):
            case "joined":
                addresses = [link.address for link in self._links]
                self.core.link = self._links[addresses.index(message.joined.address)]
                await self._joined(message.joined.reply)
                for track in self.core.tracks.values():
                    track.restores = message.joined.restores
                if not self._entered:
                    self._entered = True
                    assert self.core.layout is not None, "joined"
                    self._on_ready(self.core.layout)
            case "announced":
                self._announced(message.announced)
            case "opened":
                self._fetcher.opened(self.core.track(message.opened.fragment))
            case "table":
                self._following.tables.found(message.table.fragment, message.table.seq, rows_of(message.table))
            case "ended":
                ended = message.ended
                self._sender.ended_elsewhere(self.core.track(ended.fragment), ended.seq, drop=ended.drop)
            case "confirmed":
                self._confirmed(message.confirmed)
            case "refetch":
                track = self.core.track(message.refetch.fragment)
                track.whole = True
                self._fetcher.begin(track)

    def _announced(self, told: rk.Announced) -> None:
        track = self.core.track(told.fragment)
        if told.setbacks > track.setbacks:  # the shard was restored and has reached this version again
            track.setbacks = told.setbacks
            track.whole |= told.version < track.version
            track.target = told.version
        track.skipped_to = max(track.skipped_to, told.skipped_to)
        track.target = max(track.target, told.version)
        self._fetcher.begin(track)

    def _confirmed(self, told: rk.Confirmed) -> None:
        chosen = (told.chosen.version, told.chosen.checksum) if told.HasField("chosen") else None
        self._exchange.supersede(told.fragment, (told.newest.version, told.newest.checksum), chosen)
        self._fetcher.begin(self.core.track(told.fragment))

    async def _report(self) -> None:
        """Reports the transferred bytes, and any session that the core does not know, to rank 0."""
        told, lost = (0, 0, 0), set[bytes]()
        while True:
            await asyncio.sleep(TOLD_S)
            counters = self._counters
            now = (counters.bytes_up, counters.bytes_down, counters.bytes_whole)
            if now != told:
                up, down, whole = (new - old for new, old in zip(now, told, strict=True))
                self._following.tell(traffic=rk.Traffic(up=up, down=down, whole=whole))
                told = now
            for shard in self.core.shards:
                await shard.link.rest()
                token = shard.session.token
                if shard.lost.is_set() and token not in lost:
                    lost.add(token)
                    self._following.tell(session_lost=rk.SessionLost(shard=shard.number, token=token))
