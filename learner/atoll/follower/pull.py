"""Writes the published model to a file, once or whenever it changes (`atoll pull`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from atoll_wire.model_file.export_summary import export_summary
from atoll_wire.model_file.model_file import write_model
from atoll_wire.process.clock import Clock
from atoll_wire.process.durable import new_file

from atoll.errors import FollowerError
from atoll.follower.cuts import Cut
from atoll.follower.follow_session import Source
from atoll.follower.follow_thread import FollowThread


def pull(out: Path, source: Source, clock: Clock, every_s: float | None, tell: Callable[[str], None]) -> None:
    """Writes the published model to a safetensors file.

    every_s: shortest time between two writes, in seconds, or None to write the file once. tell: called with each line
    for the user. Raises FollowerError if the model cannot be read or the file cannot be written.
    """
    thread = FollowThread(source, clock)
    thread.start()
    try:
        written: Cut | None = None
        warned: set[str] = set()
        while True:
            cut = thread.exchange.wait(written, None if written else source.connect_timeout_s)
            if cut is None:
                raise thread.timed_out("--connect-timeout-s")
            _write(out, cut)
            wrote, *warnings = export_summary(out)
            for line in (wrote, *(text for text in warnings if text not in warned)):
                tell(line)
            warned.update(warnings)
            if every_s is None:
                return
            written = cut
            threading.Event().wait(every_s)
    finally:
        thread.end()


def _write(out: Path, cut: Cut) -> None:
    """Writes a new file. The complete file replaces an older file."""
    try:
        with new_file(out) as file:
            write_model(file, cut.layout, cut.fixed, cut.fragments, cut.run)
    except OSError as error:
        raise FollowerError(f"{out} cannot be written ({error.strerror}): give another path, or free space") from error
