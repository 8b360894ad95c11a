"""Formats a run's state as tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime

from atoll_wire import outer_pb2 as pb
from atoll_wire.cli.output import Format, as_data, columns, show
from atoll_wire.contract import LearnerState, LinkState
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from atoll_server.links.links import duration
from atoll_server.rounds.liveness import named

FEW = 40  # number of learners and fragments that fit on a screen


def named_shards(numbers: Collection[int]) -> str:
    """Returns shards as text: "shard 1" or "shards 1, 3"."""
    return f"shard{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"


def print_checkpoints(checkpoints: Iterable[pb.Checkpoint], form: Format) -> None:
    """Prints checkpoints, oldest first."""
    found = list(checkpoints)
    names = ("id", "taken", "merges", "size (MB)", "generation")
    show([as_data(each) for each in found], form, lambda: columns(names, names, form, map(checkpoint_row, found)))


def checkpoint_row(each: pb.Checkpoint) -> tuple[str, str, str, str, str]:
    """Returns the cells of a checkpoint's row: number, time, merges, size in MB, generation."""
    when = moment(each.taken_at)
    merges = str(sum(each.versions.values()))
    return str(each.id), when, merges, f"{each.size_bytes / 1e6:.1f}", str(each.generation)


def shown(reply: pb.StatusReply, form: Format, most: int | None = None) -> RenderableType:
    """Returns a run's status as text and tables.

    form: output format; the wide form shows all columns. most: limit on the number of learners and on the number of
    fragments shown; None for no limit. If `most` is set, learners that are neither live nor left come first.
    """
    size = f"{reply.parameters:,} parameters in {len(reply.fragments)} fragments  {reply.merges:,} merges"
    parts: list[RenderableType] = [
        f"run [bold]{reply.run}[/]  generation {reply.generation}  epoch {reply.epoch}  {size}"
    ]
    if reply.HasField("restored"):
        parts.append(_restored(reply.restored, reply.generation))
    if reply.paused:
        parts.append(f"[bold yellow]paused {escape(reply.paused)}[/]")
    troubles = [*(link.trouble for link in reply.links if link.trouble), *reply.troubles]
    if silent := [each for each in reply.learners if each.state == LearnerState.SILENT]:
        troubles.insert(0, _silent(silent, reply.at))
    parts += [f"[bold red]{escape(trouble)}[/]" for trouble in troubles]
    tables = [_shards(reply, form)] if reply.shards else []
    links = [link for link in reply.links if link.front or form is Format.WIDE]
    tables += [_links(links, form, most)] if links else []
    tables += [_datasets(reply, form)] if reply.datasets else []
    tables += [_learners(reply, form, most), _fragments(reply, form, most)]
    return Group(*parts, _totals(reply), *(part for table in tables for part in ("", table)))


def _silent(learners: Sequence[pb.LearnerStatus], at: float) -> str:
    """Returns a line about silent learners, longest silence first. at: time of the status, on the run's clock."""
    longest_first = sorted(learners, key=lambda each: each.since)
    names = [f"{each.learner} for {duration(at - each.since)}" for each in longest_first]
    return f"silent: {named(names)}. Read {'its log' if len(names) == 1 else 'their logs'}"


def _restored(restored: pb.Restored, generation: int) -> str:
    """Returns a line about the restore that began the current generation."""
    source = f"to checkpoint {restored.checkpoint}"
    if restored.backup_at:
        source = f"from the backup of {moment(restored.backup_at)}"
    discarded = f": {restored.undone_tokens:,} trained tokens no longer count" if restored.undone_tokens else ""
    return f"restored {source} (generation {generation}) at {moment(restored.at)}{discarded}"


