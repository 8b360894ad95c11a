"""The output of subcommands: tables for people, and JSON for programs.

JSON has one set of rules. Numbers are numbers, whatever their size. Default and empty values are present. Absent
values, and numbers that JSON cannot represent (NaN), are null. Names of enum values are lower-case, as in the tables.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table

from atoll_wire.errors import UserError

if TYPE_CHECKING:
    from google.protobuf.message import Message

WIDE = 200


class Format(StrEnum):
    """The format of a subcommand's output."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"

    @property
    def is_json(self) -> bool:
        """Whether programs read the output."""
        return self in {Format.JSON, Format.JSONL}


def show(found: Any, form: Format, table: Callable[[], RenderableType]) -> None:  # noqa: ANN401 - any JSON value
    """Prints JSON values or a table.

    found: the values; in jsonl, each element of a list becomes one line. table: function that returns the table; called
    only if a table is printed.
    """
    if form is Format.JSONL:
        for each in found if isinstance(found, list) else [found]:
            print(json.dumps(finite(each), allow_nan=False), flush=True)
    elif form is Format.JSON:
        print(json.dumps(finite(found), indent=2, allow_nan=False))
    else:
        console(form).print(table())


def show_lines(found: Any, form: Format, lines: Iterable[str]) -> None:  # noqa: ANN401 - any JSON value
    """Prints JSON values, or lines of text if the format is a table."""
    if form.is_json:
        show(found, form, lambda: "")
        return
    for line in lines:
        print(line, flush=True)


@dataclass(frozen=True, slots=True)
class Figures:
    """The destinations of a command's figures. form: format on standard output. path: JSON file, or None."""

    form: Format = Format.TABLE
    path: Path | None = None

    def check(self) -> None:
        """Raises UserError if the file cannot be written. Call this before the work that yields the figures."""
        if self.path is not None:
            _write(self.path, "")

    def show(self, found: Any, table: Callable[[], RenderableType]) -> None:  # noqa: ANN401 - any JSON value
        """Prints and writes JSON values. Raises UserError if the file cannot be written."""
        self.write(found)
        show(found, self.form, table)

    def write(self, found: Any) -> None:  # noqa: ANN401 - any JSON value
        """Writes JSON values to the file, if there is one. Raises UserError if the file cannot be written."""
        if self.path is not None:
            _write(self.path, json.dumps(finite(found), indent=2, allow_nan=False) + "\n")


def _write(path: Path, text: str) -> None:
    try:
        with path.open("a" if not text else "w") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"--json {path} cannot be written ({error.strerror}): give another path") from error


def console(form: Format = Format.TABLE) -> Console:
    """Returns a console as wide as the terminal.

    In a pipe or a log, and in the format wide, the console is at least WIDE columns wide, so that no table is cut.
    """
    made = Console(emoji=False)  # else a fingerprint such as 7e:cd:94 would contain a picture
    if made.is_terminal and form is not Format.WIDE:
        return made
    return Console(width=max(WIDE, made.width), emoji=False)


def plain_table(title: str | None = None, *, show_header: bool = True) -> Table:
    """Returns an empty table without borders, because borders take up a quarter of 80 columns."""
    return Table(
        title=title, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=show_header,
        title_justify="left", caption_justify="left",
    )  # fmt: skip


def columns(names: Sequence[str], narrow: Sequence[str], form: Format, rows: Iterable[Sequence[str]]) -> Table:
    """Returns a table without borders. names: all columns. narrow: the columns that fit 80 characters.

    rows: the cells, in the order of `names`.
    """
    table = plain_table()
    kept = [number for number, name in enumerate(names) if form is Format.WIDE or name in narrow]
    for number in kept:
        table.add_column(names[number], overflow="fold")
    for row in rows:
        table.add_row(*(row[number] for number in kept))
    return table


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """Returns pairs of a name and a value as a table without headers."""
    table = plain_table(show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def as_data(message: Message) -> dict[str, Any]:
    """Returns a protobuf message as JSON values. protobuf's own function turns 64-bit integers into strings."""
    return {
        field.name: _data(field, getattr(message, field.name))
        if not field.has_presence or message.HasField(field.name)
        else None
        for field in message.DESCRIPTOR.fields
    }


def _data(field: Any, value: Any) -> Any:  # noqa: ANN401 - a field's descriptor, and its value
    if isinstance(value, Mapping):
        of = field.message_type.fields_by_name["value"]
        return {str(key): _data(of, each) for key, each in sorted(value.items())}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_data(field, each) for each in value]
    if field.message_type is not None:
        return as_data(value)
    return _enum_name(field.enum_type, value) if field.enum_type is not None else value


def _enum_name(kind: Any, value: int) -> str | int:  # noqa: ANN401 - an enum's descriptor
    """Returns a value's name, such as "merged" for FATE_MERGED of Fate, or the number of an unknown value."""
    known = kind.values_by_number.get(value)
    return known.name.removeprefix(f"{kind.name.upper()}_").lower() if known is not None else value


def finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Returns JSON values with null in place of numbers that JSON cannot represent."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
