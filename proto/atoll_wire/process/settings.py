"""Settings classes, and the command-line options that are generated from them.

A setting is declared once, as a field with a type, a range, a default and a description. `command` generates an option
for each field with a description: `--name`, the environment variable ATOLL_COMMAND_NAME, and a line of `--help`. The
field's validation applies to all of these sources. A field without a description is internal.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, Union, get_args, get_origin

import typer
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from rich.markup import escape

from atoll_wire.cli import option_groups
from atoll_wire.cli.option_groups import Group
from atoll_wire.cli.sizes import COUNT_UNITS, UNITS, parse_count, parse_size, shortest
from atoll_wire.errors import UsageError
from atoll_wire.process.json_output import take_over_stderr
from atoll_wire.process.logs import configure
from atoll_wire.security.transport import TransportSecurity

TYPE_NAMES = {int: "int", float: "float", Path: "path"}
REACH = "Certificates"


@dataclass(frozen=True, slots=True)
class Option:
    """Overrides parts of a setting's option. An empty value keeps the default of the field and its class.

    name: the option's name without the leading dashes. metavar: the placeholder of the value in help. variable: the
    environment variable. panel: the heading in help.
    """

    name: str = ""
    metavar: str = ""
    variable: str = ""
    panel: str = ""


class Settings(BaseModel):
    """Base of all settings classes. command: the subcommand of `atoll`. panel: the heading of the options in help.

    prefix: prefix of the options' names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    command: ClassVar[str] = ""
    panel: ClassVar[str] = ""
    prefix: ClassVar[str] = ""

    @classmethod
    def of(cls, **values: Any) -> Self:  # noqa: ANN401
        """Returns settings with these values, which may be strings. Raises UsageError for an invalid value."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise _named(cls, error) from error


def _bytes(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


def _count(value: object) -> object:
    return parse_count(value) if isinstance(value, str) else value


BYTES, COUNT = BeforeValidator(_bytes), BeforeValidator(_count)
Bytes: TypeAlias = Annotated[int, BYTES]  # written as 65536 or 64KiB
Count: TypeAlias = Annotated[int, COUNT]  # written as 12000000000 or 12B
Address: TypeAlias = Annotated[str, Option(metavar="HOST:PORT")]


class Certificates(Settings):
    """The certificates of a process, or permission to use plain text."""

    tls: Annotated[
        Path | None,
        Field(description="Directory of certificates (see atoll certs)."),
        Option(variable="ATOLL_TLS", panel=REACH),
    ] = None
    insecure_plaintext: Annotated[
        bool, Field(description="Allow an address beyond loopback without TLS."), Option(panel=REACH)
    ] = False

    @property
    def security(self) -> TransportSecurity:
        """The object that opens connections with these settings."""
        return TransportSecurity(self.tls, self.insecure_plaintext)


class Metrics(Settings):
    """The address where a process serves its metrics."""

    metrics_listen: Annotated[
        Address | None, Field(description="Address of the Prometheus metrics server. Default: no server.")
    ] = None
    metrics_plaintext: Annotated[bool, Field(description="Allow metrics beyond loopback over plain HTTP.")] = False


class Logs(Settings):
    """The level and the format of a process's log."""

    log_json: Annotated[
        bool, Field(description="Log one JSON object per line on stderr, including warnings and errors of libraries.")
    ] = False
    log_level: Annotated[str, Field(description="Lowest level to log: debug, info, warning or error.")] = "info"

    def begin(self) -> None:
        """Configures the process's log. Raises UserError for an unknown level."""
        configure(self.log_level, json=self.log_json)
        if self.log_json:
            take_over_stderr()


# ------------------------------------------------------------------------------------------------- declared settings


@dataclass(frozen=True, slots=True)
class Declared:
    """A setting with a command-line option.

    path: the field names from the outermost settings class to this setting. name: the option's name.
    """

    path: tuple[str, ...]
    info: FieldInfo
    name: str
    option: Option

    @property
    def flag(self) -> str:
        """The option with leading dashes, such as --inner-steps."""
        return f"--{self.name}"

    @property
    def key(self) -> str:
        """The option's name as an identifier, which is also the last part of the environment variable."""
        return self.name.replace("-", "_")

    @property
    def kind(self) -> Any:  # noqa: ANN401 - a type, or an object of typing
        """The setting's type, without None and Annotated."""
        kind = self.info.annotation
        if get_origin(kind) in {Union, types.UnionType}:
            kind = next(each for each in get_args(kind) if each is not type(None))
        return get_args(kind)[0] if get_origin(kind) is Annotated else kind

    @property
    def several(self) -> bool:
        """Whether users may repeat the option."""
        return get_origin(self.kind) is tuple

    @property
    def switch(self) -> bool:
        """Whether the option takes no value."""
        return self.kind is bool

    @property
    def default(self) -> str:
        """The default as a string for the command line. Empty for None, False and empty tuples."""
        value = self.info.default
        if self.info.is_required() or value is None or value is False or value == ():
            return ""
        return " ".join(map(self._shown, value)) if self.several else self._shown(value)

    @property
    def form(self) -> str:
        """The placeholder for the option's value in `--help`."""
        return self.option.metavar or f"<{self._quantity or TYPE_NAMES.get(self.kind, 'text')}>"

    @property
    def range(self) -> str:
        """The allowed values, such as "1 to 100000". Empty if all values of the type are allowed."""
        kind = self.kind
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        if isinstance(kind, type) and issubclass(kind, Enum):
            choices = tuple(each.lower() for each in kind.__members__)
        if choices:
            return " or ".join((", ".join(choices[:-1]), choices[-1]))
        bound = {
            name: self._shown(getattr(each, name))
            for each in self.info.metadata
            for name in ("ge", "gt", "le", "lt")
            if getattr(each, name, None) is not None
        }
        low = bound.get("ge") or (f"above {bound['gt']}" if "gt" in bound else "")
        high = bound.get("le") or (f"below {bound['lt']}" if "lt" in bound else "")
        return f"{low} to {high}" if low and high else high or (f"at least {low}" if "ge" in bound else low)

    @property
    def help(self) -> str:
        """The whole help text: description, range, and whether users may repeat the option."""
        several = "You may repeat this option." if self.several else ""
        return " ".join(filter(None, (self.info.description, several, self.range and f"({self.range})")))

    def _shown(self, value: object) -> str:
        if isinstance(value, Enum):
            return value.name.lower()
        if isinstance(value, float):
            return f"{value:g}"
        if isinstance(value, int) and self._quantity:
            return shortest(value, UNITS if self._quantity == "bytes" else COUNT_UNITS)
        return str(value)

    @property
    def _quantity(self) -> str:
        """The kind of the number, bytes or count, if users may write it with a unit. Otherwise empty."""
        found = set(filter(lambda each: isinstance(each, BeforeValidator), _metadata(self.info)))
        return "bytes" if BYTES in found else "count" if COUNT in found else ""


