"""`atoll doctor`: finds problems before training and prints a fix for each.

It checks host names, ports, certificates, clocks, and the connection to the core (round trip, rates, message size). It
also checks a core's disk and compares a model with the run's model. It does not need torch, so the images of the core
and the front contain it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import grpc
from pydantic import Field

from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.cli.output import Format, show
from atoll_wire.connections.calls import open_stream
from atoll_wire.connections.link import core_away, is_atoll_status, is_connection_lost
from atoll_wire.errors import UsageError
from atoll_wire.layout.layout import LayoutError, TensorSpec, plan
from atoll_wire.messages.message_parts import PART_BYTES
from atoll_wire.process.clock import SYSTEM
from atoll_wire.process.settings import Certificates, Option
from atoll_wire.security.certificate import CertificateError, Role, allows_name, read_certificate
from atoll_wire.security.handshake import tls_fault
from atoll_wire.security.transport import AddressError, TransportSecurity, TransportSecurityError, check_address

TIMEOUT_S = 60.0
PINGS = 5
RATE_BYTES = 8 << 20
PIECE_BYTES = 256 << 10
FRAME_BYTES = PART_BYTES  # senders split longer messages into pieces of this size
OPTIONS = [("grpc.max_send_message_length", 2 * FRAME_BYTES), ("grpc.max_receive_message_length", 2 * FRAME_BYTES)]
CLOCK_S = 5.0
DAYS = 14.0
SLOW_MBIT = 10.0
DISK_BYTES = 64 << 20
SLOW_DISK_MB = 50.0
FEW_BYTES = 4 << 30


class Severity(Enum):
    GOOD = "good"
    DOUBTFUL = "doubtful"
    BAD = "bad"


SIGNS = {Severity.GOOD: "ok  ", Severity.DOUBTFUL: "WARN", Severity.BAD: "BAD "}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        verdict: The severity of the finding.
        what: The fact, on one line.
        remedy: The fix; empty if nothing is wrong.
    """

    verdict: Severity
    what: str
    remedy: str = ""


class DoctorSettings(Certificates):
    """The options of `atoll doctor`."""

    command: ClassVar[str] = "doctor"

    servers: Annotated[
        tuple[str, ...],
        Field(description="Address of a core or front to check."),
        Option(name="server", metavar="HOST:PORT", variable="ATOLL_SERVER"),
    ] = ()
    directory: Annotated[
        Path | None, Field(description="Directory in which a core would store a run."), Option(name="dir")
    ] = None
    name: Annotated[str, Field(description="Name under which the learner would join.")] = ""


@dataclass(frozen=True, slots=True)
class LearnerToCheck:
    """A learner that is going to join a run.

    Attributes:
        address: HOST:PORT of a core or front.
        security: The learner's certificates.
        name: The learner's name; empty if the name is not checked.
        tensors: The model's trainable tensors, as `of_model` returns them; empty if the model is not checked.
        frozen_digest: The digest of the frozen parameters, as `of_model` returns it.

    Example:
        ```python
        security = TransportSecurity(tls=Path("certs/learner-eu-west"))
        learner = LearnerToCheck("core.example.com:7070", security, "eu-west", **of_model(model, optimizer))
        ```
    """

    address: str
    security: TransportSecurity
    name: str = ""
    tensors: tuple[TensorSpec, ...] = ()
    frozen_digest: bytes = b""


def print_findings(findings: Iterable[Finding]) -> bool:
    """Prints each finding as soon as it is known.

    Args:
        findings: The findings that `check_connection` yields.

    Returns:
        Whether any finding is bad.

    Example:
        ```python
        has_errors = print_findings(check_connection(learner))
        ```
    """
    bad = False
    for finding in findings:
        print(f"{SIGNS[finding.verdict]}  {finding.what}", flush=True)
        if finding.remedy:
            print(f"      {finding.remedy}")
        bad |= finding.verdict is Severity.BAD
    return bad


def report(settings: DoctorSettings, form: Format, **model: Any) -> bool:  # noqa: ANN401 - of LearnerToCheck
    """Checks the address or directory that the options name, and prints the findings. Returns whether any finding is
    bad.

    model: the arguments of LearnerToCheck that describe the model. Raises UsageError if the options name nothing.
    """
    if not settings.servers and settings.directory is None:
        raise UsageError(
            "nothing to check: give the address of a core or front (--server), or a core's directory (--dir)"
        )
    learners = [LearnerToCheck(each, settings.security, settings.name, **model) for each in settings.servers]
    disk = check_disk(settings.directory) if settings.directory is not None else ()
    findings = itertools.chain(disk, *map(check_connection, learners))
    if not form.is_json:
        return print_findings(findings)
    found = [asdict(finding) | {"verdict": finding.verdict.value} for finding in findings]
    show(found, form, lambda: "")
    return any(each["verdict"] == Severity.BAD.value for each in found)


