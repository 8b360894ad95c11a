"""A full file system under a real core and real learners (`make test-root`)."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.test_kill import each_merged_once
from tests.end_to_end.world import Trainee, core, eventually

pytestmark = pytest.mark.root


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_a_full_disk_makes_senders_wait_but_stops_no_training_and_loses_nothing(tmp_path):
    with small_disk(tmp_path / "run", "80m"), core(tmp_path) as running:
        stop: list[bool] = []
        trainees = [Trainee(running.address, name, lambda _: bool(stop)) for name in ("a", "b")]
        for trainee in trainees:
            trainee.start()
        eventually(lambda: running.status().merges > 4 and all(len(t.losses) > 20 for t in trainees))
        filler = tmp_path / "run" / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        eventually(lambda: running.status().contributions.turned_away > 0 or "disk is full" in running.log())
        steps = [len(t.losses) for t in trainees]
        eventually(lambda: all(len(t.losses) > before + 200 for t, before in zip(trainees, steps, strict=True)))
        assert running.child.process.poll() is None, running.log()
        said = running.log()
        assert "nearly full: free space there" in said or "the disk is full" in said
        running.kill()
        running.launch()
        eventually(lambda: "this core starts when you free space" in running.log())
        running.child.process.terminate()
        assert running.child.process.wait(20) == 0, "a waiting process can be stopped"
        running.launch()
        filler.unlink()
        running.group.serving(running.child)
        merged = running.status().merges
        eventually(lambda: running.status().merges > merged + 4)
        running.kill()
        running.start()
        stop.append(True)
        for trainee in trainees:
            trainee.done()
            assert trainee.longest_step_s < 1.0
        eventually(lambda: running.status().contributions.pending == 0)
        counts = running.status().contributions
        assert counts.accepted == counts.merged + counts.refused
        each_merged_once(running.directory / "ledger.sqlite")
