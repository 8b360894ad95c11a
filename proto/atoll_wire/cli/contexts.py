"""Contexts: named connections to cores, in a file that only its owner can read.

The file is `atoll/contexts.json` in XDG_CONFIG_HOME (default ~/.config).
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atoll_wire.errors import UsageError, UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
OTHERS = stat.S_IWGRP | stat.S_IWOTH


class ContextError(UserError):
    """A context does not exist, or the file of contexts cannot be used."""


@dataclass(frozen=True, slots=True)
class CoreContext:
    """The connection to one core. server: HOST:PORT. The other fields equal the options with the same names."""

    server: str
    tls: str | None = None
    token_file: str | None = None
    insecure_plaintext: bool = False

    def options(self) -> dict[str, Any]:
        """Returns the values that the context sets, by option name."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(slots=True)
class Contexts:
    """All contexts by name. current: the name of the context to use by default; empty if there is none."""

    current: str = ""
    contexts: dict[str, CoreContext] = field(default_factory=dict)

    def named(self, name: str) -> CoreContext:
        """Returns a context. Raises ContextError if it does not exist."""
        if not name:
            raise ContextError("there is no current context: choose one with atoll context use")
        if name not in self.contexts:
            known = (
                f"use one of {', '.join(sorted(self.contexts))}" if self.contexts else "add it with atoll context add"
            )
            raise ContextError(f'context "{name}" does not exist: {known}')
        return self.contexts[name]


def path() -> Path:
    """Returns the path of the file. The file may not exist."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111 - works without a home
    return Path(config) / "atoll" / "contexts.json"


def load() -> Contexts:
    """Returns the contexts in the file, or no contexts if the file does not exist.

    Raises ContextError for an invalid file, and for a file that other users can change.
    """
    if not os.access(path().parent, os.X_OK):  # it does not exist, or HOME is another user's, as after sudo
        return Contexts()
    try:
        if path().stat().st_mode & OTHERS:
            raise ContextError(f"{path()} can be changed by other users: check its contents, then run chmod 600 on it")
        return _contexts(json.loads(path().read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContextError(f"{path()} cannot be read ({error}): correct it, or remove it and add contexts") from error


def _contexts(data: Any) -> Contexts:  # noqa: ANN401 - any JSON value
    """Returns contexts from JSON values. Raises ValueError, KeyError, TypeError or AttributeError if they are invalid.

    This function does not use pydantic, because shell completion calls it and must be fast.
    """
    found = Contexts(data["current"], {name: CoreContext(**each) for name, each in data["contexts"].items()})
    for name, each in found.contexts.items():
        texts = (each.server, each.tls or "", each.token_file or "")
        if not (all(isinstance(text, str) for text in texts) and isinstance(each.insecure_plaintext, bool)):
            raise TypeError(f"a value of context {name!r} has the wrong type")
    if not isinstance(found.current, str):
        raise TypeError('"current" is not a string')
    return found


def check_name(name: str) -> None:
    """Raises UsageError if a context cannot have this name."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a name of a context: use up to 64 letters, digits, '.', '_' or '-'")


def save(contexts: Contexts) -> None:
    """Replaces the file. Raises ContextError if it cannot be written."""
    text = json.dumps(asdict(contexts), indent=2) + "\n"
    try:
        path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path().parent) as folder:
            part = Path(folder) / path().name
            part.touch(mode=0o600)
            with part.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path())
    except OSError as error:
        raise ContextError(
            f"{path()} cannot be written ({error.strerror}): set XDG_CONFIG_HOME to a writable folder"
        ) from error


def chosen(name: str | None) -> dict[str, Any]:
    """Returns the options that a context sets. name: None means the current context, if there is one."""
    contexts = load()
    name = name or contexts.current
    return contexts.named(name).options() if name else {}


def complete(incomplete: str) -> list[str]:
    """Returns the names of contexts for shell completion."""
    return [name for name in load().contexts if name.startswith(incomplete)]