@cache
def declared(cls: type[Settings]) -> tuple[Declared, ...]:
    """Returns all settings of a class and its nested classes that are options."""
    return tuple(_declared(cls, ()))


def _declared(cls: type[Settings], path: tuple[str, ...]) -> Iterator[Declared]:
    """Yields a class's own fields before the fields of its bases."""
    for field, info in sorted(cls.model_fields.items(), key=lambda each: each[0] not in cls.__annotations__):
        if isinstance(info.annotation, type) and issubclass(info.annotation, Settings):
            yield from _declared(info.annotation, (*path, field))
        elif info.description:
            said = next((each for each in _metadata(info) if isinstance(each, Option)), Option())
            name = "-".join(filter(None, (cls.prefix, said.name or field.replace("_", "-"))))
            panel = said.panel or cls.panel
            yield Declared((*path, field), info, name, Option(name, said.metavar, said.variable, panel))


def _metadata(info: FieldInfo) -> Iterator[object]:
    """Yields the metadata of a field and of the types in its union, such as `Address | None`."""
    yield from info.metadata
    for part in get_args(info.annotation):
        yield from getattr(part, "__metadata__", ())


def _named(cls: type[Settings], error: ValidationError) -> UsageError:
    first = error.errors()[0]
    names = tuple(each for each in first["loc"] if isinstance(each, str))
    flag = next((each.flag for each in declared(cls) if each.path == names[: len(each.path)]), ".".join(names))
    wrong = first["msg"].removeprefix("Value error, ")
    return UsageError(f"{flag} {first['input']}: {wrong[0].lower()}{wrong[1:]}; see atoll {cls.command} --help")


# ------------------------------------------------------------------------------------------------- the command line


@dataclass(frozen=True, slots=True)
class Given:
    """Makes `command` pass only the settings that the user gave, as a dict of checked values."""

    of: type[Settings]


def command(function: Callable[..., None], *taken: type[Settings] | Given, **groups: Group) -> Callable[..., None]:
    """Returns a typer function with an option for each setting.

    taken: the classes of the arguments in order. groups: further arguments by name; see `option_groups`.
    """
    classes = [each.of if isinstance(each, Given) else each for each in taken]

    def run(**values: Any) -> None:  # noqa: ANN401
        more = option_groups.collected(groups, values)
        function(*(_collected(each, values) for each in taken), **more)

    all_of = [
        (each, isinstance(which, Given)) for which, cls in zip(taken, classes, strict=True) for each in declared(cls)
    ]
    all_of.sort(key=lambda each: len(each[0].path))  # nested settings, such as limits, come last
    options = [_parameter(each, only_given=only) for each, only in all_of]
    option_groups.described(
        run, options + [each for group in groups.values() for each in option_groups.parameters(group)]
    )
    return run


def _parameter(of: Declared, *, only_given: bool) -> inspect.Parameter:
    """Returns a typer parameter: a string, or a bool for switches. only_given: whether the default is None."""
    start: Any = None
    kind: Any = bool if of.switch else list[str] if of.several else str
    if of.info.is_required():
        start = inspect.Parameter.empty
    elif not only_given and (of.switch or of.default):
        start = of.info.default if of.switch else of.default.split() if of.several else of.default
    if start is None:
        kind = kind | None
    option = typer.Option(
        f"{of.flag}/--no-{of.name}" if of.switch and start is not False else of.flag,
        help=escape(of.help),
        metavar=None if of.switch else of.form,
        envvar=of.option.variable or None,
        rich_help_panel=of.option.panel or None,
        show_default=of.default if only_given and of.default else True,
    )
    return inspect.Parameter(of.key, inspect.Parameter.KEYWORD_ONLY, default=start, annotation=Annotated[kind, option])


def _collected(which: type[Settings] | Given, values: dict[str, Any]) -> Settings | dict[str, Any]:
    """Returns one argument of a command, from the values of all options. Raises UsageError."""
    cls, tree = which.of if isinstance(which, Given) else which, dict[str, Any]()
    for each in declared(cls):
        if (value := values[each.key]) is not None:
            place = tree
            for name in each.path[:-1]:
                place = place.setdefault(name, {})
            place[each.path[-1]] = value
    settings = cls.of(**tree)
    return {name: getattr(settings, name) for name in tree} if isinstance(which, Given) else settings
