"""What the operator's subcommands ask of a core over gRPC, and how they show it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.access import LOCAL, Access
from atoll_wire.errors import UserError
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from atoll_server.tokens import BEARER, HEADER

TIMEOUT_S = 10.0
WIDE = 200


class OperatorError(UserError):
    """The core could not be asked, or would not do it; one line."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A core, or a front of it, as an operator reaches it."""

    address: str
    access: Access = LOCAL
    token: str = ""


@contextlib.contextmanager
def operator(remote: Remote) -> Iterator[rpc.OperatorStub]:
    """A stub for one core; OperatorError when it cannot be reached or refuses, AccessError for certificates."""
    address = remote.address
    remote.access.check([address])
    if not (remote.token.isascii() and remote.token.isprintable()):
        raise OperatorError("--token has characters that no token has: give what `atoll token` printed")
    with remote.access.dial_and_wait(address) as dialled:
        channel = grpc.intercept_channel(dialled, _Bearer(remote.token)) if remote.token else dialled
        try:
            yield rpc.OperatorStub(channel)
        except grpc.RpcError as error:
            if error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                cure = f"start one there with `atoll core --listen {address} --dir DIR`, or give another --server"
                raise OperatorError(f"no core answers at {address} ({error.details()}): {cure}") from error
            raise OperatorError(f"the core at {address} refused: {error.details()}") from error


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Shows a token with each call."""

    def __init__(self, token: str) -> None:
        self._metadata = ((HEADER, BEARER + token),)

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:  # noqa: ANN401
        return continuation(self._shown(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:  # noqa: ANN401
        return continuation(self._shown(details), request)

    def _shown(self, details: Any) -> Any:  # noqa: ANN401
        return details._replace(metadata=(*(details.metadata or ()), *self._metadata))


def console() -> Console:
    """As wide as the terminal; where there is none (a pipe, a log), wide enough that no word of a table is lost."""
    made = Console()
    return made if made.is_terminal else Console(width=WIDE)


def show_status(remote: Remote, *, as_json: bool) -> None:
    """Prints a run's state as tables, or as one JSON object."""
    with operator(remote) as stub:
        reply = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S)
    if as_json:
        print(MessageToJson(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        return
    out = console()
    out.print(
        f"run [bold]{reply.run}[/]  generation {reply.generation}  epoch {reply.epoch}  "
        f"{reply.parameters:,} parameters in {len(reply.fragments)} fragments  {reply.outer_steps:,} outer steps"
    )
    for trouble in reply.troubles:
        out.print(f"[bold red]{escape(trouble)}[/]")
    out.print(_totals(reply))
    out.print(_learners(reply))
    out.print(_fragments(reply))


def _totals(reply: pb.StatusReply) -> str:
    goodput, counts, wire = reply.goodput, reply.contributions, reply.wire
    lost = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in sorted(goodput.lost_s.items()) if seconds >= 0.05)
    return (
        f"goodput {goodput.ratio:.3f} of {goodput.provisioned_s:.0f} learner-seconds (lost: {lost or 'nothing'})\n"
        f"contributions {counts.accepted} accepted, {counts.merged} merged, {counts.pending} pending, "
        f"{counts.refused} refused, {counts.turned_away} turned away\n"
        f"tokens {reply.tokens_trained:,} trained, {reply.tokens_merged:,.0f} merged\n"
        f"wire {wire.up / 1e6:.1f} MB up ({_bits(wire.up, wire.up_parameters)}), {wire.down / 1e6:.1f} MB down "
        f"({_bits(wire.down, wire.down_parameters)}), {wire.whole / 1e6:.1f} MB of whole fragments"
    )


def _bits(size_bytes: int, parameters: int) -> str:
    return f"{8 * size_bytes / parameters:.2f} bits a parameter" if parameters else "nothing yet"


def _learners(reply: pb.StatusReply) -> Table:
    table = Table(
        "learner",
        "region",
        "state",
        "steps",
        "tokens",
        "loss",
        "step s",
        "goodput",
        "blocked",
        "heard",
        "came back in",
        "waited for",
    )
    for each in reply.learners:
        table.add_row(
            each.learner, each.region, each.state, f"{each.steps:,}", f"{each.tokens:,}", f"{each.loss:.3f}",
            f"{each.step_time_s:.3f}", f"{each.goodput.ratio:.3f}", f"{each.blocked_fraction:.4f}",
            f"{each.heard_s:.1f} s ago", _comeback(each), each.waiting_for,
        )  # fmt: skip
    return table


def _comeback(each: pb.LearnerStatus) -> str:
    """Start of the process, joining, first step."""
    parts = each.comeback
    if each.incarnation < 2 or not parts.first_step_s:
        return ""
    return f"{parts.prepared_s:.1f} + {parts.joining_s:.2f} + {parts.first_step_s:.2f} s"


def _fragments(reply: pb.StatusReply) -> Table:
    table = Table("fragment", "parameters", "version", "cycle", "state")
    for each in reply.fragments:
        table.add_row(str(each.fragment), f"{each.parameters:,}", str(each.version), str(each.cycle), each.state)
    return table


def evict(remote: Remote, learner: str, reason: str) -> None:
    """Sends a learner away, or lets it in again (no reason)."""
    with operator(remote) as stub:
        stub.Evict(pb.EvictRequest(learner=learner, reason=reason), timeout=TIMEOUT_S)
    print(f"{learner} was evicted: {reason}" if reason else f"{learner} may join again")


def list_checkpoints(remote: Remote) -> None:
    """Prints the snapshots that a core has."""
    with operator(remote) as stub:
        reply = stub.ListCheckpoints(pb.ListCheckpointsRequest(), timeout=TIMEOUT_S)
    table = Table("id", "taken", "outer steps", "size MB")
    for each in reply.checkpoints:
        table.add_row(*_row(each))
    console().print(table)


def take_checkpoint(remote: Remote) -> None:
    """Takes a snapshot and prints it."""
    with operator(remote) as stub:
        taken = stub.TakeCheckpoint(pb.TakeCheckpointRequest())
    number, when, steps, size = _row(taken)
    print(f"checkpoint {number} taken {when}: {steps} outer steps, {size} MB")


def _row(each: pb.Checkpoint) -> tuple[str, str, str, str]:
    when = datetime.fromtimestamp(each.taken_at, UTC).isoformat(timespec="seconds")
    return str(each.id), when, str(sum(each.versions)), f"{each.size_bytes / 1e6:.1f}"


def export_checkpoint(remote: Remote, out: Path, *, initial: bool) -> None:
    """Streams the published model into a file; nothing is left of it when the stream breaks."""
    part = out.with_name(out.name + ".part")
    try:
        with operator(remote) as stub, part.open("wb") as file:
            for reply in stub.ExportCheckpoint(pb.ExportCheckpointRequest(initial=initial)):
                file.write(reply.chunk)
        part.rename(out)
    except OSError as error:
        raise OperatorError(f"{out} cannot be written ({error.strerror}): give another path") from error
    finally:
        part.unlink(missing_ok=True)
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
