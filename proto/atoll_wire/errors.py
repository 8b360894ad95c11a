"""The base of errors that a user can fix: the command line shows their single line and no traceback."""

from __future__ import annotations

import importlib.util


class UserError(Exception):
    """An error that the user can fix; the message is one line with the fact, the cause and the fix."""


class SettingsError(UserError):
    """A setting is invalid."""


class MissingPackage(UserError):  # noqa: N818 - says what is missing
    """A subcommand needs packages of an extra that are not installed."""


def need(subcommand: str, extra: str, *packages: str) -> None:
    """Raises MissingPackage when any of these packages is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        text = f"atoll {subcommand} needs {' and '.join(missing)}: pip install '.[{extra}]' where Atoll's sources are"
        raise MissingPackage(text)
