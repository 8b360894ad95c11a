"""Checks the Learner's arguments that say where, when and what it saves."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.checkpoints.learner_state import HasState
from atoll.errors import LearnerError


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Where and when a learner saves. every_s: seconds between saves, or None to save only on request. extra: see
    Learner's `extra_state`."""

    directory: Path
    every_s: float | None
    extra: Mapping[str, HasState]


def checkpoint_settings(directory: object, every_s: object, extra: object) -> CheckpointSettings | None:
    """Returns the settings for a Learner's arguments, or None if it saves no checkpoints.

    directory, every_s, extra: the arguments `checkpoint_dir`, `checkpoint_every_s` and `extra_state`. Raises
    LearnerError for invalid values.
    """
    place, interval_s, objects = _directory(directory), _interval_s(every_s), _objects(extra)
    if place is None:
        if objects:
            raise LearnerError("extra_state is saved only in checkpoints: pass checkpoint_dir= too")
        return None
    return CheckpointSettings(place, interval_s, objects)


def _directory(given: object) -> Path | None:
    if given is None:
        return None
    try:
        text = None if isinstance(given, bytes) else os.fspath(given)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not text or "\0" in text:  # "" would be the current directory
        problem = "empty" if text == "" else "not a path"
        raise LearnerError(f"checkpoint_dir={given!r} is {problem}: pass a directory, or None to save no checkpoints")
    return Path(text)


def _interval_s(given: object) -> float | None:
    if given is None:
        return None
    try:
        seconds = math.nan if isinstance(given, str | bool) else float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise LearnerError(
            f"checkpoint_every_s={given!r} is not a positive number of seconds: pass one, or None to save only on "
            "request"
        )
    return seconds


def _objects(given: object) -> dict[str, HasState]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise LearnerError(f"extra_state is of type {type(given).__name__}: pass a dict that maps names to objects")
    for name, each in given.items():
        if not isinstance(name, str):
            raise LearnerError(f"the key {name!r} of extra_state is of type {type(name).__name__}: use strings as keys")
        if not callable(getattr(each, "state_dict", None)) or not callable(getattr(each, "load_state_dict", None)):
            raise LearnerError(
                f'extra_state["{name}"] is of type {type(each).__name__}, which lacks state_dict() or load_state_dict()'
                ": wrap it in an object with both methods"
            )
    return dict(given)
