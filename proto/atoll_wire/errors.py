"""The one base of errors that a user can mend: the command line shows their single line and no traceback."""

from __future__ import annotations

import importlib.util


class UserError(Exception):
    """One line that names the thing, the fact, and the remedy."""


class SettingsError(UserError):
    """An invalid setting."""


class MissingPackage(UserError):  # noqa: N818 - says what is missing
    """A subcommand needs what comes with an extra."""


def need(subcommand: str, extra: str, *packages: str) -> None:
    """Raises MissingPackage when any of these packages is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        text = f"atoll {subcommand} needs {' and '.join(missing)}: pip install '.[{extra}]' where Atoll's sources are"
        raise MissingPackage(text)
