"""One learner at a time uses a folder of checkpoints. A start removes the remains of killed saves."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from atoll import LearnerError
from atoll.checkpoints import directory_lock
from atoll.checkpoints.directory import FACTS
from atoll.checkpoints.directory_lock import LOCK, DirectoryLock
from atoll_wire.process.clock import SYSTEM

from tests.learner.fake_core import FakeCore
from tests.learner.loops import until
from tests.learner.saving import Saving, events, pause

HOLDER = """
import os, sys, threading
from pathlib import Path
from tests.learner.saving import Saving
class Core: address = sys.argv[1]
with Saving(Core, Path(sys.argv[2])) as it:
    it.save()
    child = os.fork() if sys.argv[3:] else 0
    if sys.argv[3:] and not child:
        threading.Event().wait(100)
        os._exit(0)
    print(child, flush=True)
    input()
"""


@contextmanager
def holder(core: FakeCore, directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Context manager for a process whose learner saved a checkpoint.

    Yields the process, and its forked child's pid or 0.
    """
    command = [sys.executable, "-c", HOLDER, core.address, str(directory), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        child = 0
        try:
            child = int(process.stdout.readline())
            yield process, child
        finally:
            process.kill()
            if child:
                os.kill(child, signal.SIGKILL)


@pytest.fixture
def impatient(monkeypatch):
    """Makes learners wait only briefly for the folder."""
    monkeypatch.setattr(directory_lock, "WAIT_S", 0.3)


def names(it: Saving) -> list[str]:
    return [each.name for each in it.folders()]


# ------------------------------------------------------------------------------ the lock


def refusal(core: FakeCore, directory: Path) -> str:
    """Starts a second learner in another thread, since one in this thread would close the first. Returns its error."""
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(Saving(core, directory).__enter__).exception()
    assert isinstance(error, LearnerError), error
    return str(error)


def test_a_second_learner_is_refused_before_it_joins_and_the_first_continues(core, tmp_path, impatient):
    with Saving(core, tmp_path) as it:
        it.save()
        joins = len(core.joins)
        assert "/a is in use by another learner in this process: stop that learner" in refusal(core, tmp_path)
        assert len(core.joins) == joins, "the second learner must not join, which would fence off the first"
        it.save()
        assert names(it) == ["checkpoint-00000001", "checkpoint-00000002"]


def test_a_second_start_in_the_same_thread_continues_from_the_first_ones_last_checkpoint(core, tmp_path, gate, said):
    first = Saving(core, tmp_path)
    first.learner.start()
    first.learner.save_checkpoint()
    first.turn()
    until(lambda: first.folders() or pause())
    threading.Timer(0.5, gate.set).start()
    with Saving(core, tmp_path) as it:
        assert events(said, "waiting for the learner that uses checkpoint_dir")
        assert core.left == ["a"]
        assert names(it) == ["checkpoint-00000001"]
        assert it.optimizer.state
        it.save()
        assert names(it) == ["checkpoint-00000001", "checkpoint-00000002"]


def test_a_second_process_is_told_which_process_has_the_folder(core, tmp_path, impatient):
    with holder(core, tmp_path) as (process, _), pytest.raises(LearnerError) as caught:
        Saving(core, tmp_path).__enter__()
    [line] = str(caught.value).splitlines()
    assert line == (
        f"checkpoint_dir: {tmp_path / 'a'} is in use by process {process.pid} on {socket.gethostname()}: "
        "stop that learner, or give this one another name or checkpoint_dir"
    )


def test_a_killed_process_frees_its_folder_even_if_its_forked_children_live_on(core, tmp_path, impatient):
    with holder(core, tmp_path, "fork") as (process, child):
        process.kill()
        process.wait()
        os.kill(child, 0)
        with Saving(core, tmp_path) as it:
            assert it.optimizer.state


def test_a_learner_waits_for_a_predecessor_that_is_ending(core, tmp_path, said):
    with holder(core, tmp_path) as (process, _):

        def end() -> None:
            until(lambda: events(said, "waiting for"))
            process.kill()

        threading.Thread(target=end).start()
        with Saving(core, tmp_path) as it:
            assert it.optimizer.state
        assert process.wait() == -signal.SIGKILL
    [line] = events(said, "waiting for")
    assert line["used_by"] == f"process {process.pid} on {socket.gethostname()}"


def test_a_learner_that_could_not_join_frees_its_folder(core, tmp_path, impatient):
    core.fail("Join", grpc.StatusCode.FAILED_PRECONDITION)
    with pytest.raises(LearnerError, match="as the test says"):
        Saving(core, tmp_path).__enter__()
    with Saving(core, tmp_path):
        pass


def fenced(core: FakeCore, directory: Path) -> None:
    """Trains until the core fences the learner off, while it writes a checkpoint."""
    with Saving(core, directory) as it:
        it.learner.save_checkpoint()
        it.turn()
        until(lambda: it.folders() or pause())
        core.forget_sessions()
        core.fail("Join", grpc.StatusCode.FAILED_PRECONDITION, "another process has joined under this name")
        core.end_follow = True
        it.until(lambda: False)


def test_the_successor_of_a_fenced_learner_waits_for_its_last_save(core, tmp_path, gate, impatient, monkeypatch):
    with pytest.raises(LearnerError, match="another process has joined"):
        fenced(core, tmp_path)
    core.end_follow = False
    with pytest.raises(LearnerError, match="is in use"):
        Saving(core, tmp_path).__enter__()
    monkeypatch.setattr(directory_lock, "WAIT_S", 60.0)
    threading.Timer(0.5, gate.set).start()
    with Saving(core, tmp_path) as again:
        assert names(again) == ["checkpoint-00000001"]
        assert again.optimizer.state
        again.save()
        assert all((each / FACTS).exists() for each in again.folders())


def test_a_folder_is_in_use_until_the_last_rank_has_ended(tmp_path, impatient):
    first, second, other = (DirectoryLock(tmp_path / "a", SYSTEM) for _ in range(3))
    first.take()
    first.share()
    second.share()
    first.release()
    with pytest.raises(LearnerError, match="is in use"):
        other.take()
    second.release()
    other.take()
    with pytest.raises(LearnerError, match="is in use"):
        second.share()
    other.release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_costs_a_warning(core, tmp_path, said, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    (tmp_path / "a" / "checkpoint-00000007.part").mkdir(parents=True)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with Saving(core, tmp_path) as it:
        it.save()
        assert names(it) == ["checkpoint-00000007.part", "checkpoint-00000008"], "a live process could be writing it"
    [line] = events(said, "cannot lock")
    assert line["log_level"] == "warning"


# ------------------------------------------------------------------------------ remains of killed saves


def test_entering_removes_checkpoints_of_killed_saves_and_never_uses_their_numbers(core, tmp_path, said):
    with Saving(core, tmp_path) as it:
        it.save()
    for name in ("checkpoint-00000005.part", "checkpoint-00000004.deleted"):
        (tmp_path / "a" / name).mkdir()
        (tmp_path / "a" / name / "__0_0.distcp").write_bytes(b"half")
    with Saving(core, tmp_path) as it:
        assert names(it) == ["checkpoint-00000001"]
        assert it.optimizer.state
        it.save()
        assert names(it) == ["checkpoint-00000001", "checkpoint-00000006"]
    [line] = events(said, "removed a checkpoint that was not complete")
    assert line["folder"] == str(tmp_path / "a" / "checkpoint-00000005.part")
    assert not events(said, "ignoring a checkpoint")


def test_an_unfinished_checkpoint_that_cannot_be_removed_is_left_with_a_warning(core, tmp_path, said):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoint-00000005.part").symlink_to(tmp_path / "elsewhere")
    with Saving(core, tmp_path) as it:
        it.save()
    assert (tmp_path / "elsewhere" / "precious").exists()
    [line] = events(said, "ignoring a checkpoint")
    assert "it is not complete, and cannot be removed" in line["reason"]


def test_a_checkpoint_that_is_being_written_is_not_removed(core, tmp_path, gate, impatient):
    with Saving(core, tmp_path) as it:
        it.learner.save_checkpoint()
        it.turn()
        until(lambda: it.folders() or pause())
        assert "is in use" in refusal(core, tmp_path)
        assert names(it) == ["checkpoint-00000001.part"]
        gate.set()
        it.settle(1)
        assert names(it) == ["checkpoint-00000001"]


def test_the_lock_file_is_never_removed(core, tmp_path):
    """If the file were removed, two learners could lock two files of the same name."""
    with Saving(core, tmp_path):
        pass
    assert (tmp_path / "a" / LOCK).exists()
