"""Revoked certificates: the list is read again after each change, and ends open calls."""

from __future__ import annotations

import asyncio
import os

import pytest
import structlog
from atoll_server.access.identity import Caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.access.revocations import RevokedCertificates
from atoll_wire.errors import SettingsError
from atoll_wire.security.certificate import Role

MARK = "ab" * 32
STOLEN, HONEST = Caller(Role.LEARNER, "us.*", "x:1", 0x3A, MARK), Caller(Role.LEARNER, "us.*", "x:2", 0x3B, "cd" * 32)


class Calls:
    """Open calls, and the refusals with which they ended."""

    def __init__(self) -> None:
        self.ended: list[Refused] = []

    def end(self, why: Refused) -> None:
        self.ended.append(why)


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "revoked"
    made.write_text("")
    return made


def loaded(path, counted=lambda: None) -> RevokedCertificates:
    made = RevokedCertificates(path, counted)
    made.load()
    return made


def write(path, text: str) -> None:
    """Replaces the file. The new time differs even if the clock of the file system is coarse."""
    old = path.stat()
    path.write_text(text)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns + 1_000_000))


@pytest.mark.parametrize("entry", ["3A", "003a", MARK, MARK.upper(), ":".join(["AB"] * 32), "3a  # stolen on Monday"])
def test_a_certificate_is_revoked_by_its_serial_number_or_fingerprint(path, entry):
    path.write_text(f"# of this run\n\n{entry}\n")
    counted = []
    revoked = loaded(path, lambda: counted.append(1))
    with pytest.raises(Refused) as caught, revoked.calling(STOLEN, Calls().end):
        pass
    assert caught.value.status is Status.PERMISSION_DENIED
    assert caught.value.detail == (
        'the certificate of learner "us.*" is revoked (serial number 3A): use a new certificate from the run\'s '
        "operator (atoll certs issue)"
    )
    with revoked.calling(HONEST, Calls().end):
        assert (len(revoked), len(counted)) == (1, 1)


def test_a_change_ends_the_open_calls_of_a_revoked_certificate_only(path):
    counted = []
    revoked, stolen, honest = loaded(path, lambda: counted.append(1)), Calls(), Calls()
    with revoked.calling(STOLEN, stolen.end), revoked.calling(HONEST, honest.end):
        write(path, "3a\n")
        revoked.look()
        revoked.look()
        assert [why.status for why in stolen.ended] == [Status.PERMISSION_DENIED]
        assert (honest.ended, len(counted)) == ([], 1)
    write(path, "")
    revoked.look()
    with revoked.calling(STOLEN, stolen.end):
        assert len(stolen.ended) == 1, "the certificate is valid again"


def test_the_file_is_read_again_in_the_background(path, monkeypatch):
    monkeypatch.setattr("atoll_server.access.revocations.LOOK_S", 0.01)

    async def scene() -> None:
        revoked, told = loaded(path), asyncio.Event()
        keeping = asyncio.create_task(revoked.keep_reading())
        with revoked.calling(STOLEN, lambda _: told.set()):
            write(path, MARK)
            await asyncio.wait_for(told.wait(), 60)
        keeping.cancel()

    asyncio.run(scene())


def test_callers_without_a_certificate_are_never_revoked(path):
    path.write_text("3a\n")
    with loaded(path).calling(Caller(None, "", "x:1"), Calls().end):
        pass


def test_a_revoked_front_is_away_for_its_learners_which_a_denial_would_stop(path):
    path.write_text("3a\n")
    front = Caller(Role.FRONT, "eu", "x:1", 0x3A, MARK)
    with pytest.raises(Refused) as caught, loaded(path).calling(front, Calls().end):
        pass
    assert caught.value.status is Status.UNAVAILABLE


@pytest.mark.parametrize("line", ["thief", "0", "3g", "-3a", "0x3a", MARK[:-2], MARK + "00", "f" * 40, "3a 3b"])
def test_an_invalid_line_is_one_warning_that_names_the_line_and_the_last_valid_list_stays(path, line):
    path.write_text("3a\n")
    revoked = loaded(path)
    write(path, f"3b\n{line}\n")
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            revoked.look()
    [warning] = logs
    assert warning["log_level"] == "warning"
    assert f'{path}: line 2 ("{line}") is neither a serial number nor' in warning["error"]
    with pytest.raises(Refused), revoked.calling(STOLEN, Calls().end):
        pass
    with revoked.calling(HONEST, Calls().end):
        path.unlink()
        revoked.look()
    assert len(revoked) == 1, "a missing file revokes what the last valid file revoked"
    with pytest.raises(SettingsError, match="cannot be read"):
        loaded(path)
