"""Calls a core over gRPC for the operators' subcommands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.cli.output import Format
from atoll_wire.connections.calls import open_stream
from atoll_wire.connections.link import core_away, is_atoll_status, is_connection_lost, is_unreachable
from atoll_wire.contract import token_metadata
from atoll_wire.errors import ExitStatus, UserError
from atoll_wire.model_file.export_summary import export_summary
from atoll_wire.security.certificate import Role, read_certificate
from atoll_wire.security.handshake import tls_fault
from atoll_wire.security.transport import LOCAL, TransportSecurity, on_loopback

from atoll_server.cli.export_target import export_target
from atoll_server.cli.tables import checkpoint_row, named_shards, print_checkpoints

TIMEOUT_S = 10.0
WRONG_ARGUMENT = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]  # a new channel does not share the back-off of an earlier one


class OperatorError(UserError):
    """A call to a core cannot be made, or failed. The message is one line with the fix."""


class CoreUnreachableError(OperatorError):
    """Neither a core nor a front answered, or a front could not reach its core."""

    exit_status = ExitStatus.UNREACHABLE


@dataclass(frozen=True, slots=True)
class OperatorTarget:
    """The address and credentials with which an operator connects to a core or a front.

    address: HOST:PORT. token: the operator's token; empty if the core requires none.
    """

    address: str
    security: TransportSecurity = LOCAL
    token: str = ""


@contextlib.contextmanager
def operator(remote: OperatorTarget) -> Iterator[rpc.OperatorStub]:
    """Context manager that yields a stub for calls to a core.

    Raises OperatorError if a call fails, and TransportSecurityError if a certificate is unusable.
    """
    address = remote.address
    remote.security.check([address])
    _check_caller(remote.security.tls)
    if not (remote.token.isascii() and remote.token.isprintable()):
        raise OperatorError("--token has invalid characters: give the token that `atoll token` printed")
    with remote.security.dial_and_wait(address, OWN_CONNECTION) as dialled:
        channel = grpc.intercept_channel(dialled, _Bearer(remote.token)) if remote.token else dialled
        try:
            yield rpc.OperatorStub(channel)
        except grpc.RpcError as error:
            if core_away(error):
                raise CoreUnreachableError(f"the front at {address} answers, but {error.details()}") from error
            if is_unreachable(error):
                if is_connection_lost(error) and (fault := tls_fault(address, remote.security)):
                    raise OperatorError(fault) from error
                fix = f"start one there with `atoll core --listen {address} --dir DIR`, or give another --server"
                if remote.security.tls is not None or not on_loopback([address]):
                    fix = "check that the core runs and that the network lets you reach it, or give another --server"
                raise CoreUnreachableError(f"no core answers at {address} ({error.details()}): {fix}") from error
            wrong = error.code() in WRONG_ARGUMENT and is_atoll_status(error)
            status = ExitStatus.USAGE if wrong else ExitStatus.REFUSED
            raise OperatorError(f"the core at {address} refused the call: {error.details()}", status) from error


def _check_caller(tls: Path | None) -> None:
    """Raises OperatorError for a core's certificate, since the core would refuse operators' calls with it."""
    identity = "" if tls is None else read_certificate(tls).identity
    if identity.startswith(f"{Role.CORE.value}/"):
        text = f"--tls {tls} has the certificate of {identity}, not of an operator"
        raise OperatorError(f"{text}: use an operator's certificate (atoll certs issue operator NAME)")


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends the operator's token with each call."""

    def __init__(self, token: str) -> None:
        self._metadata = token_metadata(token)

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:  # noqa: ANN401
        return continuation(self._shown(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:  # noqa: ANN401
        return continuation(self._shown(details), request)

    def _shown(self, details: Any) -> Any:  # noqa: ANN401
        return details._replace(metadata=(*(details.metadata or ()), *self._metadata))


def pause(remote: OperatorTarget, reason: str) -> None:
    """Pauses the run, or resumes it if the reason is empty."""
    with operator(remote) as stub:
        before = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).paused
        if not reason and not before:
            print("the run is not paused")
            return
        reply = stub.Pause(pb.PauseRequest(reason=reason), timeout=TIMEOUT_S)
    replaced = f" (it was paused before: {before})" if before else ""
    print(f"the run is paused: {reason}{replaced}" if reason else "the run was resumed")
    _print_unconfirmed(reply.unconfirmed)


def write_off(remote: OperatorTarget, learner: str) -> None:
    """Records that a learner's process has ended without leaving."""
    with operator(remote) as stub:
        reply = stub.Evict(pb.EvictRequest(learner=learner, gone=True), timeout=TIMEOUT_S)
    print(f"{learner} has left")
    _print_unconfirmed(reply.unconfirmed)


def evict(remote: OperatorTarget, learner: str, reason: str, tokens: int | None) -> None:
    """Evicts a learner, or lets it join again if the reason is empty.

    tokens: number of the learner's reported tokens to keep; None to keep all.
    """
    with operator(remote) as stub:
        reply = stub.Evict(pb.EvictRequest(learner=learner, reason=reason, tokens=tokens), timeout=TIMEOUT_S)
    print(f"{learner} was evicted: {reason}" if reason else f"{learner} may join again")
    _print_unconfirmed(reply.unconfirmed)


def _print_unconfirmed(shards: Sequence[int]) -> None:
    """Prints the shards that have not confirmed an action yet."""
    if shards:
        print(f"not yet confirmed by {named_shards(shards)}, which will apply the change later")


def list_checkpoints(remote: OperatorTarget, form: Format = Format.TABLE) -> None:
    """Prints the checkpoints on a core's disk."""
    with operator(remote) as stub:
        reply = stub.ListCheckpoints(pb.ListCheckpointsRequest(), timeout=TIMEOUT_S)
    print_checkpoints(reply.checkpoints, form)


def take_checkpoint(remote: OperatorTarget) -> None:
    """Takes a checkpoint, waits until it is durable, and prints a line about it."""
    with operator(remote) as stub:
        taken = stub.TakeCheckpoint(pb.TakeCheckpointRequest())
    number, when, merges, size, _ = checkpoint_row(taken)
    print(f"checkpoint {number} taken {when}: {merges} merges, {size} MB")


def export_checkpoint(
    remote: OperatorTarget,
    out: Path,
    *,
    initial: bool,
    max_file_bytes: int | None = None,
    adapter: Path | None = None,
) -> None:
    """Writes the published model to a file or folder. Leaves no files if the stream is interrupted.

    max_file_bytes, adapter: see `export_target`.
    """
    request = pb.ExportCheckpointRequest(initial=initial)
    with (
        export_target(out, max_file_bytes, adapter) as target,
        operator(remote) as stub,
        open_stream("ExportCheckpoint", stub.ExportCheckpoint(request)) as call,
    ):
        for reply in call:
            target.write(reply.chunk)
    print("\n".join(export_summary(out)))
