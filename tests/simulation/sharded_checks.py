"""The invariants of a run over several shards, checked from outside at every event.

The invariants of one core hold for each shard. Each fragment belongs to one shard. All shards begin with the parameters
that the registrar chose. An operator action without late shards takes effect at all shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atoll_server.checkpoints.restore import INITIAL, initial_states
from atoll_server.checkpoints.tensor_file import TensorFileError, open_tensors
from atoll_server.processes.core_process import CoreProcess
from atoll_server.processes.shard_core import ShardCore
from atoll_server.shard.shard import Shard
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec

from tests.simulation import bookkeeping
from tests.simulation.bookkeeping import DIRECTORY, Violation, shard_of
from tests.simulation.checks import SLOW_DISK_S, Checks, Name, Told
from tests.simulation.disk import SimulatedDisk
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.manifest_checks import ManifestChecks

if TYPE_CHECKING:
    from tests.simulation.home import Home


class ShardedChecks(Checks):
    """The checks of one seed. homes: the registrar's process first."""

    def __init__(self, loop: VirtualLoop, max_staleness: int) -> None:
        super().__init__(loop, max_staleness)
        self.homes: Sequence[Home] = ()
        self.owners: dict[int, int] = {}  # fragment -> number of the process that holds it
        self.first: str | None = None  # digest of the parameters with which a process began
        self.begun: set[int] = set()  # numbers of processes whose first values were compared
        self.shut_out: dict[
            tuple[int, str, int], float
        ] = {}  # process, name, incarnation -> time since which it is refused
        self.served: dict[tuple[int, str], int] = {}  # process, name -> highest acknowledged incarnation
        self.told_pause: dict[int, str] = {}  # process -> confirmed pause, without a newer request
        self.told_eviction: dict[tuple[int, str], str] = {}  # process, learner -> confirmed eviction
        self.up: dict[int, int] = {}  # process -> its last epoch
        self.manifests = ManifestChecks(self, loop)

    # ------------------------------------------------------------------------------ messages

    def said_by(self, home: Home, caller: Process, request: Any, reply: Any) -> None:
        """Records a message from one process to a learner or a front."""
        match reply:
            case pb.PushReply() if reply.WhichOneof("what") == "receipt":
                self._serves(home, reply.receipt.fragment)
                self._in_time(home, reply.receipt)
            case pb.Notification() if reply.HasField("published"):
                self._serves(home, reply.published.fragment)
            case pb.FetchReply() if reply.HasField("header"):
                self._serves(home, reply.header.fragment)
        self.said(caller, request, reply)

    def _serves(self, home: Home, fragment: int) -> None:
        if self.owners.setdefault(fragment, home.number) != home.number:
            raise Violation(14, f"fragment {fragment} is served by {home.name}, and by {self.owners[fragment]}")

    def _in_time(self, home: Home, receipt: pb.Receipt) -> None:
        name = (receipt.learner, receipt.incarnation, receipt.fragment, receipt.seq)
        if name in self.acknowledged:
            return
        now = self._loop.now
        since = self.shut_out.get((home.number, *name[:2]))
        if since is not None and now > since + SLOW_DISK_S:
            raise Violation(6, f"{home.name} acknowledged {name} {now - since:.1f} s after a newer incarnation's work")
        highest = self.served.setdefault((home.number, name[0]), name[1])
        if name[1] > highest:
            self.served[home.number, name[0]] = name[1]
            for older in range(1, name[1]):
                self.shut_out.setdefault((home.number, name[0], older), now)

    def _join(self, request: pb.JoinRequest, reply: pb.JoinReply) -> None:
        super()._join(request, reply)
        self.fenced_at.clear()  # shards learn of it later; `_in_time` checks each shard

    def _is_whole(self, name: Name) -> None:
        for home in self.homes:
            shard = shard_of(home.core)
            if shard is not None and name[2] in shard.fragments:
                self.core = home.core
                super()._is_whole(name)
        self.core = None

    # ------------------------------------------------------------------------------ at every event

    def always(self) -> None:
        """Checks the invariants that hold at every moment."""
        for home in self.homes:
            shard = shard_of(home.core)
            if home.core is None or shard is None:
                continue
            self.core = home.core
            super().always()
            for fragment in shard.fragments:
                self._serves(home, fragment)
            self._began(home, home.core, shard)
            self._obeys(home, home.core)
        self.core = None

    def _obeys(self, home: Home, core: CoreProcess) -> None:
        """Checks that a process still has the pauses and evictions that it confirmed to operators."""
        paused = self.told_pause.get(home.number)
        if paused is not None and core.run.paused != paused:
            raise Violation(15, f"{home.name} has the pause {core.run.paused!r}, but confirmed {paused!r}")
        for (number, name), reason in self.told_eviction.items():
            entry = core.run.registry.entries.get(name)
            if number == home.number and (entry is None or entry.evicted != reason):
                raise Violation(15, f"{home.name} admits {name}, but confirmed its eviction")

    def _began(self, home: Home, core: CoreProcess, shard: Shard) -> None:
        """Checks that a process began with the same parameters as all others."""
        if home.number in self.begun:
            return
        digest = core.staged.hex() if isinstance(core, ShardCore) else core.run.initial_sha256
        if self.first is None:
            self.first = digest
        if digest != self.first:
            raise Violation(5, f"{home.name} began with {digest[:8]}, and another process with {self.first[:8]}")
        registrar = self.homes[0]
        disk: Any = SimulatedDisk(registrar.platter, Process("auditor"), None)
        try:
            whole = open_tensors(DIRECTORY / INITIAL, disk)
        except (OSError, TensorFileError, KeyError) as error:
            raise Violation(5, f"{home.name} began, but the registrar has no parameters: {error}") from error
        for index, state in initial_states(shard.layout, whole, set(shard.fragments)).items():
            if shard.fragments[index].version == 0 and shard.fragments[index].state.checksums() != state.checksums():
                raise Violation(5, f"{home.name} began fragment {index} with values other than the registrar's")
        self.begun.add(home.number)

    # ------------------------------------------------------------------------------ disks

    def came_back(self, home: Home, core: CoreProcess) -> None:
        """Checks that a restarted process has everything that it acknowledged, confirmed or showed."""
        run, shard = core.run, shard_of(core)
        self.note(f"{home.name} up, epoch {run.epoch}")
        if run.epoch <= self.up.get(home.number, 0):
            raise Violation(6, f"epochs of {home.name} do not grow: {self.up[home.number]} then {run.epoch}")
        self.up[home.number] = run.epoch
        self._obeys(home, core)
        self.manifests.came_back(home, core)
        mine = [fragment for fragment, number in self.owners.items() if number == home.number]
        if shard is None:
            if mine:
                raise Violation(1, f"{home.name} lost its parameters")
            return
        if set(mine) - set(shard.fragments):
            raise Violation(14, f"{home.name} came back without fragments {set(mine) - set(shard.fragments)}")
        for index, fragment in shard.fragments.items():
            if fragment.version < self.newest.get(index, 0):
                raise Violation(3, f"fragment {index} came back at version {fragment.version}")
            crc = frame_codec.vector_crc32c(fragment.state.theta_pub)
            if self.published.setdefault(self._place(run.generation, index, fragment.version), crc) != crc:
                raise Violation(3, f"fragment {index} came back with other bytes at {fragment.version}")
        self.in_ledger_of(core, shard)

    def in_ledger_of(self, core: CoreProcess, shard: Shard) -> dict[Name, Told]:
        """Compares one ledger with the messages about its fragments. Returns the ledger's final fates."""
        everything = self.acknowledged, self.fates
        try:
            self.acknowledged = {name: None for name in everything[0] if name[2] in shard.fragments}
            self.fates = {name: told for name, told in everything[1].items() if name[2] in shard.fragments}
            found: dict[Name, Told] = self.in_ledger(core)  # type: ignore[arg-type]
        finally:
            self.acknowledged, self.fates = everything
        strange = [name for name in found if name[2] not in shard.fragments]
        if strange:
            raise Violation(14, f"a ledger has fates of other shards: {strange}")
        counts = shard.contributions
        rows = core.run.writer._db.execute("SELECT fate, COUNT(*) FROM contributions GROUP BY fate").fetchall()
        in_ledger = dict(rows)
        if (counts.merged, counts.refused) != (in_ledger.get("merged", 0), in_ledger.get("refused", 0)):
            raise Violation(
                2, f"a shard counts {counts.merged} merged, {counts.refused} refused; the ledger {in_ledger}"
            )
        for name, entry in core.run.registry.entries.items():
            query = "SELECT COALESCE(SUM(size_bytes), 0) FROM contributions WHERE learner=?"
            ((size_bytes,),) = core.run.writer._db.execute(query, (name,)).fetchall()
            if entry.account.at(core.run.number).bytes_up != size_bytes:
                raise Violation(2, f"a shard counts {entry.account.at(core.run.number).bytes_up} bytes of {name}")
        return found


def made_once(core: CoreProcess) -> None:
    """Checks that no contribution is in two merges of a ledger."""
    db = core.run.writer._db
    rows = db.execute(
        "SELECT generation, learner, incarnation, fragment, seq FROM contributions WHERE fate='merged'"
    ).fetchall()
    bookkeeping.each_merged_once(db, set(rows))
