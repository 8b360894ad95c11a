"""The folders of one learner's checkpoints: their names, completeness and runs, and the deletion of old folders."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import structlog
from atoll_wire.codec.checksums import crc32c
from atoll_wire.process.durable import sync_folder
from pydantic import TypeAdapter, ValidationError

log = structlog.get_logger()

FORMAT = 1  # version of a checkpoint's contents
KEPT = 2  # number of complete checkpoints of a run that are kept
SUMS = "__{}.sums"  # checksums of one rank's files, until rank 0 has added them to FACTS
FACTS = "atoll.json"  # written last: a folder without it is not complete
DAMAGED = f"{FACTS} is damaged: delete the folder if you do not need it, and check the disk"
PART, DELETED = ".part", ".deleted"  # suffixes of folders that are being written or deleted
NAMED = re.compile(r"checkpoint-(\d{8,18})(\.part|\.deleted)?")
MAX_FACTS_BYTES, PIECE_BYTES = 16 << 20, 4 << 20


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The run that a checkpoint belongs to. layout: the layout's fingerprint in hexadecimal digits."""

    run: str
    layout: str
    generation: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What Atoll stores with a checkpoint as JSON.

    optimizers: the class of each optimizer. copies: (number of the optimizer, state key) of the parameters' copies in
    the optimizers' state. run_tokens: the run's tokens when it was saved. steps: this learner's steps, including those
    before earlier restarts. saved_at: time of the save in seconds since 1970. files: size in bytes and CRC-32C of each
    file, by name.
    """

    run: RunFacts
    learner: str
    ranks: int
    run_tokens: int
    steps: int
    saved_at: float
    optimizers: list[str]
    copies: list[tuple[int, str]]
    atoll: str
    torch: str
    format: int = FORMAT
    files: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AnyFormat:
    """The part of a checkpoint's facts that every version of Atoll can read."""

    format: int