def check_connection(learner: LearnerToCheck) -> Iterator[Finding]:
    """Checks the connection to a core or front. Stops at a problem that prevents further checks.

    If the core is the registrar of several shards, also checks the connection to each of the others.

    Args:
        learner: The learner that is going to join, with the address to check.

    Yields:
        One finding per check, as soon as it is known.

    Example:
        ```python
        bad = [finding for finding in check_connection(learner) if finding.verdict is Severity.BAD]
        ```
    """
    shards = list[str]()
    yield from _address(learner, _certificate(learner), lambda stub: _way(stub, learner, shards))
    for address in shards:
        yield from _address(replace(learner, address=address), (), partial(_shard, address))


def _address(
    learner: LearnerToCheck, certificate: Iterable[Finding], answers: Callable[[rpc.DoctorStub], Iterable[Finding]]
) -> Iterator[Finding]:
    """Checks the way to an address. certificate: findings to yield once its port is open. answers: the next checks."""
    place = _place(learner.address)
    if isinstance(place, Finding):
        yield place
        return
    try:
        learner.security.check([learner.address])
    except TransportSecurityError as error:
        yield _bad(str(error), "issue certificates with atoll certs")
        return
    reached = list(_reach(*place))
    yield from reached
    if any(finding.verdict is Severity.BAD for finding in reached):
        return
    yield from certificate
    try:
        with learner.security.dial_and_wait(learner.address, OPTIONS) as channel:
            yield from answers(rpc.DoctorStub(channel))  # type: ignore[no-untyped-call]
    except TransportSecurityError as error:
        yield _bad(str(error), "issue the certificates again with atoll certs")
    except grpc.RpcError as error:
        if is_atoll_status(error):
            fact, _, fix = (error.details() or "").rpartition(": ")
            is_over = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            verdict = Severity.DOUBTFUL if is_over else Severity.BAD
            yield Finding(verdict, f"{learner.address} refused the check: {fact}", fix)
            return
        if core_away(error):
            yield _split(f"the front at {learner.address} answers, but {error.details()}")
            return
        if is_connection_lost(error):
            fix = "check the link, and that a core or front runs there; start it if it is down"
            nothing = _bad(f"no core or front answers at {learner.address}: {error.details()}", fix)
            fault = tls_fault(learner.address, learner.security)
            yield _split(fault) if fault else nothing
            return
        fact = f"the server at {learner.address} does not answer like an Atoll core or front: {error.details()}"
        yield _bad(fact, "check the address, and use the same version of Atoll on both sides")


def check_disk(directory: Path) -> Iterator[Finding]:
    """Yields findings about the disk of a core's directory: free space and write rate."""
    file = directory / ".atoll-doctor"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free, began = shutil.disk_usage(directory).free, SYSTEM.monotonic()
        with file.open("wb") as out:
            for _ in range(DISK_BYTES >> 20):
                out.write(os.urandom(1 << 20))
            out.flush()
            os.fsync(out.fileno())
        rate = DISK_BYTES / 1e6 / (SYSTEM.monotonic() - began)
    except OSError as error:
        yield _bad(
            f"cannot write to {directory} ({error.strerror})", "give a writable directory on a disk with free space"
        )
        return
    finally:
        with contextlib.suppress(OSError):  # the file may not exist
            file.unlink()
    room = "a core needs 64 bytes per parameter, and space for pending contributions: free up space"
    yield _judged(free >= FEW_BYTES, f"{free / 2**30:.0f} GiB are free in {directory}", room)
    quick = "a core acknowledges contributions only after writing them to disk: use a faster disk"
    yield _judged(rate >= SLOW_DISK_MB, f"the disk writes and syncs {rate:.0f} MB/s", quick)


def _place(address: str) -> tuple[str, int] | Finding:
    host, _, port = address.rpartition(":")
    try:
        check_address(address)
    except AddressError as error:
        return _split(str(error))
    if address.startswith("unix:") or not int(port):
        return _bad(f"{address} is not HOST:PORT", "give the address that a core or front prints when it starts")
    return host.strip("[]"), int(port)


def _reach(host: str, port: int) -> Iterator[Finding]:
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        yield _bad(
            f"{host} cannot be resolved ({error})", "correct the name, fix DNS on this machine, or start the front"
        )
        return
    yield Finding(Severity.GOOD, f"{host} resolves to {', '.join(sorted(found))}")
    try:
        with socket.create_connection((host, port), timeout=10.0):
            yield Finding(Severity.GOOD, f"port {port} is open")
    except OSError as error:
        fix = "start a core or front there, or open the port in all firewalls between the machines"
        yield _bad(f"port {port} of {host} cannot be reached ({error.strerror or error})", fix)


