"""The first parameters of a run: one learner is given the lease, its file is staged, and all of it counts at once."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll_wire.layout.layout import Layout, TensorSpec

from atoll_server.access.refusals import Refused, Status
from atoll_server.checkpoints.restore import INITIAL
from atoll_server.checkpoints.tensor_file import FORMAT_NAME, TensorFile, TensorFileError, open_tensors
from atoll_server.learners.learner_registry import RegistryEntry
from atoll_server.run.memory_budget import too_much
from atoll_server.settings import CoreSettings
from atoll_server.storage import crash_points
from atoll_server.storage.disk import DISK, Disk, WritableFile

STAGING = "staging"  # the directory of files on their way in
COPY_BYTES = 1 << 20
RENEWING_BYTES = 1 << 20  # of a file: within each lease_s, where somebody else waits to send theirs
MAX_DOUBLED = 20  # times that a turn grows
WAITS_S = 5.0  # after it asked: a learner that waits for its turn asks every second


@dataclass(slots=True)
class Lease:
    """The right of a name to send the first parameters. until: monotonic seconds.

    It is renewed by each further MiB that no upload under it has brought before, and by nothing else: neither by
    joining again nor by sending the same again. most_bytes: that counted so far. turn_ends: monotonic seconds;
    from then on it goes to another that waits, whatever came.
    """

    entry: RegistryEntry
    until: float
    turn_ends: float = math.inf
    most_bytes: int = 0
    upload: StagedFile | None = None  # the newest: an older one of the same name ends

    def over(self, now: float, wanted: bool = False) -> bool:
        """Whether it may go to another name. wanted: another one waits."""
        late = now > (min(self.until, self.turn_ends) if wanted else self.until)
        return late or bool(self.entry.evicted) or not self.entry.session

    def came(self, received: int, until: float) -> None:
        """So many bytes of an upload are here."""
        if received >= self.most_bytes + RENEWING_BYTES:
            self.most_bytes, self.until = received, until


class LeaseTurns:
    """Who is given the lease when several want it: whoever had it least often, of those who wait.

    Each turn of a name may take twice as long as the one before: a slow link is through at last, and a learner that
    only wants to keep the lease costs the others a short turn first.
    """

    def __init__(self) -> None:
        self._had: Counter[str] = Counter()
        self._waiting: dict[str, float] = {}  # when it asked last

    def of(self, name: str, now: float) -> bool:
        """Whether it is this one's."""
        waiting = (other for other, at in self._waiting.items() if now - at <= WAITS_S)
        return all(self._had[name] <= self._had[other] for other in waiting)

    def wanted(self, holder: str, now: float) -> bool:
        """Whether another than its holder waits for the lease."""
        return any(name != holder and now - at <= WAITS_S for name, at in self._waiting.items())

    def took(self, name: str, first_s: float) -> float:
        """It has the lease now; returns how long its turn is. first_s: of its first turn."""
        turn_s = first_s * 2.0 ** min(self._had[name], MAX_DOUBLED)
        self._had[name] += 1
        self._waiting.pop(name, None)
        return turn_s

    def waits(self, name: str, now: float) -> None:
        """It was let in, and told to ask again."""
        self._waiting[name] = now


