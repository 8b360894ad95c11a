"""The part of PromQL that finds series, labels and values in an expression. promtool checks the rest."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.observing.exported import Labels

LISTS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
SERIES = re.compile(r"(?<![\w.$])([a-zA-Z_:][\w:]*)(?![\w:]|\s*\()(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
WORDS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left", "Inf", "NaN"}
VARIABLES = {"$__rate_interval": "5m", "$__range": "3h", "$price": "0.09", "$learner": "a", "$region": ".*",
             "$run": "a", "$namespace": ".*"}  # fmt: skip


def promtool(*words: str) -> str:
    """Runs promtool, and returns its output. Fails the test if promtool fails."""
    try:
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=280)
    except FileNotFoundError:
        pytest.fail("promtool is missing: install Prometheus (apt-get install prometheus)", pytrace=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def filled(expr: str) -> str:
    """Replaces Grafana's variables with values."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, f"{expr}: a Grafana variable has no test value"
    return expr


def check_syntax(exprs: Iterable[str], folder: Path) -> None:
    """Checks with promtool that all expressions are valid, as recording rules."""
    rules = [{"record": f"panel:number:{at}", "expr": expr} for at, expr in enumerate(exprs)]
    path = folder / "panels.yaml"
    lines = ["groups: [{name: panels, rules: ["]
    lines += [f"  {{record: '{rule['record']}', expr: '{rule['expr']}'}}," for rule in rules]
    path.write_text("\n".join([*lines, "]}]"]))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(path))


def series(expr: str) -> Iterator[tuple[str, str]]:
    """Yields each series in an expression, with the text in its braces."""
    for found in SERIES.finditer(LISTS.sub(" ", re.sub(r'"[^"]*"', _plain, expr))):
        if found[1] not in WORDS:
            yield found[1], found[2] or ""


def _plain(quoted: re.Match[str]) -> str:
    """Removes braces from a value, because they would end the series."""
    return quoted[0].replace("{", "(").replace("}", ")")


def problems(expr: str, known: Mapping[str, Labels]) -> list[str]:
    """Returns a line for each series, label or value in the expression that no process exports."""
    found, labels = [], {"le"}
    for name, inside in series(expr):
        if name not in known:
            found.append(f"{name} is not exported")
            continue
        labels |= set(known[name])
        for label, how, value in MATCHER.findall(inside):
            if label not in known[name]:
                found.append(f"{name} has no label {label}")
            elif (fixed := known[name][label]) and how in {"=", "!="} and value not in fixed:
                found.append(f"{name} has no {label} {value!r}")
            elif fixed and how in {"=~", "!~"} and not any(re.fullmatch(value, each) for each in fixed):
                found.append(f"{name} has no {label} like {value!r}")
    listed = {label.strip() for each in LISTS.findall(expr) for label in each.split(",") if label.strip()}
    return found + [f"{label} is a label of nothing here" for label in sorted(listed - labels)]
