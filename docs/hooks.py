"""What the documentation site takes from the repository when it is built, so that it cannot go stale.

Files beside docs/ that pages link to, the commands as `atoll --help` knows them, the contract, and pictures as part of
their page, where they follow its colours.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

ROOT = Path(__file__).parent.parent
BESIDE = [*ROOT.glob("*.md"), *ROOT.glob("records/*/README.md"), *ROOT.glob("records/*/*.svg")]
HERE, CONTRACT = "repository", "proto/atoll_wire/outer.proto"  # where they are on the site; what reference.md shows
LINK = re.compile(r"(?<=]\()(?![a-z+]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
PICTURE = re.compile(r'<img alt="([^"]*)" src="[^"]*pictures/([a-z-]+)\.svg"[^>]*>')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages of files that lie beside docs/, and the pictures of records."""
    for path in BESIDE:
        place = posixpath.join(HERE, path.relative_to(ROOT).as_posix().replace("/README.md", ".md"))
        files.append(File.generated(config, place, content=path.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts commands and contract in, and leads links to where files are on the site."""
    del config
    markdown = markdown.replace("<!-- commands -->", "\n".join(commands()))
    markdown = markdown.replace("<!-- contract -->", f"```protobuf\n{(ROOT / CONTRACT).read_text()}```")
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
    """Puts pictures into their page, with what they show in words."""
    del page, config, files

    def whole(found: re.Match[str]) -> str:
        picture = (ROOT / "docs" / "pictures" / f"{found[2]}.svg").read_text()
        return picture.replace("<svg ", f'<svg role="img" aria-label="{found[1]}" ', 1).replace("\n\n", "\n")

    return PICTURE.sub(whole, content)


def repository_path(page: str) -> str:
    """Where a page's file lies in the repository."""
    if not page.startswith(f"{HERE}/"):
        return posixpath.join("docs", page)
    path = page.removeprefix(f"{HERE}/")
    return path.replace(".md", "/README.md") if path.startswith("records/") else path


def site_path(target: str) -> str:
    """Where a file of the repository is on the site, if it is there."""
    if target == CONTRACT:
        return "reference.md"
    if target == "docs" or target.startswith("docs/"):
        return target.removeprefix("docs/")
    if (ROOT / target).is_dir():
        return posixpath.join(HERE, f"{target}.md")
    return posixpath.join(HERE, target.replace("/README.md", ".md"))


# ------------------------------------------------------------------------------------------------- commands


def commands() -> Iterator[str]:
    """Every command of `atoll`, with its options in tables."""
    app = typer.Typer(name="atoll")
    for entry in sorted(entry_points(group="atoll.commands"), key=lambda entry: entry.name):
        entry.load()(app)
    yield from described("atoll", typer.main.get_command(app))


def described(name: str, command: TyperCommand | TyperGroup) -> Iterator[str]:
    """A command, or those of a group."""
    if isinstance(command, TyperGroup):
        for part in command.commands.values():
            yield from described(f"{name} {part.name}", part)
        return
    arguments = [each for each in command.params if isinstance(each, TyperArgument)]
    options = [each for each in command.params if isinstance(each, TyperOption) and not each.hidden]
    yield from ("", f"### {name}", "", " ".join((command.help or "").split()), "")
    usage = " ".join([name, *(each.name.upper() for each in arguments), "[OPTIONS]"])
    yield from ("```", usage, "```", "")
    panels = dict.fromkeys(each.rich_help_panel for each in options)
    for panel in sorted(panels, key=lambda panel: panel is not None):
        yield from (f"**{panel}**", "") if panel else ()
        yield from ("| option | meaning [default] | in the environment |", "|---|---|---|")
        for each in (each for each in options if each.rich_help_panel == panel):
            option = " / ".join([*each.opts, *each.secondary_opts])
            variable = each.envvar or f"{name} {each.name}".replace(" ", "_").upper()
            form = f" `{each.metavar}`".replace("|", "\\|") if each.metavar else ""
            yield f"| `{option}`{form} | {text(each.help)}{default(each)} | `{variable}` |"
        yield ""


def default(option: TyperOption) -> str:
    """What an option is without being given, if that says something."""
    value = option.show_default if isinstance(option.show_default, str) else option.default
    if option.required:
        return " Must be given."
    if (not value and value != 0) or value is False or callable(value):
        return ""
    return f" \\[{' '.join(map(str, value)) if isinstance(value, list | tuple) else value}]"


def text(said: str | None) -> str:
    """As a cell of a table takes it."""
    return html.escape(said or "", quote=False).replace("|", "\\|").replace("[", "\\[")
