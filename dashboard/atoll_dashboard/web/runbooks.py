"""The runbooks as a web page. The `runbook_url` of an alert opens the alert's section."""

from __future__ import annotations

import functools
import html
import re
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

PACKAGE = Path(__file__).parent.parent
# A wheel contains a copy of the runbooks. In a checkout, they are part of the documentation.
SOURCES = (PACKAGE / "runbooks.md", PACKAGE.parent.parent / "docs/operate/runbooks.md")
TEMPLATE = PACKAGE / "page/runbooks.html"
DOCUMENTATION = "docs/operate/"
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
TAB = re.compile(r'^=== "(?P<label>[^"]+)"\n(?P<body>(?:\n|    .*\n)+)', re.MULTILINE)


@functools.cache
def runbooks_page() -> str:
    """Returns the page as HTML. Raises FileNotFoundError if the installation has no runbooks.md."""
    source = next((path for path in SOURCES if path.is_file()), None)
    if source is None:
        raise FileNotFoundError(f"{SOURCES[0]} is missing: install the Atoll wheel again")
    title, contents, body = render(source.read_text(encoding="utf-8"))
    page = TEMPLATE.read_text(encoding="utf-8")
    return page.replace("{title}", title).replace("{contents}", contents).replace("{body}", body)


def render(markdown: str) -> tuple[str, str, str]:
    """Returns the title, the list of links to sections, and the body, each as HTML.

    The anchor of a second-level heading is its text in lower case. Raw HTML in the source is shown as text.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    text = TAB.sub(_without_tab, COMMENT.sub("", markdown))
    tokens = parser.parse(text)
    title, contents = "Runbooks", list[str]()
    kept = list[Token]()
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token.type == "heading_open" and token.tag == "h1":
            title = html.escape(tokens[at + 1].content)
            at += 3  # the template shows the title
            continue
        if token.type == "heading_open" and token.tag == "h2":
            name = tokens[at + 1].content
            anchor = html.escape(name.lower())
            token.attrSet("id", name.lower())
            contents.append(f'<li><a href="#{anchor}">{html.escape(name)}</a></li>')
        if token.children:
            token.children = _links_within(token.children)
        kept.append(token)
        at += 1
    return title, "\n".join(contents), parser.renderer.render(kept, parser.options, {})


def _without_tab(found: re.Match[str]) -> str:
    """Returns the label of a tab, followed by the tab's text without its indentation."""
    return f"**{found['label']}**\n" + re.sub(r"^    ", "", found["body"], flags=re.MULTILINE)


def _links_within(children: list[Token]) -> list[Token]:
    """Keeps links within this page and to web sites. Replaces other links with their text and the file's path."""
    kept, file = list[Token](), None
    for token in children:
        if token.type == "link_open":
            target = str(token.attrGet("href"))
            if not re.match(r"#|https?:", target):
                file = _document(target)
                continue
        if token.type == "link_close" and file is not None:
            name = Token("text", "", 0)
            name.content = f" ({file})"
            kept.append(name)
            file = None
            continue
        kept.append(token)
    return kept


def _document(target: str) -> str:
    """Returns the path of a link's target in the repository."""
    parts = list[str]()
    for part in (DOCUMENTATION + target.partition("#")[0]).split("/"):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