def moment(at: float) -> str:
    """Returns a time as text for people. at: wall-clock seconds."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _shards(reply: pb.StatusReply, form: Format) -> Table:
    names = ("shard", "address", "state", "fragments", "heard")
    rows = (
        (
            str(each.shard),
            each.address or ("this registrar" if each.attached else "unknown"),
            "attached" if each.attached else "[bold red]not attached[/]",
            ", ".join(map(str, each.fragments)),
            f"{each.heard_s:.1f} s ago" if each.heard_s else "",
        )
        for each in reply.shards
    )
    return columns(names, names, form, rows)


LINKS = (
    "link", "region", "state", "last message", "round trip", "last byte", "up", "down", "learners", "outage budget",
)  # fmt: skip
NARROW_LINKS = ("link", "state", "last message", "round trip", "learners", "outage budget")


def _links(links: Sequence[pb.LinkStatus], form: Format, most: int | None) -> Table:
    rows = (
        (
            f"front {escape(link.name)}" if link.front else link.name,
            escape(link.region),
            link.state if link.state == LinkState.CONNECTED else f"[bold red]{link.state}[/]",
            f"{link.heard_s:.1f} s ago" if link.heard_s else "",
            f"{1000 * link.round_trip_s:.0f} ms" if link.round_trip_s else "",
            f"{duration(link.byte_s)} ago" if link.byte_s else "",
            f"{link.up_bytes_per_s / 1e3:.1f} kB/s",
            f"{link.down_bytes_per_s / 1e3:.1f} kB/s",
            _behind(link, form),
            duration(link.budget_s) if link.HasField("budget_s") else "no limit",
        )
        for link in links[:most]
    )
    table = columns(LINKS, NARROW_LINKS, form, rows)
    table.caption = _left_out(len(links), most, "links")
    return table


def _behind(link: pb.LinkStatus, form: Format) -> str:
    """Returns the number of learners behind a link; in the wide form of a front, also the first names."""
    names = f" ({escape(named(link.learners))})" if form is Format.WIDE and link.front and link.learners else ""
    return f"{len(link.learners)}{names}"


def _datasets(reply: pb.StatusReply, form: Format) -> Table:
    names = ("dataset", "epoch", "consumed", "leased", "returned", "repeated", "lost")
    shown = [*names[:4], *(name for name in names[4:] if any(getattr(each, name) for each in reply.datasets))]
    rows = (
        (
            each.name,
            f"{min(each.epoch + 1, each.epochs)} of {each.epochs}",
            _consumed(each),
            f"{each.leased:,}",
            f"{each.returned:,}",
            f"{each.repeated:.1f}",
            f"{each.lost:.1f}",
        )
        for each in reply.datasets
    )
    return columns(names, shown, form, rows)


def _consumed(each: pb.DatasetStatus) -> str:
    whole = each.units * each.epochs
    return f"{each.consumed:,} of {whole:,} units ({each.consumed / whole:.1%})"


def _totals(reply: pb.StatusReply) -> str:
    goodput, counts, wire = reply.goodput, reply.contributions, reply.wire
    lost = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in sorted(goodput.lost_s.items()) if seconds >= 0.05)
    total = reply.settings.total_tokens
    part = f" of {total:,} ({reply.tokens_trained / total:.1%})" if total else ""
    return (
        f"goodput {goodput.ratio:.3f} of {goodput.provisioned_s:.0f} learner-seconds (lost: {lost or 'nothing'})\n"
        f"contributions {counts.accepted} accepted, {counts.merged} merged, {counts.pending} pending, "
        f"{counts.refused} refused, {counts.turned_away} turned away\n"
        f"tokens {reply.tokens_trained:,}{part} trained, {reply.tokens_merged:,.0f} merged\n"
        f"wire {wire.up / 1e6:.1f} MB up ({_bits(wire.up, wire.up_parameters)}), {wire.down / 1e6:.1f} MB down "
        f"({_bits(wire.down, wire.down_parameters)}), {wire.whole / 1e6:.1f} MB of whole fragments"
    )


def _bits(size_bytes: int, parameters: int) -> str:
    return f"{8 * size_bytes / parameters:.2f} bits per parameter" if parameters else "nothing yet"


LEARNERS = (
    "learner", "region", "state", "since (UTC)", "steps", "tokens", "loss", "s/step", "goodput", "lost", "blocked",
    "heard", "recovery", "waiting for",
)  # fmt: skip
NARROW = ("learner", "state", "loss", "goodput", "heard", "waiting for")


def _learners(reply: pb.StatusReply, form: Format, most: int | None) -> Table:
    fine = {LearnerState.LIVE, LearnerState.LEFT}
    wanted = sorted(reply.learners, key=lambda each: each.state in fine) if most else reply.learners
    rows = (
        (
            each.learner,
            escape(each.region),
            each.state.replace("_", " "),
            _time(each.since),
            f"{each.steps:,}",
            f"{each.tokens:,}",
            f"{each.loss:.3f}",
            f"{each.step_time_s:.3f}",
            f"{each.goodput.ratio:.3f}",
            f"{sum(each.goodput.lost_s.values()):.0f} s",
            f"{each.blocked_fraction:.4f}",
            f"{each.last_seen_age_s:.1f} s ago",
            _recovery(each),
            escape(each.waiting_for),
        )
        for each in wanted[:most]
    )
    table = columns(LEARNERS, NARROW, form, rows)
    table.caption = _left_out(len(wanted), most, "learners")
    return table


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S") if at else ""


def _left_out(count: int, most: int | None, what: str) -> str | None:
    return f"{count - most} more {what}" if most is not None and count > most else None


def _recovery(each: pb.LearnerStatus) -> str:
    """Returns how long a restarted learner's start, Join and first step took; empty for incarnation 1."""
    parts = each.recovery
    if each.incarnation < 2 or not parts.first_step_s:
        return ""
    return f"{parts.prepared_s:.1f} + {parts.joining_s:.2f} + {parts.first_step_s:.2f} s"


def _fragments(reply: pb.StatusReply, form: Format, most: int | None) -> Table:
    names = ("fragment", "parameters", "version", "cycle", "state")
    rows = (
        (str(each.fragment), f"{each.parameters:,}", str(each.version), str(each.cycle), escape(each.state))
        for each in reply.fragments[:most]
    )
    table = columns(names, names, form, rows)
    table.caption = _left_out(len(reply.fragments), most, "fragments")
    return table
