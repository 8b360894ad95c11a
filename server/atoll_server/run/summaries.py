"""Summarises one process's shard for operators.

`atoll status` shows the summaries, which shards send to the registrar.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from atoll_wire import outer_pb2 as pb
from atoll_wire import shards_pb2 as sh
from google.protobuf.message import Message

from atoll_server.ledger.manifests import Manifest
from atoll_server.ledger.rows import SnapshotRow
from atoll_server.run.known_run import KnownRun
from atoll_server.shard.shard import Shard


def fragment_statuses(shard: Shard, now: float) -> Iterator[pb.FragmentStatus]:
    """Yields the status of each fragment. now: monotonic seconds."""
    for index, fragment in shard.fragments.items():
        yield pb.FragmentStatus(
            fragment=index,
            parameters=fragment.place.length,
            version=fragment.rounds.version,
            cycle=fragment.rounds.cycle,
            state=shard.syncer.why(index, now),
            published_s=0.0 if fragment.published_at is None else max(0.001, now - fragment.published_at),
            outer_steps=fragment.rounds.age(fragment.rounds.version),
        )


def contribution_counts(run: KnownRun) -> pb.Contributions:
    """Returns the numbers of contributions to this process's shard."""
    counts = pb.Contributions(turned_away=run.turned_away)
    if (shard := run.shard) is not None:
        counts.accepted = shard.contributions.accepted
        counts.merged = shard.contributions.merged
        counts.refused = shard.contributions.refused
        counts.pending = shard.pending()
    return counts


def pending_by_learner(shard: Shard) -> Counter[str]:
    """Returns the number of pending contributions of each learner."""
    return Counter(key.learner for fragment in shard.fragments.values() for key in fragment.held)


def checkpoint(row: SnapshotRow) -> pb.Checkpoint:
    """Returns a snapshot's ledger row as a message."""
    return pb.Checkpoint(
        id=row.id, taken_at=row.taken_at, versions=row.versions, size_bytes=row.size_bytes, generation=row.generation
    )


def manifest_message(manifest: Manifest) -> pb.Checkpoint:
    """Converts a manifest into the message that operators receive."""
    return pb.Checkpoint(
        id=manifest.id,
        taken_at=manifest.taken_at,
        versions=manifest.versions,
        size_bytes=manifest.size_bytes,
        generation=manifest.generation,
    )


LEARNERS, LEASES = 1000, 100  # limits per summary, since a server refuses large messages


class Summarising:
    """Creates a shard's summaries for the registrar. Each contains only learners and leases whose sums have changed."""

    def __init__(self, run: KnownRun) -> None:
        self._run = run
        self._told: dict[str | int, bytes] = {}  # by learner or lease: the sums in the last summary that contained them

    def next(self, troubles: list[str], now: float) -> sh.Summary:
        """Returns the next summary. troubles: this process's problems. now: monotonic seconds."""
        summary = sh.Summary(contributions=contribution_counts(self._run), troubles=troubles)
        if (shard := self._run.shard) is None:
            return summary
        summary.fragments.extend(fragment_statuses(shard, now))
        pending = pending_by_learner(shard)
        for name in self._run.registry.entries:
            sums = self._sums(shard, name, pending[name])
            if self._changed(name, sums):
                summary.learners.append(sums)
                if len(summary.learners) == LEARNERS:
                    break  # the next summaries contain the others
        for lease in self._run.leases:
            units = self._units(shard, lease)
            if self._changed(lease, units):
                summary.leases.append(units)
                if len(summary.leases) == LEASES:
                    break
        return summary

    def _changed(self, about: str | int, sums: Message) -> bool:
        said = sums.SerializeToString(deterministic=True)
        changed = self._told.get(about) != said
        self._told[about] = said
        return changed

    def _units(self, shard: Shard, lease: int) -> sh.LeaseSums:
        learner, incarnation = self._run.leases[lease]
        fragments = shard.contributions.merged_units(learner, incarnation, lease)
        settled = self._run.fenced(learner, incarnation) and not shard.may_merge(learner, incarnation)
        sums = sh.LeaseSums(lease=lease, settled=settled)
        for fragment, merged in sorted(fragments.items()):
            firsts, lasts = [run[0] for run in merged.runs], [run[1] for run in merged.runs]
            sums.fragments.add(fragment=fragment, through=merged.through, firsts=firsts, lasts=lasts)
        return sums

    def _sums(self, shard: Shard, name: str, pending: int) -> sh.LearnerSums:
        account = self._run.registry.entries[name].account
        sums = account.at(shard.context.number)
        return sh.LearnerSums(
            learner=name,
            merged_token_parameters=str(sums.merged_token_parameters),
            bytes_up=sums.bytes_up,
            parameters_up=sums.parameters_up,
            accepted_tokens=sums.accepted_tokens,
            accepted_before=sums.accepted_before,
            bytes_down=account.bytes_down,
            parameters_down=account.parameters_down,
            bytes_whole=account.bytes_whole,
            undone_tokens=account.current.undone_tokens,
            pending=pending,
            missed=shard.contributions.missed(name),
        )
