"""Expressions that must not return to documents, docstrings, comments, messages, pages, alerts and the protocol.

`python -m tests.test_language` lists every place, one per line. Tests themselves are not searched.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GAP = r"""(?:[\s#"'*/>]|\bf")+"""  # between two words, where a line or a string literal may end
BREAK = r"(?:^|(?<=[.;:!|>#-]\s)|(?<=\"{3}))"  # the beginning of a sentence
CLAUSE = r"(?:^|(?<=[.;!]\s)|(?<=\"{3}))"  # the same, but only in running text


@dataclass(frozen=True)
class Expression:
    """A banned pattern, the reason, a text that it finds, and a replacement.

    A space in the pattern also matches a line break. only: prefixes of the paths that are searched; all if empty.
    """

    pattern: str
    reason: str
    found: str
    instead: str
    only: tuple[str, ...] = ()

    @property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern.replace(" ", GAP), re.MULTILINE)


SUBJECT = "a process is `it`, people are `they`: name the subject"
FRONTING = "subject, verb, object: no clause as a subject, nothing in front of it"
FIELD = "use the standard word of the field"
ONE_TERM = "one term for one thing (see the glossary)"
PER = '"per" is the word for rates and sizes, "vs." the word for comparisons'
HEADING = "a heading names a task or a thing"
METAPHOR = "no metaphors"
UNITS = "[Bb]its|[Bb]ytes|[KMGT]i?B|[Tt]okens|[Cc]ontributions|[Mm]erges|[Ss]econds|[Mm]essages|[Cc]alls"
THINGS = "parameter|sync|second|minute|hour|day|month|round|step|merge|learner|token|contribution|connection"

EXPRESSIONS = [
    Expression(r"\b[Nn]obody\b", SUBJECT, "nobody is waited for", "learners never block"),
    Expression(r"\b[Ee]verybody\b", SUBJECT, "everybody shows a certificate", "every process shows a certificate"),
    Expression(r"\b[Ss]omebody\b", SUBJECT, "somebody is live", "at least one learner is live"),
    Expression(r"\b[Aa]nybody\b", SUBJECT, "before anybody waits", "before a browser waits"),
    Expression(r"\b[Ww]hoever\b", SUBJECT, "for whoever runs one", "for operators of such a process"),
    Expression(r"\b[Ww]hom\b", SUBJECT, "names whom each round waits for", "names the learners that each round needs"),
    Expression(
        rf"{BREAK}Who\b(?![^.\n]*\?)", SUBJECT, "Who is late is merged next.", "Late contributions join the next round."
    ),
    Expression(
        r"\b[Ww]ho (?:asks|waits|is late|is silent|is there|declined|looks|leaves|sends|comes|joins)\b(?![^.\n]*\?)",
        SUBJECT,
        "of each who asks",
        "of each caller",
    ),
    Expression(
        r"\b(?:is|are|was|were|be|being) waited for\b", FRONTING, "a learner that is waited for", "rounds wait for it"
    ),
    Expression(
        rf"{CLAUSE}What (?:waits|comes|is|was|fires|cannot)\b(?![^.\n]*\?)",
        FRONTING,
        "What waits is kept",
        "The core keeps pending contributions",
    ),
    Expression(
        rf"{BREAK}Of (?:an?|what|all|each|the)\b",
        FRONTING,
        "Of a plan that fails it says why",
        "If the plan is infeasible, it says why",
    ),
    Expression(r"\bmay not yet\b", FRONTING, "what may not yet be opened", "rounds that cannot open yet"),
    Expression(r"\bthat there (?:is|are)\b", FRONTING, "of series that there are", "of series that exist"),
    Expression(r"\b(?:is|are) no fault\b", FRONTING, "it is no fault", "this is expected"),
    Expression(r"\bbeside\b", PER, "1.6 s beside 2.1 s", "1.6 s vs. 2.1 s"),
    Expression(r"\ba parameter and\b", PER, "bits a parameter and sync", "bits per parameter per sync"),
    Expression(rf"\b(?:{UNITS}) an? (?:{THINGS})\b", PER, "12 bytes a parameter", "12 bytes per parameter"),
    Expression(r"\bhalf as much again\b", PER, "half as much again", "1.5 times as much"),
    Expression(
        r"\b56 times\b(?! as)",
        "a figure needs its baseline and setup",
        "56 times",
        "56 x per-step data-parallel, 1.05M parameters, links scaled to 2.1 Mbit/s",
    ),
    Expression(
        r"\b[Mm](?:akes?|aking|ade) (?:no |an? |the |more |same |small |inner |outer |optimizer |one |of )*steps?\b",
        FIELD,
        "a learner that makes no steps",
        "a learner that takes no steps",
    ),
    Expression(r"\bundone work\b", FIELD, "undone work must be kept", "the work that the restore discarded stays"),
    Expression(r"\bat hand\b", FIELD, "where one is at hand", "if pip finds one"),
    Expression(r"\bbesides\b", FIELD, "64 MiB besides its connections", "64 MiB, excluding its connections"),
    Expression(r"\b[Hh]m\b", FIELD, "ok, hm or no", "OK, WARN or FAIL"),
    Expression(r"\b[Mm]end(?:s|ed|ing)?\b", FIELD, "mend that first", "fix that first"),
    Expression(r"\b[Cc]ures?\b", FIELD, "the fact and the cure", "the fact and the fix"),
    Expression(r"\b[Uu]nsound\b", FIELD, "unsound bytes", "invalid bytes"),
    Expression(r"\b[Oo]perators?'?s?'? acts?\b", FIELD, "an operator's acts", "operator actions"),
    Expression(r"\bfor its acts\b|\b[Aa]n act\b", FIELD, "an act needs a token", "an operator action needs a token"),
    Expression(r"\binterpreter away\b", FIELD, "gives the interpreter away", "releases the GIL"),
    Expression(r"\bgood-?bye\b", FIELD, "did not say good-bye", "did not leave the run"),
    Expression(r"\banew\b", FIELD, "rates begin anew", "rates start again"),
    Expression(r"\bany more\b(?! than)", FIELD, "not wanted any more", "no longer needed"),
    Expression(r"\b[Pp]rocessors?\b", ONE_TERM, "a processor and a half", "1.5 CPUs"),
    Expression(r"\b(?:atoll's|run's|the) keeper\b", METAPHOR, "the atoll's keeper", "the snapshotter"),
    Expression(
        r"\b(?:loops?|learners?|[Ll]earners|run|core) stands?\b(?! for| by)",
        METAPHOR,
        "its training loop stands",
        "its training loop is stuck",
    ),
    Expression(r"\bstands? in step\(\)", METAPHOR, "learners stand in step()", "learners wait in step()"),
    Expression(r"\bcore is silent\b", METAPHOR, "the core is silent", "the core does not answer"),
    Expression(
        r"\b[Tt]rains? on(?=[,;.]| and\b| alone\b| while\b|: )",
        "say what continues",
        "learners train on and wait",
        "learners keep training",
    ),
    Expression(r"\b(?:run|training) goes on\b", "say what continues", "the run goes on", "the run continues"),
    Expression(r"\btells? itself\b|\btells? of itself\b", METAPHOR, "what it tells itself", "what it reports"),
    Expression(r"\b(?:shard|registrar|core|front) is away\b", FIELD, "while the registrar is away", "is unavailable"),
    Expression(r"\bcontradict each other\b", FIELD, "--a and --b contradict each other", "cannot be combined"),
    Expression(r"\bthan (?:it|its learner) can have\b", FIELD, "than it can have done", "than it could have done"),
    Expression(r"\bprocesses of their own\b", FIELD, "shards that are processes of their own", "separate processes"),
    Expression(
        r"\bas it cannot be\b",
        "errors say fact, cause and fix",
        "lays the model out as it cannot be",
        "sent an invalid layout (fragment 3 has no tensors)",
    ),
    Expression(r"\b(?:Seeing|Plan|Tune|Watch) it$", HEADING, "## Seeing it", "## Monitoring"),
    Expression(
        r"\*\*(?:It means|At risk|Look|Do|It goes away):?\*\*", HEADING, "**It means:** a core", "**Meaning:** a core"
    ),
    Expression(
        r"\bAtollLearnerStands\b|\bStats\.stands\b", "it was renamed", "AtollLearnerStands", "AtollLearnerStalled"
    ),
    Expression(r"\bset_rate\(", "there is no such function", "learner.set_rate(1.0)", "learner.step(tokens=8192)"),
    Expression(
        r"(?<![\w/])certs/(?:eu|us|ap)-\w+",
        "`certs issue` puts the role in front of the name",
        "certs/eu-west",
        "certs/learner-eu-west",
    ),
    Expression(
        r"\bpy-spy\b",
        "no image has py-spy",
        "`py-spy dump` shows where",
        "the log shows where",
        ("docker/", "k8s/", "docs/operate/", "dashboard/"),
    ),
    Expression(
        r"\bdocs/(?:runbooks|operate|adopt|data-plane|reproduction|bad-states|reference|faq|how|quality|failures)\.md\b",
        "the page has moved",
        "docs/runbooks.md",
        "docs/operate/runbooks.md",
    ),
]

# Lines that use the expression as a name. A line that contains one of these texts is not searched.
ALLOWED: dict[str, tuple[str, ...]] = {
    "docker/compose.test.yaml": ("USER nobody", "-o nobody"),
    "CHANGELOG.md": ("AtollLearnerStands", "Stats.stands", "`everybody`, `nobody`"),
    "forecast/atoll_forecast/planning/tables.py": ('"processors": cpus',),
}

PYTHON = ("proto/", "server/", "learner/", "forecast/", "dashboard/", "benchmarks/", "docker/", "docs/hooks.py")
DOCUMENTS = ("docs/", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md")
WHOLE = ("dashboard/", "docker/", "k8s/atoll/", "proto/", "Makefile", "pyproject.toml", "mkdocs.yml")
WHOLE_KINDS = {".js", ".css", ".html", ".yaml", ".yml", ".tpl", ".txt", ".sh", ".proto", ".toml", ".env", ""}
FENCE = re.compile(r"^( *)(```+)(\w*).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


@cache
def texts() -> dict[str, str]:
    """Returns the words of each file. Other text is blanked, so that line numbers stay."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    found = {}
    for name in sorted(set(listed)):
        path = ROOT / name
        if not path.is_file() or path.is_symlink() or "_pb2" in name:
            continue
        if path.suffix == ".py" and name.startswith(PYTHON):
            found[name] = words_of_python(path.read_text())
        elif path.suffix == ".md" and name.startswith(DOCUMENTS):
            found[name] = FENCE.sub(lambda fence: _blank(fence[0]), path.read_text())
        elif path.suffix in WHOLE_KINDS and name.startswith(WHOLE):
            found[name] = path.read_text()
    return found


def words_of_python(source: str) -> str:
    """Returns the comments and string literals, including docstrings. Other code is blanked, except whitespace."""
    lines = source.splitlines(keepends=True)
    kept = [list(_blank(line)) for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in {tokenize.STRING, tokenize.COMMENT}:
            continue
        (first, begin), (last, end) = token.start, token.end
        for number in range(first, last + 1):
            line = lines[number - 1]
            left, right = begin if number == first else 0, end if number == last else len(line)
            kept[number - 1][left:right] = line[left:right]
    return "".join("".join(line) for line in kept)


def _blank(text: str) -> str:
    return re.sub(r"\S", "\0", text)


def places(expression: Expression) -> Iterator[tuple[str, int, str]]:
    """Yields (file, line number, line) of each place with the expression."""
    for name, text in texts().items():
        if expression.only and not name.startswith(expression.only):
            continue
        for match in expression.compiled.finditer(text):
            number = text.count("\n", 0, match.start()) + 1
            line = (ROOT / name).read_text().splitlines()[number - 1].strip()
            if not any(allowed in line for allowed in ALLOWED.get(name, ())):
                yield name, number, line


def report(expression: Expression) -> list[str]:
    """Returns a line for each place, with the location and the fix."""
    return [
        f"{name}:{number}: {line[:120]} [{expression.reason}; as in {expression.instead!r}, not {expression.found!r}]"
        for name, number, line in places(expression)
    ]


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda expression: expression.found)
def test_an_expression_does_not_return(expression: Expression):
    found = report(expression)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda expression: expression.found)
def test_an_expression_is_found_and_its_replacement_is_allowed(expression: Expression):
    assert expression.compiled.search(expression.found)
    assert [other.found for other in EXPRESSIONS if other.compiled.search(expression.instead)] == []


def test_a_phrase_is_found_across_lines_and_literals_but_not_in_code():
    phrase = Expression(r"\bis waited for\b", "", "", "").compiled
    for text in (
        '"""It is waited\n    for."""\n',
        "# it is waited\n# for\n",
        'x = (\n    "is waited "\n    f"for"\n)\n',
    ):
        assert phrase.search(words_of_python(text)), text
    assert not phrase.search(words_of_python("is_waited = waited\nfor x in []:\n    pass\n"))
    assert words_of_python("a = 1  # why\n") == "\0 \0 \0  # why\n"


def test_the_required_files_are_searched():
    names = set(texts())
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "docs/operate/runbooks.md"} <= names
    assert {
        "proto/atoll_wire/outer.proto",
        "docker/prometheus/rules.yaml",
        "docker/grafana/boards/overview.py",
    } <= names
    assert {"dashboard/atoll_dashboard/page/index.html", "k8s/atoll/templates/NOTES.txt", "Makefile"} <= names
    for name, lines in ALLOWED.items():
        assert name in names
        assert lines


def main() -> None:
    """Prints every place, and exits with 1 if there are any."""
    found = [line for expression in EXPRESSIONS for line in report(expression)]
    print(*found, sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
