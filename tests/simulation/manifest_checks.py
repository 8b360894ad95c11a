"""Checks of the checkpoints of a run with several shards, and of the generations that begin at one.

A checkpoint counts as soon as its manifest is durable. It names one snapshot of each shard, which the shard has on its
disk, with the parameters that the shard had when it took the snapshot. The checks know these from the shard's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from atoll_server.checkpoints.rollback import RolledBack
from atoll_server.checkpoints.snapshot import SnapshotError, SnapshotWriter, load_snapshot, snapshot_path
from atoll_server.ledger import shard_ledger
from atoll_server.ledger.lineage import Beginning, Line
from atoll_server.ledger.manifests import Manifest
from atoll_server.merging.merge import FragmentState
from atoll_server.processes.core import Core
from atoll_server.processes.core_process import CoreProcess
from atoll_server.shard.shard import Shard
from atoll_wire import outer_pb2 as pb

from tests.simulation.bookkeeping import DIRECTORY, Violation, shard_of
from tests.simulation.disk import SimulatedDisk
from tests.simulation.loop import Process, VirtualLoop

if TYPE_CHECKING:
    from tests.simulation.home import Home
    from tests.simulation.sharded_checks import ShardedChecks


@dataclass(frozen=True)
class Taken:
    """A fragment when its shard wrote it to a snapshot."""

    at: float
    generation: int
    version: int
    checksums: tuple[int, int, int]


class ManifestChecks:
    """The checks of one seed. counting: the durable manifests, by number."""

    def __init__(self, checks: ShardedChecks, loop: VirtualLoop) -> None:
        self._checks, self._loop = checks, loop
        self.counting: dict[int, Manifest] = {}
        self._newest: Manifest | None = None
        self._taken: dict[tuple[int, int], dict[int, Taken]] = {}  # process, snapshot -> its fragments
        self._asked: set[int] = set()  # checkpoints that operators asked to restore
        self._told: RolledBack | None = None  # the last result that an operator received
        self._begun: dict[int, Manifest] = {}  # generation -> the checkpoint at which it began
        self._generations: dict[int, int] = {}  # process -> its generation, if it is not the first

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager in which shards' snapshots are compared with their memory."""
        add = SnapshotWriter.add

        def added(writer: SnapshotWriter, fragment: int, state: FragmentState) -> None:
            add(writer, fragment, state)
            self._wrote(writer, fragment)

        with mock.patch.object(SnapshotWriter, "add", added):
            yield

    def _wrote(self, writer: SnapshotWriter, fragment: int) -> None:
        disk: Any = writer._disk
        home = next(home for home in self._checks.homes if home.platter is disk.platter)
        core, shard = home.core, shard_of(home.core)
        assert core is not None and shard is not None, "only a running shard takes snapshots"  # noqa: PT018
        state = shard.fragments[fragment].state
        fragments = self._taken.setdefault((home.number, int(writer.path.stem)), {})
        if fragment in fragments:
            fragments.clear()  # an earlier process died before this snapshot was in its ledger
        fragments[fragment] = Taken(self._loop.now, core.run.generation, state.version, state.checksums())

    # ------------------------------------------------------------------------------ manifests

    @property
    def taken(self) -> int:
        """The number of checkpoints that have counted."""
        return 0 if self._newest is None else self._newest.id

    def count(self, manifests: Sequence[Manifest]) -> None:
        """Records the registrar's durable manifests, and checks the new ones."""
        if self._newest is not None and self._newest not in manifests:
            raise Violation(16, f"checkpoint {self._newest.id} is gone")
        taken = self.taken
        self.counting = {each.id: each for each in manifests}
        for manifest in manifests:
            if manifest.id > taken:
                self._checks.note(f"checkpoint {manifest.id} of {manifest.snapshots} at {manifest.versions}")
                self._is_one_cut(manifest)
                for home in self._checks.homes:
                    self._is_there(home, manifest)
                self._newest = manifest

    def answered(self, checkpoint: pb.Checkpoint, asked_at: float) -> None:
        """Checks a checkpoint that an operator received."""
        manifest = self.counting.get(checkpoint.id)
        if manifest is None or (manifest.versions, manifest.generation) != (
            dict(checkpoint.versions), checkpoint.generation,
        ):  # fmt: skip
            raise Violation(16, f"an operator received {checkpoint}, the registrar has {manifest}")
        for home in self._checks.homes:
            if any(each.at < asked_at for each in self._fragments(home, manifest).values()):
                raise Violation(16, f"checkpoint {manifest.id} has an older snapshot of {home.name} than was asked for")

    def _fragments(self, home: Home, manifest: Manifest) -> dict[int, Taken]:
        """Returns what a process had when it took its snapshot for a checkpoint."""
        return self._taken.get((home.number, manifest.snapshots[self._place(home)]), {})

    def _place(self, home: Home) -> int:
        """Returns the number of a process's shard. A registrar without fragments comes after all others."""
        return len(self._checks.homes) - 1 if home.shard is None else home.shard.number

    def _is_one_cut(self, manifest: Manifest) -> None:
        """Checks that a manifest names a new snapshot of each shard, and all fragments of one history once."""
        homes = self._checks.homes
        if set(manifest.snapshots) != set(map(self._place, homes)):
            raise Violation(16, f"checkpoint {manifest.id} names the shards {sorted(manifest.snapshots)}")
        found: dict[int, int] = {}
        for home in homes:
            place, mine = self._place(home), self._fragments(home, manifest)
            if self._newest is not None and manifest.snapshots[place] <= self._newest.snapshots[place]:
                raise Violation(16, f"checkpoint {manifest.id} has no newer snapshot of {home.name} than the last one")
            if other := {each.generation for each in mine.values()} - {manifest.generation}:
                raise Violation(16, f"checkpoint {manifest.id} has a snapshot of {home.name} in generation {other}")
            for fragment, each in mine.items():
                key = self._checks._place(manifest.generation, fragment, each.version)
                if self._checks.published.setdefault(key, each.checksums[1]) != each.checksums[1]:
                    raise Violation(16, f"checkpoint {manifest.id} has other bytes of {key} than were published")
                found[fragment] = each.version
        if found != manifest.versions:
            raise Violation(16, f"checkpoint {manifest.id} claims {manifest.versions}, its snapshots have {found}")

    def _is_there(self, home: Home, manifest: Manifest) -> None:
        """Checks that a running process has its snapshot of a checkpoint, durably and bit for bit."""
        core, shard = home.core, shard_of(home.core)
        if core is None or shard is None:
            return  # its next start is checked
        number, name = manifest.snapshots[self._place(home)], f"the snapshot of {home.name} for {manifest.id}"
        row = next((each for each in shard_ledger.snapshots(core.run.writer._db) if each.id == number), None)
        if row is None or row.generation != manifest.generation:
            raise Violation(16, f"{name} is {row} in its ledger")
        path = snapshot_path(DIRECTORY, number)
        content = home.platter.names.get(str(path))
        names = {what for _, what, *_ in home.platter.unsynced}
        if content is None or content.unsynced or str(path) in names:
            raise Violation(16, f"{name} is not durable")
        places = [each.place for each in shard.fragments.values()]
        disk: Any = SimulatedDisk(home.platter, Process("auditor"), None)
        try:
            states = load_snapshot(path, places, row, disk)
        except SnapshotError as error:
            raise Violation(16, f"{name} cannot be read: {error}") from error
        had = {index: (each.version, each.checksums) for index, each in self._fragments(home, manifest).items()}
        if {index: (each.version, each.checksums()) for index, each in states.items()} != had:
            raise Violation(16, f"{name} differs from what the shard had")

    # ------------------------------------------------------------------------------ restores

    def restoring(self, checkpoint: int) -> None:
        """Records that an operator requests a restore, whose outcome is not known yet."""
        self._asked.add(checkpoint)

    def rolled_back(self, done: RolledBack) -> None:
        """Records a durable restore, as the operator received it."""
        self._told = done

    def came_back(self, home: Home, core: CoreProcess) -> None:
        """Checks the generation of a restarted process, and that it has its snapshots of all checkpoints."""
        shard, generation = shard_of(core), core.run.generation
        if shard is not None and generation != self._generations.get(home.number, 1):
            self._began(home, core, shard)
        if isinstance(core, Core):
            self.count(core.run.manifests)
        for manifest in self.counting.values():
            self._is_there(home, manifest)

    def _began(self, home: Home, core: CoreProcess, shard: Shard) -> None:
        """Checks that a process begins a generation with the checkpoint that an operator asked to restore."""
        generation = core.run.generation
        if isinstance(core, Core):
            self._registrar_began(core)
        if generation not in self._begun or generation < self._generations.get(home.number, 1):
            raise Violation(13, f"{home.name} begins generation {generation}, which the registrar has not begun")
        self._generations[home.number] = generation
        had = {index: (each.version, each.checksums) for index, each in self._fragments(
            home, self._begun[generation]).items()}  # fmt: skip
        has = {index: (each.version, each.state.checksums()) for index, each in shard.fragments.items()}
        if has != had:
            raise Violation(13, f"{home.name} begins generation {generation} with {has}, its checkpoint has {had}")
        self._checks.newest |= shard.versions()

    def _registrar_began(self, core: Core) -> None:
        generation, manifest = core.run.generation, core.run.from_manifest
        asked, told = self._asked, self._told
        self._asked, self._told = set(), None
        if manifest is None or manifest.checkpoint not in asked:
            raise Violation(13, f"generation {generation} begins at {manifest}, operators asked for {asked}")
        if told is not None and told.generation != generation:
            raise Violation(13, f"the restore reported generation {told.generation}, the registrar runs {generation}")
        self._checks.note(f"generation {generation} begins at checkpoint {manifest.checkpoint}")
        cut = self.counting[manifest.checkpoint]
        self._begun[generation] = cut
        before = self._checks.lines[cut.generation].beginnings
        begun = Beginning(generation, cut.generation, cut.id, cut.versions, 0, 0.0)
        self._checks.lines[generation] = Line(generation, (begun, *before))