def _certificate(learner: LearnerToCheck) -> Iterator[Finding]:
    directory = learner.security.tls
    if directory is None:
        return
    try:
        mine = read_certificate(directory)
    except CertificateError as error:
        yield _bad(str(error), "issue the certificate again with atoll certs")
        return
    renew = f"renew the certificate: {mine.issue_command}"
    if mine.days_left <= 0:
        yield _bad(f"the certificate of {mine.identity} has expired", renew)
    else:
        good = mine.days_left >= DAYS
        yield _judged(good, f"the certificate of {mine.identity} is valid for {mine.days_left:.1f} days", renew)
    if learner.name and not allows_name(mine.identity, f"{Role.LEARNER.value}/{learner.name}"):
        text = f"the certificate belongs to {mine.identity}, but the learner's name is {learner.name}"
        yield _bad(text, f"issue a certificate: atoll certs issue learner {learner.name}")


def _shard(address: str, stub: rpc.DoctorStub) -> Iterator[Finding]:
    began = SYSTEM.monotonic()
    _probe(stub, [pb.ProbeRequest()])
    yield Finding(Severity.GOOD, f"the shard at {address} answers, {1e3 * (SYSTEM.monotonic() - began):.1f} ms")


def _way(stub: rpc.DoctorStub, learner: LearnerToCheck, shards: list[str]) -> Iterator[Finding]:
    """Checks the core that answers. Appends the addresses of the run's other shards, unless a front hides them."""
    trips = []
    offsets = []
    told = pb.ProbeReply()
    for _ in range(PINGS):
        began, asked_at = SYSTEM.monotonic(), SYSTEM.wall()
        told = _probe(stub, [pb.ProbeRequest()])[0]
        trips.append(SYSTEM.monotonic() - began)
        offsets.append(told.wall_s - asked_at - trips[-1] / 2)
    shards += [] if told.via else told.shards
    trip_s, offset_s = statistics.median(trips), statistics.median(offsets)
    way = " via ".join(("the core answers", *told.via))
    yield Finding(Severity.GOOD, f"{way}, {1e3 * trip_s:.1f} ms round trip, {_run(told)}")
    off = f"the clocks are {abs(offset_s):.1f} s apart"
    yield _judged(
        abs(offset_s) < CLOCK_S,
        off,
        "synchronise both clocks with NTP, because certificates are checked against the clock",
    )
    yield from _rates(stub, trip_s)
    _probe(stub, [pb.ProbeRequest(padding=bytes(FRAME_BYTES))])
    large = f"messages of {FRAME_BYTES >> 10} KiB arrive"
    yield _judged(told.message_bytes > FRAME_BYTES, large, "raise the core's --limit-message-bytes")
    if learner.tensors and told.fingerprint:
        yield from _model(learner, told)
    elif learner.tensors:
        yield Finding(Severity.GOOD, "the run has no parameters yet: the first learner provides them")


def _rates(stub: rpc.DoctorStub, trip_s: float) -> Iterator[Finding]:
    up = [pb.ProbeRequest(padding=bytes(PIECE_BYTES))] * (RATE_BYTES // PIECE_BYTES)
    down = [pb.ProbeRequest(wanted_bytes=RATE_BYTES)]
    fix = (
        "a sync sends about 3 bits per parameter each way, over several connections: raise the core's "
        "--inner-steps, or use a faster link"
    )
    for way, requests in (("up", up), ("down", down)):
        began = SYSTEM.monotonic()
        _probe(stub, requests)
        took_s = SYSTEM.monotonic() - began
        # The round trip varies, so at most half of the time is subtracted for it.
        rate = RATE_BYTES * 8 / 1e6 / max(took_s / 2, took_s - trip_s)
        yield _judged(rate >= SLOW_MBIT, f"{rate:.0f} Mbit/s {way}, over one connection", fix)


def _model(learner: LearnerToCheck, told: pb.ProbeReply) -> Iterator[Finding]:
    try:
        same = plan(learner.tensors, told.fragments).fingerprint == told.fingerprint
    except LayoutError:
        same = False
    fix = "build the model with the names, shapes, dtypes and order of the run's trainable parameters"
    good = Finding(Severity.GOOD, "the model's layout matches the run's")
    yield good if same else _bad("the model's layout differs from the run's", fix)
    if same and learner.frozen_digest != told.frozen_digest:
        yield _bad("the frozen parameters differ from the run's", "load the frozen values that the run began with")


def _probe(stub: rpc.DoctorStub, requests: list[pb.ProbeRequest]) -> list[pb.ProbeReply]:
    with open_stream("Probe", stub.Probe(iter(requests), timeout=TIMEOUT_S)) as call:
        return list(call)


def _run(told: pb.ProbeReply) -> str:
    return f"run {told.run}" if told.fingerprint else f"run {told.run}, which has not begun"


def _judged(good: bool, what: str, fix: str) -> Finding:
    return Finding(Severity.GOOD, what) if good else Finding(Severity.DOUBTFUL, what, fix)


def _split(text: str) -> Finding:
    """Returns the finding for an error. text: the fact, a colon, and the fix."""
    what, _, remedy = text.rpartition(": ")
    return _bad(what, remedy)


def _bad(what: str, remedy: str) -> Finding:
    return Finding(Severity.BAD, what, remedy)
