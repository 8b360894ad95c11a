"""Followers in another region have the bits of a hundred exports, although links are cut and processes are killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
from atoll_wire.model_file.metadata_keys import VERSIONS
from safetensors.torch import load, load_file

from tests.end_to_end.following import exported, read_metadata
from tests.end_to_end.paced import Paced, paced
from tests.end_to_end.relay import Relay, relay
from tests.end_to_end.world import Core, Front, core, front

EXPORTS = 100
FAULT_EVERY = 12  # versions between two faults
UNSEEN = 3  # versions during a cut


class Region:
    """A region whose front has a follower and a file that `atoll pull --follow` writes.

    link: between the front and the core.
    """

    def __init__(self, link: Relay, eu: Front, follower: Paced, pull: subprocess.Popen[str], out: Path) -> None:
        self.link, self.eu, self.follower, self.pull, self.out = link, eu, follower, pull, out

    def compare(self, it: Core) -> tuple[int, ...]:
        """Compares the follower's model and the pulled file with an export. Returns the versions.

        The learner must not train. Its last contribution may still be merged, so this method repeats the comparison if
        the versions differ.
        """
        while True:
            content = exported(it)
            wanted = versions_of(content)
            self.follower.send(",".join(map(str, wanted)), self.out.with_name("follower.safetensors"))
            reached, pulled = self.follower.receive(), self.pulled(wanted)
            if reached == versions_of(pulled) == wanted:
                break
        expected, model = load(content), load_file(self.out.with_name("follower.safetensors"))
        assert model.keys() == expected.keys()
        for name, tensor in model.items():
            assert tensor.numpy().tobytes() == expected[name].numpy().tobytes(), f"{name} differs at versions {wanted}"
        assert pulled == content, f"the pulled file differs at versions {wanted}"
        return wanted

    def pulled(self, wanted: tuple[int, ...]) -> bytes:
        """Waits until the pulled file has these versions or newer ones. Returns its content."""
        while True:
            content = self.out.read_bytes() if self.out.exists() else b""
            if content and all(have >= want for have, want in zip(versions_of(content), wanted, strict=True)):
                return content
            assert self.pull.stdout.readline(), "atoll pull ended"  # it prints a line after each write


def versions_of(content: bytes) -> tuple[int, ...]:
    return tuple(map(int, read_metadata(content)[VERSIONS].split(",")))


@contextlib.contextmanager
def region(folder: Path, it: Core) -> Iterator[Region]:
    """Context manager for a region whose processes end with the block."""
    out = folder / "pulled.safetensors"
    with relay(it.address) as link, front(folder, link.address, "--region", "eu") as eu:
        pull = [sys.executable, "-m", "atoll.cli", "pull", str(out), "--server", eu.address]
        with paced("follower", eu.address) as follower:
            pulling = subprocess.Popen([*pull, "--follow", "--every-s", "0.01"], stdout=subprocess.PIPE, text=True)
            try:
                yield Region(link, eu, follower, pulling, out)
            finally:
                pulling.kill()
                pulling.wait()
                pulling.stdout.close()


def cut_link(it: Core, eu: Region, learner: Paced, version: int) -> int:
    """Cuts the region off for some versions, which it therefore never sees."""
    before = eu.out.read_bytes()
    eu.link.cut()
    learner.send(version + UNSEEN)
    learner.receive()
    assert eu.out.read_bytes() == before, "the link was not cut"
    eu.link.reconnect()
    return version + UNSEEN


def silence_link(it: Core, eu: Region, learner: Paced, version: int) -> int:
    """Loses all bytes of the current connections while the learner trains."""
    eu.link.stall()
    learner.send(version)
    learner.receive()
    return version


def kill_front(it: Core, eu: Region, learner: Paced, version: int) -> int:
    learner.send(version)
    eu.eu.kill()
    learner.receive()
    eu.eu.start()
    return version


def kill_core(it: Core, eu: Region, learner: Paced, version: int) -> int:
    learner.send(version)
    it.kill()
    it.start()
    learner.receive()
    return version


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_followers_have_the_bits_of_a_hundred_exports_across_faults(tmp_path):
    faults, done, compared, version = cycle((cut_link, kill_front, kill_core, silence_link)), [], set(), 0
    with core(tmp_path / "home") as it, paced("learner", it.address) as learner:
        learner.send(1)  # the run needs parameters before a follower can start
        learner.receive()
        with region(tmp_path / "eu", it) as eu:
            while len(compared) < EXPORTS:
                version += 1
                if version % FAULT_EVERY:
                    learner.send(version)
                    learner.receive()
                else:
                    done.append(next(faults))
                    version = done[-1](it, eu, learner, version)
                compared.add(eu.compare(it))
        assert [each.learner for each in it.status().learners] == ["trainer"], "a follower is not a member"
    assert set(done) == {cut_link, kill_front, kill_core, silence_link}
    print(f"{len(compared)} exports compared up to version {version}, {len(done)} faults")
