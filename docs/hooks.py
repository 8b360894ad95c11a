"""Hooks of MkDocs: parts of the site that are generated from the repository, so that they follow the code.

Generated parts are the files outside docs/ that pages link to, the commands, the run settings, the HTTP API and the
gRPC contract. Pictures are inlined, so that they follow the colours of their page.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import typer
from atoll_dashboard.web.app import application
from atoll_server.settings import RunSettings
from atoll_wire.process.settings import declared
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

ROOT = Path(__file__).parent.parent
OUTSIDE = [
    *ROOT.glob("*.md"),
    ROOT / "CITATION.cff",
    ROOT / "LICENSE",
    *ROOT.glob("records/*/README.md"),
    *ROOT.glob("records/**/*.svg"),
    *ROOT.glob("records/**/*.png"),
    *ROOT.glob("records/**/*.json"),
]
HERE = "repository"  # their folder on the site
CHART, TABLE = "k8s/atoll/values.yaml", ("| value | default | meaning |", "|---|---|---|")
VALUE = re.compile(r"( *)(\w+):(?: (?! *#)(.*?))?(?: *# (.*))?")
CONTRACT, CONTRACT_PAGE = "proto/atoll_wire/outer.proto", "reference/grpc.md"
LINK = re.compile(r"(?<=]\()(?![a-z+]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
PICTURE = re.compile(r'<img alt="([^"]*)" src="[^"]*pictures/([a-z-]+)\.svg"[^>]*>')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files outside docs/: pages, and the records' pictures and figures."""
    for path in OUTSIDE:
        place = posixpath.join(HERE, path.relative_to(ROOT).as_posix().replace("/README.md", ".md"))
        files.append(File.generated(config, place, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Inserts generated parts at their markers, and points links at the files' paths on the site."""
    del config
    if page.file.src_uri == CONTRACT_PAGE:
        markdown += f"\n```protobuf\n{(ROOT / CONTRACT).read_text().rstrip()}\n```\n"
    here = page.file.src_uri
    folder = posixpath.dirname(repository_path(here))

    def lead(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        place = site_path(target)
        if files.get_file_from_path(place) is None:
            return found[0]
        return posixpath.relpath(place, posixpath.dirname(here) or ".") + (found[2] or "")

    return LINK.sub(lead, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Inlines pictures, with their alternative text as a label."""
    del page, config, files

    def whole(found: re.Match[str]) -> str:
        picture = (ROOT / "docs" / "pictures" / f"{found[2]}.svg").read_text()
        return picture.replace("<svg ", f'<svg role="img" aria-label="{found[1]}" ', 1).replace("\n\n", "\n")

    return PICTURE.sub(whole, content)


def repository_path(page: str) -> str:
    """The repository path of a page's file."""
    if not page.startswith(f"{HERE}/"):
        return posixpath.join("docs", page)
    path = page.removeprefix(f"{HERE}/")
    return path.replace(".md", "/README.md") if path.startswith("records/") else path


def site_path(target: str) -> str:
    """The site path for a path in the repository. The site need not have such a file."""
    if target == CONTRACT:
        return CONTRACT_PAGE
    if target == "docs" or target.startswith("docs/"):
        return target.removeprefix("docs/")
    if (ROOT / target).is_dir():
        return posixpath.join(HERE, f"{target}.md")
    return posixpath.join(HERE, target.replace("/README.md", ".md"))


# ------------------------------------------------------------------------------------------------- commands


def commands() -> Iterator[str]:
    """Yields all commands of `atoll`, with their options in tables."""
    app = typer.Typer(name="atoll")
    for entry in sorted(entry_points(group="atoll.commands"), key=lambda entry: entry.name):
        entry.load()(app)
    yield from described("atoll", typer.main.get_command(app))


def described(name: str, command: TyperCommand | TyperGroup) -> Iterator[str]:
    """Yields a command, or the commands of a group."""
    if isinstance(command, TyperGroup):
        for part in command.commands.values():
            yield from described(f"{name} {part.name}", part)
        return
    arguments = [each for each in command.params if isinstance(each, TyperArgument)]
    options = [each for each in command.params if isinstance(each, TyperOption) and not each.hidden]
    yield from ("", f"### {name}", "", " ".join((command.help or "").split()), "")
    usage = " ".join([name, *(each.name.upper() for each in arguments), "[OPTIONS]"])
    yield from ("```text", usage, "```", "")
    panels = dict.fromkeys(each.rich_help_panel for each in options)
    for panel in sorted(panels, key=lambda panel: panel is not None):
        yield from (f"**{panel}**", "") if panel else ()
        yield from ("| option | meaning [default] | environment variable |", "|---|---|---|")
        for each in (each for each in options if each.rich_help_panel == panel):
            option = " / ".join([*each.opts, *each.secondary_opts])
            variable = each.envvar or f"{name} {each.name}".replace(" ", "_").upper()
            form = f" `{each.metavar}`".replace("|", "\\|") if each.metavar else ""
            yield f"| `{option}`{form} | {text(each.help)}{default(each)} | `{variable}` |"
        yield ""


def default(option: TyperOption) -> str:
    """The table's text for an option's default, or for a required option. Empty if the option is off by default."""
    value = option.show_default if isinstance(option.show_default, str) else option.default
    if option.required:
        return " Required."
    if (not value and value != 0) or value is False or callable(value):
        return ""
    if value is True:
        return " \\[on]"
    return f" \\[{' '.join(map(str, value)) if isinstance(value, list | tuple) else value}]"


def text(said: str | None) -> str:
    """A string as the content of a table cell."""
    return html.escape(" ".join((said or "").split()), quote=False).replace("|", "\\|").replace("[", "\\[")


# ------------------------------------------------------------------------------------------------- run settings


def run_settings() -> Iterator[str]:
    """Yields the table of the settings that the core stores with a run."""
    yield from ("| option | value | default | meaning |", "|---|---|---|---|")
    for each in declared(RunSettings):
        values = each.range or ("on or off" if each.switch else each.form.strip("<>"))
        meaning = (each.info.description or "").removesuffix(".")
        yield f"| `{each.flag}` | {text(values)} | {text(each.default) or 'off'} | {text(meaning)} |"


# ------------------------------------------------------------------------------------------------- chart


def chart_values() -> Iterator[str]:
    """Yields tables of the chart's values from the comments in values.yaml, one table per component."""
    path, comment, known = list[str](), list[str](), dict[str, str]()
    yield from ("### All components", "", *TABLE)
    for line in (ROOT / CHART).read_text().splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.lstrip("# "))
            continue
        if (found := VALUE.fullmatch(line)) is not None:
            indent, name, value, trailing = found.groups()
            path[len(indent) // 2 :] = [name]
            said = text(" ".join([*comment, trailing or ""]))
            key = ".".join(path[1:])
            if len(path) == 1 and value is None:
                yield from ("", f"### {name}", "", said, "", *TABLE)
            elif value is not None or said:
                shown = "" if value is None else f"`{value}`".replace("|", "\\|")
                meaning = said or known.get(key, "")
                known.setdefault(key, meaning)
                yield f"| `{'.'.join(path)}` | {shown} | {meaning[:1].upper()}{meaning[1:]} |"
        comment.clear()


# ------------------------------------------------------------------------------------------------- HTTP


def http() -> Iterator[str]:
    """Yields the routes of the dashboard's API, with the objects that they accept and return."""
    api = application(None, ()).openapi()  # type: ignore[arg-type]  # only a request needs the feed
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            yield from ("", f"### {method.upper()} {path}", "", text(route["description"]), "")
            yield from _parameters(route.get("parameters", []))
            if "requestBody" in route:
                yield from (f"Body: {_kind(route['requestBody']['content']['application/json']['schema'])}.", "")
            answer = route["responses"]["200"].get("content", {}).get("application/json", {}).get("schema", {})
            kind = _kind(answer) if answer else "stream"
            yield from (f"Returns {'a ' if kind.startswith(('list', 'stream')) else ''}{kind}.", "")
    yield from ("", "## Objects", "")
    for name, schema in sorted(api["components"]["schemas"].items()):
        if not name.endswith("ValidationError"):
            yield from _object(name, schema)


def _parameters(parameters: list[dict[str, Any]]) -> Iterator[str]:
    if not parameters:
        return
    yield from ("| parameter | place | type | default |", "|---|---|---|---|")
    for each in parameters:
        schema = each["schema"]
        start = "required" if each.get("required") else _shown(schema.get("default"))
        yield f"| `{each['name']}` | {each['in']} | {_kind(schema)}{_bounds(schema)} | {start} |"
    yield ""


def _object(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield from (f"### {name}", "", text(schema.get("description")), "")
    if "enum" in schema:
        yield from (f"One of {', '.join(map(_shown, schema['enum']))}.", "")
        return
    yield from ("| field | type |", "|---|---|")
    for field, of in schema["properties"].items():
        yield f"| `{field}` | {_kind(of)}{_bounds(of)} |"
    yield ""


def _kind(schema: dict[str, Any]) -> str:
    """The type of a value, with a link if it is an object."""
    match schema:
        case {"$ref": reference}:
            name = reference.rpartition("/")[2]
            kind = f"[{name}](#{name.lower()})"
        case {"anyOf": kinds}:
            kind = " or ".join(map(_kind, kinds))
        case {"enum": values}:
            kind = ", ".join(map(_shown, values))
        case {"type": "array", "items": items}:
            kind = f"list of {inner}" if " or " not in (inner := _kind(items)) else f"list of ({inner})"
        case {"type": "object", "additionalProperties": dict(values)}:
            kind = f"object with values of type {_kind(values)}"
        case _:
            kind = str(schema.get("type", "any"))
    return kind


def _bounds(schema: dict[str, Any]) -> str:
    low, high = (
        schema.get(each, schema.get(length)) for each, length in (("minimum", "minLength"), ("maximum", "maxLength"))
    )
    found = f"{low} to {high}" if None not in (low, high) else f"at most {high}" if low is None else f"at least {low}"
    return f" ({found}{' characters' if 'maxLength' in schema else ''})" if (low, high) != (None, None) else ""


def _shown(value: object) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value not in (None, "") else ""


# ------------------------------------------------------------------------------------------------- pages in docs/


GENERATED: dict[str, Callable[[], Iterator[str]]] = {
    "reference/cli.md": commands,
    "reference/settings.md": run_settings,
    "reference/http.md": http,
    "reference/chart.md": chart_values,
}
PART = re.compile(r"(?<=<!-- generated by `make reference` -->\n).*(?=<!-- end of the generated part -->)", re.DOTALL)


def generated(name: str) -> str:
    """Returns a page of GENERATED with its generated part renewed."""
    part = re.sub(r"\n{3,}", "\n\n", "\n".join(["", *GENERATED[name](), ""]).replace(" \n", "\n"))
    return PART.sub(lambda _: part, (ROOT / "docs" / name).read_text())


if __name__ == "__main__":
    for page in GENERATED:
        (ROOT / "docs" / page).write_text(generated(page))
