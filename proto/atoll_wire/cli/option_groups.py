"""Groups of options that several subcommands take: how to reach a core, and the format of the output.

A group is a function whose parameters are the options. `takes` replaces an argument of a subcommand with a group, and
passes the result of the group's function.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll_wire.cli import contexts
from atoll_wire.cli.output import Figures, Format
from atoll_wire.cli.sizes import parse_count, parse_size
from atoll_wire.errors import UsageError, UserError

Group = Callable[..., Any]
REACH = "Connection to a core"
DEFAULT_SERVER = "127.0.0.1:7070"
STDOUT = Path("-")
ORDER = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP", "DEFAULT")  # sources of a value, in order of precedence
FROM_CONTEXT = ORDER.index("DEFAULT_MAP")


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator for a subcommand. groups: the group for each argument to replace."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**values: Any) -> None:  # noqa: ANN401
            function(**values | collected(groups, values))

        own = inspect.signature(function, eval_str=True).parameters.values()
        options = [part for each in own for part in (parameters(groups[each.name]) if each.name in groups else [each])]
        described(run, options)
        return run

    return decorate


def parameters(group: Group) -> list[inspect.Parameter]:
    """Returns the options of a group."""
    return list(inspect.signature(group, eval_str=True).parameters.values())


def collected(groups: Mapping[str, Group], values: dict[str, Any]) -> dict[str, Any]:
    """Moves the options of the groups out of `values`. Returns the argument for each group."""
    return {
        name: group(**{each.name: values.pop(each.name) for each in parameters(group)})
        for name, group in groups.items()
    }


def described(function: Callable[..., None], options: list[inspect.Parameter]) -> None:
    """Gives a function the parameters that typer reads."""
    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in options]
    function.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    function.__annotations__ = {each.name: each.annotation for each in options}


# ------------------------------------------------------------------------------------------------- reaching a core


@dataclass(frozen=True, slots=True)
class Reach:
    """The connection to a core. servers: addresses, HOST:PORT. tls: directory of certificates; None for plain text.

    token: the operator's token; empty if there is none. plaintext: whether plain text beyond loopback is allowed.
    """

    servers: tuple[str, ...]
    tls: Path | None
    token: str
    plaintext: bool


def _use_context(ctx: typer.Context, name: str | None) -> str | None:
    """Makes the values of a context the defaults of the other options."""
    if not ctx.resilient_parsing:
        ctx.default_map = contexts.chosen(name)
    return name


ContextName = Annotated[
    str | None,
    typer.Option(
        "--context",
        help="Context to use (see atoll context). Default: the current one.",
        metavar="NAME",
        envvar="ATOLL_CONTEXT",
        rich_help_panel=REACH,
        is_eager=True,
        callback=_use_context,
        autocompletion=contexts.complete,
    ),
]
Server = Annotated[
    str,
    typer.Option(
        help="Address of a core or a front.", metavar="HOST:PORT", envvar="ATOLL_SERVER", rich_help_panel=REACH
    ),
]
Servers = Annotated[
    list[str],
    typer.Option(
        help="Address of a core or a front. You may repeat this option.",
        metavar="HOST:PORT",
        envvar="ATOLL_SERVER",
        rich_help_panel=REACH,
    ),
]
Tls = Annotated[
    Path | None,
    typer.Option(
        "--tls", help="Directory of certificates (see atoll certs).", envvar="ATOLL_TLS", rich_help_panel=REACH
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        help="Operator's token (see atoll token). Other users of this machine can see it: prefer --token-file.",
        envvar="ATOLL_TOKEN",
        rich_help_panel=REACH,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File that holds the operator's token.", envvar="ATOLL_TOKEN_FILE", rich_help_panel=REACH),
]
Plaintext = Annotated[
    bool,
    typer.Option("--insecure-plaintext", help="Allow an address beyond loopback without TLS.", rich_help_panel=REACH),
]


def core(
    ctx: typer.Context,
    server: Server = DEFAULT_SERVER,
    context: ContextName = None,
    tls: Tls = None,
    token: Token = None,
    token_file: TokenFile = None,
    insecure_plaintext: Plaintext = False,
) -> Reach:
    """Group: one core or front. Options take precedence over environment variables, and these over the context."""
    first = server.split()[:1]  # ATOLL_SERVER may contain several addresses, for commands that try them in turn
    return _reach(ctx, tuple(first) or (server,), context, tls, token, token_file, insecure_plaintext)


def cores(
    ctx: typer.Context,
    server: Servers = [DEFAULT_SERVER],  # noqa: B006 - typer copies it
    context: ContextName = None,
    tls: Tls = None,
    token: Token = None,
    token_file: TokenFile = None,
    insecure_plaintext: Plaintext = False,
) -> Reach:
    """Group: several cores or fronts, which are tried in turn."""
    return _reach(ctx, tuple(server), context, tls, token, token_file, insecure_plaintext)


def _reach(
    ctx: typer.Context,
    servers: tuple[str, ...],
    context: str | None,
    tls: Path | None,
    token: str | None,
    token_file: Path | None,
    plaintext: bool,
) -> Reach:
    if context is not None and _rank(ctx, "context") < _rank(ctx, "server") == ORDER.index("ENVIRONMENT"):
        raise UsageError("--context and ATOLL_SERVER both name a core: unset ATOLL_SERVER, or omit --context")
    ranks = {name: _rank(ctx, name) for name, value in (("token", token), ("token_file", token_file)) if value}
    if len(ranks) == 2 and len(set(ranks.values())) == 1:
        raise UsageError("--token and --token-file cannot be combined: give only one of them")
    first = min(ranks, key=ranks.__getitem__, default="")
    if first and ranks[first] == FROM_CONTEXT != _rank(ctx, "server"):
        first = ""  # a context's token is only for the context's own server
    if first == "token_file" and token_file is not None:
        token = read_token(token_file)
    if _rank(ctx, "insecure_plaintext") == FROM_CONTEXT != _rank(ctx, "server"):
        plaintext = False  # the same holds for this permission
    return Reach(servers, tls, token if first and token else "", plaintext)


def _rank(ctx: typer.Context, name: str) -> int:
    source = ctx.get_parameter_source(name)
    return len(ORDER) if source is None else ORDER.index(source.name)


def read_token(path: Path) -> str:
    """Returns the token in a file, without white space around it. Raises UserError if there is no token."""
    try:
        found = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {path} cannot be read ({error}): give the file with your token") from error
    if not found:
        raise UserError(f"--token-file {path} is empty: write the token that `atoll token` printed to it")
    return found


# ------------------------------------------------------------------------------------------------- output


Output = Annotated[
    Format,
    typer.Option(
        "--output", "-o", help="Format of the output. wide: a table with all columns. jsonl: one object per line."
    ),
]


def output(
    output: Output = Format.TABLE,
    json: Annotated[bool, typer.Option("--json", help="Short for --output json.")] = False,
) -> Format:
    """Group: the format of the output."""
    if json and output not in {Format.TABLE, Format.JSON}:
        raise UsageError(f"--json and --output {output} cannot be combined: give only one of them")
    return Format.JSON if json else output


def figures(
    output: Output = Format.TABLE,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Write the figures to this file as JSON. -: print only JSON.", metavar="PATH"),
    ] = None,
) -> Figures:
    """Group: the destinations of the figures of a measurement or forecast."""
    if json != STDOUT:
        return Figures(output, json)
    if output not in {Format.TABLE, Format.JSON}:
        raise UsageError(f"--json - and --output {output} cannot be combined: give only one of them")
    return Figures(Format.JSON)


def size(text: str | int) -> int:
    """Parses the value of an option: a size in bytes, such as 64GiB. A default is already a number."""
    return _read(parse_size, text)


def count(text: str | int) -> int:
    """Parses the value of an option: a count, such as 12B."""
    return _read(parse_count, text)


def _read(parse: Callable[[str], int], text: str | int) -> int:
    try:
        return parse(text) if isinstance(text, str) else text
    except ValueError as error:
        raise typer.BadParameter(f"{text} is {error}") from error


def confirm(question: str, subcommand: str, *, yes: bool) -> None:
    """Asks before an action, unless `yes`. Ends the command if the answer is no.

    Raises UsageError if there is no terminal to ask on.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"atoll {subcommand} asks for a confirmation, but stdin is no terminal: add --yes")
    typer.confirm(question, abort=True)