class StagedFile:
    """A file as it arrives, apart from any other that still does; methods run in a worker thread."""

    def __init__(self, directory: Path, size_bytes: int, sha256: bytes, disk: Disk = DISK) -> None:
        self._disk, self._part = disk, directory / STAGING / f"{secrets.token_hex(8)}.part"
        self.size_bytes, self.sha256 = size_bytes, sha256
        self._digest = hashlib.sha256()
        self.received = 0
        self._file: WritableFile  # from `begin` on

    def begin(self) -> None:
        """Creates the file; `close` removes what was not published."""
        self._file = self._disk.create(self._part)

    def take(self, chunk: bytes) -> None:
        """Appends a chunk. Raises Refused for one that is empty, and when there is more than was declared."""
        if not chunk:
            raise Refused(Status.INVALID_ARGUMENT, "a chunk of the first parameters is empty: send bytes")
        self.received += len(chunk)
        if self.received > self.size_bytes:
            raise Refused(
                Status.INVALID_ARGUMENT, f"the first parameters are longer than the {self.size_bytes} bytes declared"
            )
        self._digest.update(chunk)
        self._file.write(chunk)
        crash_points.point("initial.chunk written")

    def check(self, layout: Layout) -> TensorFile:
        """Makes the staged file durable and opens it. Raises Refused when it is not what was declared or needed."""
        self._file.sync()
        crash_points.point("initial.synced")
        self._file.close()
        if self.received != self.size_bytes or self._digest.digest() != self.sha256:
            raise Refused(
                Status.DATA_LOSS,
                f"the first parameters came as {self.received} of {self.size_bytes} bytes, or changed: send again",
            )
        try:
            return checked(open_tensors(self._part, self._disk), layout.tensors)
        except TensorFileError as error:
            raise Refused(Status.INVALID_ARGUMENT, str(error)) from error

    def publish(self, directory: Path) -> None:
        """Gives the file its name, durably."""
        self._disk.rename(self._part, directory / INITIAL)
        crash_points.point("initial.renamed")
        self._disk.sync_directory(directory)
        crash_points.point("initial.directory synced")

    def close(self) -> None:
        """Ends a staging, whether or not it came to its end."""
        self._file.close()
        self._disk.remove(self._part)


def stage_file(path: Path, directory: Path, disk: Disk = DISK) -> StagedFile:
    """Stages the file of `--init` the way a learner's upload is."""
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    staging = StagedFile(directory, path.stat().st_size, digest.digest(), disk)
    staging.begin()
    try:
        for chunk in _chunks(path):
            staging.take(chunk)
    except BaseException:
        staging.close()
        raise
    return staging


def checked(file: TensorFile, tensors: Iterable[TensorSpec]) -> TensorFile:
    """The file, if it has every trainable tensor in the right shape. TensorFileError names the first that it lacks."""
    for tensor in tensors:
        entry = file.entries.get(tensor.name)
        if entry is None:
            raise TensorFileError(
                f'the first parameters lack tensor "{tensor.name}": save the whole state_dict of this model'
            )
        if entry.shape != tensor.shape or entry.dtype not in FORMAT_NAME.values():
            raise TensorFileError(
                f'the first parameters have "{tensor.name}" as {entry.dtype} {list(entry.shape)}, '
                f"the model as {tensor.dtype} {list(tensor.shape)}: start from a file of this model"
            )
    return file


def check_room(settings: CoreSettings, size_bytes: int, layout: Layout, disk: Disk = DISK) -> None:
    """Refuses a model that could not be held, or kept: the file, and two snapshots of 12 bytes a parameter."""
    directory, most = settings.directory, settings.limits.model_bytes
    if reason := too_much(layout.parameters, settings.memory_bytes):
        raise Refused(Status.FAILED_PRECONDITION, reason)
    if not 0 < size_bytes <= most:
        raise Refused(Status.INVALID_ARGUMENT, f"first parameters of {size_bytes} bytes: at most {most} are taken")
    needed = size_bytes + 24 * layout.parameters
    free = disk.free_bytes(directory)
    if needed > free:
        raise Refused(
            Status.RESOURCE_EXHAUSTED, f"the run needs {needed} bytes of disk, {free} are free in {directory}"
        )


def tensors_as_data(tensors: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    """For the ledger; `restore.stored_layout` reads it."""
    return [
        {
            "name": t.name,
            "shape": list(t.shape),
            "dtype": t.dtype,
            "kind": t.kind.value,
            "tied_names": list(t.tied_names),
        }
        for t in tensors
    ]


def _chunks(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(COPY_BYTES):
            yield chunk
