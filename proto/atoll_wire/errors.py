"""The base class of errors that a user can fix. The command line prints only the message, without a traceback."""

from __future__ import annotations

import importlib.util
from enum import IntEnum


class ExitStatus(IntEnum):
    """The exit statuses of `atoll`. docs/reference/cli.md says what a supervisor should do after each of them."""

    SUCCESS = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    INTERRUPTED = 130


class UserError(Exception):
    """An error that the user can fix. The message states the fact, the cause and the fix on one line.

    exit_status: the status with which `atoll` exits; None for the class's default.
    """

    exit_status = ExitStatus.FAILED

    def __init__(self, text: str, exit_status: ExitStatus | None = None) -> None:
        super().__init__(text)
        self.exit_status = exit_status or self.exit_status


class SettingsError(UserError):
    """A setting is invalid."""


class UsageError(SettingsError):
    """The command line is invalid: an option has an invalid value, or two options cannot be combined."""

    exit_status = ExitStatus.USAGE


class MissingPackage(UserError):  # noqa: N818 - the name says what is missing
    """A subcommand needs packages that are not installed."""


def need(subcommand: str, extra: str, *packages: str) -> None:
    """Raises MissingPackage if any of these packages is not installed. extra: the extra that installs them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        listed = " and ".join((", ".join(missing[:-1]), missing[-1])) if missing[1:] else missing[0]
        text = f"atoll {subcommand} needs {listed}: run pip install '.[{extra}]' in Atoll's source folder"
        raise MissingPackage(text)
