"""Subcommands that load their options only when they run or show help, so that `atoll --help` is fast."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import typer
from typer.core import TyperCommand

Command = Callable[..., None]


def add(app: typer.Typer, name: str, text: str, load: Callable[[], Command]) -> None:
    """Adds a subcommand. text: the help text. load: function that imports dependencies and returns the command."""

    @cache
    def loaded() -> Any:  # noqa: ANN401 - typer's command
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(name)(load())
        return typer.main.get_command(alone)

    class Lazy(TyperCommand):
        """A subcommand that reads its parameters and its function from the command that `load` returns."""

        @property
        def params(self) -> list[Any]:
            return loaded().params  # type: ignore[no-any-return]

        @params.setter
        def params(self, _: Any) -> None:  # noqa: ANN401 - those of the empty function below
            """Ignores what typer's constructor sets: the parameters of the empty function below."""

        @property
        def callback(self) -> Command:
            return loaded().callback  # type: ignore[no-any-return]

        @callback.setter
        def callback(self, _: Any) -> None:  # noqa: ANN401 - the empty function below
            """Ignores what typer's constructor sets: the empty function below."""

    def nothing() -> None:
        """Stands in for the function until it is loaded."""

    app.command(name, cls=Lazy, help=text)(nothing)
