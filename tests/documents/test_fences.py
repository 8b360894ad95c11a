"""Every fence names its language and parses. Its commands, options and names exist."""

from __future__ import annotations

import ast
import configparser
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

from tests.documents.fences import PAGES, ROOT, Fence, all_fences

LANGUAGES = {"bash", "python", "text", "yaml", "toml", "proto", "dockerfile", "promql", "diff", "json", "bibtex", "ini"}
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
INTERRUPTIONS = {"&", "&&", "||", "|", ";", "(", ")", "{", "}", ">", ">>", "<", "2>&1", "do", "then", "done", "!"}


def test_the_pages_have_fences():
    assert len(PAGES) > 25
    assert len(all_fences("bash")) > 50
    assert len(all_fences("python")) > 8


def test_every_fence_names_its_language():
    without = [f"{fence}: {fence.language!r}" for fence in all_fences() if fence.language not in LANGUAGES]
    assert not without, f"give these fences a language of {sorted(LANGUAGES)}: {without}"


@pytest.mark.parametrize("fence", all_fences("python"), ids=str)
def test_imported_names_exist(fence: Fence):
    body = "    ...\n" if fence.text.rstrip().endswith(":") else ""  # in place of the reader's own loop
    for node in ast.walk(ast.parse(fence.text + body)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0].startswith("atoll"):
            known = names_of(node.module or "")
            missing = [each.name for each in node.names if each.name not in known]
            assert not missing, f"{fence}: {node.module} has no {missing}"


def names_of(module: str) -> set[str]:
    """Returns the names of a module. Integrations are only parsed, because their libraries may be missing."""
    if not module.startswith("atoll.integrations."):
        return set(dir(importlib.import_module(module)))
    found = importlib.util.find_spec(module)
    assert found is not None, f"the module {module} does not exist"
    nodes = ast.parse(Path(found.origin or "").read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@pytest.mark.parametrize("fence", all_fences("bash"), ids=str)
def test_commands_and_options_exist(fence: Fence):
    checked = subprocess.run(["bash", "-n"], input=fence.text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, f"{fence}: {checked.stderr}"
    for words in calls(fence.text):
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
            assert set(targets) <= make_targets(), f"{fence}: the Makefile lacks some of the targets {targets}"
        if words[0] == "atoll":
            unknown = unknown_words(words[1:])
            assert not unknown, f"{fence}: {' '.join(words)}: {unknown}"


@pytest.mark.parametrize("fence", all_fences("bash"), ids=str)
def test_files_services_and_targets_for_docker_and_helm_exist(fence: Fence):
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    targets = re.findall(r"^FROM .* AS (\S+)$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    for words in calls(fence.text):
        files = [word for word in words[1:] if re.match(r"(docker|k8s)/", word)]
        assert all((ROOT / file).exists() for file in files), f"{fence}: {files}"
        if words[:2] == ["docker", "compose"]:
            services = [word for word in words[2:] if re.match(r"(core$|certs$|(front|learner|relay)-)", word)]
            assert {re.split("[=:]", word)[0] for word in services} <= set(compose), f"{fence}: {services}"
        if words[:2] == ["docker", "build"]:
            target = words[words.index("--target") + 1]
            assert target in targets or target.startswith("$"), f"{fence}: {target}"


@pytest.mark.parametrize("fence", all_fences("yaml", "json", "toml", "ini"), ids=str)
def test_data_parses(fence: Fence):
    parse = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}
    (parse.get(fence.language) or configparser.ConfigParser(interpolation=None).read_string)(fence.text)


def test_a_wrong_option_and_a_wrong_command_are_found():
    assert unknown_words(["core", "--dirr", "x"]) == "--dirr"
    assert unknown_words(["cores"]) == "cores"
    assert unknown_words(["checkpoint", "restore", "3"]) == ""
    assert list(calls("a=1 atoll status --json | head # atoll gone\n")) == [
        ["atoll", "status", "--json"],
        ["head"],
    ]


def test_the_diffs_of_the_contributors_guide_apply():
    diffs = [fence for fence in all_fences("diff") if fence.page == "CONTRIBUTING.md"]
    assert len(diffs) >= 4
    for fence in diffs:
        apply = ["git", "apply", "--check", "-"]
        done = subprocess.run(apply, input=fence.text, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{fence}: {done.stderr}"


def calls(script: str) -> Iterator[list[str]]:
    """Yields the words of each call in a script, without leading variables, redirections and comments."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;()<>")
        lexer.whitespace_split = True
        words = list[str]()
        for word in [*lexer, ";"]:
            if set(word) <= set("&|;()<>") or word in INTERRUPTIONS:
                if words:
                    yield words
                words = []
            elif words or not re.match(r"[A-Za-z_]+=", word):
                words.append(word)


@cache
def make_targets() -> set[str]:
    return set(TARGET.findall((ROOT / "Makefile").read_text()))


@cache
def command() -> Any:
    app = typer.Typer(name="atoll")
    for entry in entry_points(group="atoll.commands"):
        entry.load()(app)
    return typer.main.get_command(app)


def unknown_words(words: list[str]) -> str:
    """Returns the first subcommand or option that `atoll` lacks, or an empty string."""
    at = command()
    rest = list(words)
    while isinstance(at, TyperGroup) and rest and not rest[0].startswith("-"):
        if rest[0] not in at.commands:
            return rest[0]
        at = at.commands[rest.pop(0)]
    options = {name for parameter in at.params for name in [*parameter.opts, *parameter.secondary_opts]} | {"--help"}
    given = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    return next((option for option in given if option not in options), "")