class CheckpointDirectory:
    """The folders of one learner in a directory that several learners may share."""

    def __init__(self, root: Path, learner: str) -> None:
        self._learner = learner
        self._ignored = set[Path]()
        self.path = root / quote(learner, safe="").replace(".", "%2E", learner.startswith("."))

    def last_number(self) -> int:
        """Returns the largest number of any folder, complete or not, or 0."""
        return max((number for number, _ in self._folders()), default=0)

    def folder(self, number: int) -> Path:
        """Returns the folder of a complete checkpoint. Names sort by age."""
        return self.path / f"checkpoint-{number:08}"

    def part(self, number: int) -> Path:
        """Returns the folder in which a checkpoint is written."""
        return self.path / f"checkpoint-{number:08}{PART}"

    def remove_unfinished(self) -> None:
        """Deletes the folders that killed processes left unfinished. Call this only while no other process can write to
        these folders."""
        for number, suffix in sorted(self._folders()):
            if not suffix:
                continue
            folder = self.folder(number).with_suffix(suffix)
            try:
                shutil.rmtree(folder)
            except OSError as error:
                self.ignore(folder, f"it is not complete, and cannot be removed ({error.strerror or error})")
                continue
            if suffix == PART:
                log.info("removed a checkpoint that was not complete", learner=self._learner, folder=str(folder))

    def candidates(self, run: RunFacts) -> list[tuple[int, Facts]]:
        """Returns this run's complete checkpoints, newest first. Logs a warning for each other folder."""
        found = []
        for number, suffix in sorted(self._folders(), reverse=True):
            if suffix == DELETED or self.part(number) in self._ignored:
                continue
            facts = "it is not complete" if suffix else self._read(number)
            reason = facts if isinstance(facts, str) else _of_another_run(facts, run)
            if isinstance(facts, Facts) and not reason:
                found.append((number, facts))
            else:
                self.ignore(self.part(number) if suffix else self.folder(number), reason)
        return found

    def damage(self, number: int, facts: Facts, rank: int, ranks: int) -> str:
        """Returns a text that names a damaged file of a checkpoint, or "". Each rank checks its share of the files."""
        try:
            for name in sorted(facts.files)[rank::ranks]:
                if _checksum(self.folder(number) / name) != facts.files[name][1]:
                    return f"{name} does not match its checksum: check the disk"
        except OSError as error:
            return f"it cannot be read ({error}): check its permissions and the disk"
        return ""

    def ignore(self, folder: Path, reason: str) -> None:
        """Logs that a checkpoint is not used. Unused checkpoints are never deleted."""
        self._ignored.add(folder)
        log.warning("ignoring a checkpoint", learner=self._learner, folder=str(folder), reason=reason)

    def record_sums(self, number: int, rank: int) -> None:
        """Writes the size and checksum of each file that a rank has written. Raises OSError."""
        part = self.part(number)
        found = {each.name: (each.stat().st_size, _checksum(each)) for each in part.glob(f"__{rank}_*")}
        (part / SUMS.format(rank)).write_bytes(FILES_JSON.dump_json(found))

    def publish(self, number: int, facts: Facts) -> None:
        """Completes a written checkpoint, then deletes older ones of the same run. Raises OSError."""
        part = self.part(number)
        for rank in range(facts.ranks):
            sums = part / SUMS.format(rank)
            if not sums.exists():
                raise OSError(f"{part} lacks the files of rank {rank}: give all ranks one shared checkpoint_dir")
            facts.files.update(FILES_JSON.validate_json(sums.read_bytes()))
            sums.unlink()
        others = (each for each in part.iterdir() if each.name not in facts.files)
        facts.files.update({each.name: (each.stat().st_size, _checksum(each)) for each in others})
        with (part / FACTS).open("wb") as file:
            file.write(FACTS_JSON.dump_json(facts, indent=1))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(part)
        part.rename(self.folder(number))
        sync_folder(self.path)
        self._prune(facts.run)

    def discard(self, number: int) -> None:
        """Deletes the folder of a checkpoint that could not be saved."""
        shutil.rmtree(self.part(number), ignore_errors=True)

    def _prune(self, run: RunFacts) -> None:
        mine = []
        for number, suffix in sorted(self._folders(), reverse=True):
            if suffix == DELETED:
                shutil.rmtree(self.path / f"checkpoint-{number:08}{DELETED}", ignore_errors=True)
            elif not suffix and isinstance(facts := self._read(number), Facts) and not _of_another_run(facts, run):
                mine.append(self.folder(number))
        for folder in (each for each in mine[KEPT:] if each not in self._ignored):
            dying = folder.with_name(folder.name + DELETED)
            folder.rename(dying)  # so that a process that dies here leaves no torn checkpoint
            shutil.rmtree(dying, ignore_errors=True)

    def _folders(self) -> Iterator[tuple[int, str]]:
        """Yields (number, suffix) of each folder."""
        names = [each.name for each in self.path.iterdir()] if self.path.is_dir() else []
        for name in names:
            if match := NAMED.fullmatch(name):
                yield int(match[1]), match[2] or ""

    def _read(self, number: int) -> Facts | str:
        """Returns a folder's facts, or the reason why the folder cannot be used."""
        folder = self.folder(number)
        try:
            too_large = (folder / FACTS).stat().st_size > MAX_FACTS_BYTES
            facts = DAMAGED if too_large else _facts((folder / FACTS).read_bytes())
            for name, (size, _) in facts.files.items() if isinstance(facts, Facts) else ():
                if Path(name).name != name or (folder / name).stat().st_size != size:
                    return f"{name} does not match its entry in {FACTS}: check the disk"
        except FileNotFoundError:
            return "it is not complete"
        except OSError as error:
            return f"it cannot be read ({error}): check its permissions and the disk"
        return facts


def _facts(content: bytes) -> Facts | str:
    """Returns the facts that a file contains, or the reason why they cannot be used."""
    try:
        written = ANY_FORMAT_JSON.validate_json(content).format
        if written != FORMAT:
            return f"it has format {written}, but this version of Atoll reads {FORMAT}: use the version that wrote it"
        return FACTS_JSON.validate_json(content)
    except ValidationError:
        return DAMAGED


def _of_another_run(facts: Facts, run: RunFacts) -> str:
    """Returns the reason why a checkpoint does not belong to a run, or "" if it does."""
    if facts.run.run != run.run:
        return f'it belongs to the run "{facts.run.run}", but this run is "{run.run}"'
    return "" if facts.run.layout == run.layout else "it belongs to a run with a different layout"


def _checksum(path: Path) -> int:
    """Returns a file's CRC-32C."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            crc = crc32c(piece, crc)
    return crc


ANY_FORMAT_JSON = TypeAdapter(AnyFormat)
FACTS_JSON = TypeAdapter(Facts)
FILES_JSON = TypeAdapter(dict[str, tuple[int, int]])
FOUND_JSON = TypeAdapter(list[tuple[int, Facts]])
