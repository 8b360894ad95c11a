"""Receives a run's initial parameters from the learner that holds the lease. Accepts only a complete and valid file."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from atoll_wire.layout.layout import TensorSpec
from atoll_wire.layout.tensor_header import TensorFileError
from atoll_wire.model_file.tensor_values import FORMAT_NAME

from atoll_server.access.refusals import Refused, Status
from atoll_server.checkpoints.parameter_source import ParameterSource
from atoll_server.checkpoints.restore import INITIAL
from atoll_server.checkpoints.tensor_file import TensorFile, open_tensors
from atoll_server.learners.learner_registry import RegistryEntry
from atoll_server.memory_budget import too_much
from atoll_server.settings import CoreSettings
from atoll_server.storage import crash_points
from atoll_server.storage.disk import DISK, Disk, WritableFile

STAGING = "staging"  # directory for files that are being uploaded
RENEWING_BYTES = 1 << 20  # the lease is renewed whenever this many more bytes of the file have arrived
MAX_DOUBLED = 20  # a turn's length doubles at most this many times
WAITS_S = 5.0  # a learner counts as waiting for this long after its last Join, which it repeats every second


@dataclass(slots=True)
class Lease:
    """A learner's right to send the initial parameters.

    until: end of the lease in monotonic seconds. Each additional MiB of the file renews the lease. Neither repeated
    Joins nor bytes that an earlier upload already sent renew the lease. most_bytes: bytes received at the last renewal.
    turn_ends: time in monotonic seconds after which a waiting learner may get the lease even if bytes still arrive.
    """

    entry: RegistryEntry
    until: float
    turn_ends: float = math.inf
    most_bytes: int = 0
    upload: StagedFile | None = None  # the newest upload; the learner's older uploads end with an error

    def over(self, now: float, wanted: bool = False) -> bool:
        """Returns whether another learner may get the lease.

        wanted: whether another learner is waiting for the lease. now: monotonic seconds.
        """
        late = now > (min(self.until, self.turn_ends) if wanted else self.until)
        return late or bool(self.entry.evicted) or not self.entry.session

    def came(self, received: int, until: float) -> None:
        """Renews the lease if an upload made progress.

        received: bytes that this upload has received so far. until: the new end of the lease, in monotonic seconds.
        """
        if received >= self.most_bytes + RENEWING_BYTES:
            self.most_bytes, self.until = received, until


class LeaseTurns:
    """Decides which waiting learner gets the lease next. Learners that have held the lease least often come first.

    Each turn of a learner may last twice as long as its previous turn, so an upload over a slow link eventually
    succeeds. A learner that sends too little data loses the lease before its turn ends (see `Lease.until`).
    """

    def __init__(self) -> None:
        self._had: Counter[str] = Counter()
        self._waiting: dict[str, float] = {}  # by learner: time of its last request, in monotonic seconds

    def of(self, name: str, now: float) -> bool:
        """Returns whether a learner may have the next turn. now: monotonic seconds."""
        waiting = (other for other, at in self._waiting.items() if now - at <= WAITS_S)
        return all(self._had[name] <= self._had[other] for other in waiting)

    def wanted(self, holder: str, now: float) -> bool:
        """Returns whether a learner other than the holder is waiting for the lease. now: monotonic seconds."""
        return any(name != holder and now - at <= WAITS_S for name, at in self._waiting.items())

    def took(self, name: str, first_s: float) -> float:
        """Records that a learner received the lease. Returns the length of the learner's turn in seconds.

        first_s: length of each learner's first turn in seconds.
        """
        turn_s = first_s * 2.0 ** min(self._had[name], MAX_DOUBLED)
        self._had[name] += 1
        self._waiting.pop(name, None)
        return turn_s

    def waits(self, name: str, now: float) -> None:
        """Records that a learner is waiting for the lease. now: monotonic seconds."""
        self._waiting[name] = now


class StagedFile:
    """A file of initial parameters during its upload, under a temporary name. Methods run in worker threads."""

    def __init__(self, directory: Path, size_bytes: int, sha256: bytes, disk: Disk = DISK) -> None:
        self._disk = disk
        self._part = directory / STAGING / f"{secrets.token_hex(8)}.part"
        self.size_bytes = size_bytes
        self.sha256 = sha256
        self._digest = hashlib.sha256()
        self.received = 0
        self._file: WritableFile  # set by `begin`

    def begin(self) -> None:
        """Creates the file, which `close` removes unless it was published."""
        self._file = self._disk.create(self._part)

    def take(self, chunk: bytes) -> None:
        """Appends a chunk. Raises Refused if the chunk is empty or the file would exceed its declared size."""
        if not chunk:
            raise Refused(Status.INVALID_ARGUMENT, "a chunk of the initial parameters is empty: send at least one byte")
        self.received += len(chunk)
        if self.received > self.size_bytes:
            raise Refused(
                Status.INVALID_ARGUMENT,
                f"the initial parameters exceed the declared {self.size_bytes} bytes: send them again",
            )
        self._digest.update(chunk)
        self._file.write(chunk)
        crash_points.point("initial.chunk written")

    def check(self, tensors: Iterable[TensorSpec] = ()) -> TensorFile:
        """Makes the staged file durable and opens it.

        Raises Refused if the file differs from its declared size or digest or lacks one of these tensors.
        """
        self._file.sync()
        crash_points.point("initial.synced")
        self._file.close()
        if self.received != self.size_bytes or self._digest.digest() != self.sha256:
            raise Refused(
                Status.DATA_LOSS,
                f"the initial parameters were damaged in transit ({self.received} of {self.size_bytes} bytes "
                "arrived): send them again",
            )
        try:
            return checked(open_tensors(self._part, self._disk), tensors)
        except TensorFileError as error:
            raise Refused(Status.INVALID_ARGUMENT, str(error)) from error

    def publish(self, directory: Path) -> None:
        """Renames the file to its final name and makes the name durable."""
        self._disk.rename(self._part, directory / INITIAL)
        crash_points.point("initial.renamed")
        self._disk.sync_directory(directory)
        crash_points.point("initial.directory synced")

    def close(self) -> None:
        """Closes the file and removes it unless it was published."""
        self._file.close()
        self._disk.remove(self._part)


def stage_source(source: ParameterSource, directory: Path, disk: Disk = DISK) -> StagedFile:
    """Stages the `--init` model as one file, in the same way as a learner's upload.

    Raises OSError or TensorFileError.
    """
    digest = hashlib.sha256()
    for chunk in source.chunks():
        digest.update(chunk)
    staging = StagedFile(directory, source.size_bytes, digest.digest(), disk)
    staging.begin()
    try:
        for chunk in source.chunks():
            staging.take(chunk)
    except BaseException:
        staging.close()
        raise
    return staging


def checked(file: TensorFile, tensors: Iterable[TensorSpec]) -> TensorFile:
    """Returns `file` if it contains every trainable tensor with the right shape and a supported dtype.

    Raises TensorFileError with the name of the first missing or wrong tensor.
    """
    for tensor in tensors:
        entry = file.entries.get(tensor.name)
        if entry is None:
            raise TensorFileError(
                f'the initial parameters lack tensor "{tensor.name}": save the full state_dict of this model'
            )
        if entry.shape != tensor.shape or entry.dtype not in FORMAT_NAME.values():
            raise TensorFileError(
                f'the initial parameters have tensor "{tensor.name}" as {entry.dtype} {list(entry.shape)}, '
                f"but the model has it as {tensor.dtype} {list(tensor.shape)}: use this model's file"
            )
    return file


def check_room(settings: CoreSettings, size_bytes: int, parameters: int, disk: Disk = DISK) -> None:
    """Raises Refused if the file exceeds its size limit or this process's part does not fit in memory or on the disk.

    The disk must have space for the file and for two snapshots of 12 bytes per parameter. parameters: number of
    parameters that this process will hold.
    """
    directory, most = settings.directory, settings.limits.model_bytes
    if reason := too_much(parameters, settings.memory):
        raise Refused(Status.FAILED_PRECONDITION, reason)
    if not 0 < size_bytes <= most:
        raise Refused(
            Status.INVALID_ARGUMENT,
            f"the initial parameters have {size_bytes} bytes instead of 1 to {most}: send a smaller model, or raise "
            "--limit-model-bytes",
        )
    needed = size_bytes + 24 * parameters
    free = disk.free_bytes(directory)
    if needed > free:
        raise Refused(
            Status.RESOURCE_EXHAUSTED,
            f"the run needs {needed} bytes of disk, but only {free} are free in {directory}: free space there",
        )
