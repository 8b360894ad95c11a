"""Imports have one direction. The tests find them in the source with `ast`.

Each package says in its docstring what it may import ("May import: rounds, storage."). Neither packages nor the modules
of one package have import cycles. A module whose docstring begins with "PURE:" has no clock, IO or threads.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DISTRIBUTIONS = {
    "atoll_wire": "proto",
    "atoll_server": "server",
    "atoll": "learner",
    "atoll_forecast": "forecast",
    "atoll_dashboard": "dashboard",
    "benchmarks": ".",
}
FORBIDDEN = {
    "atoll_wire": {"atoll_server", "atoll", "atoll_forecast", "torch"},
    "atoll_server": {"atoll", "atoll_forecast", "torch"},
    "atoll": {"atoll_server", "atoll_forecast"},
    "atoll_forecast": {"atoll", "torch", "grpc"},
}
MAX_MODULES = 13  # limit per package, including its __init__
LARGER = {"benchmarks.quality": 15}  # packages with a higher limit, which must only fall
PURE_PACKAGES = {"atoll_server.rounds", "atoll_server.learners"}
IMPURE = {"time", "asyncio", "threading", "socket", "os", "random", "sqlite3", "grpc", "subprocess", "pathlib"}


@cache
def modules(distribution: str) -> dict[str, Path]:
    """Returns the modules' paths by full name. A package's __init__ has the package's name."""
    base = ROOT / DISTRIBUTIONS[distribution]
    found = {}
    for path in sorted((base / distribution).rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


@cache
def imported(path: Path) -> frozenset[str]:
    """Returns the full names of all modules that a file imports anywhere, including imports only for types."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@cache
def edges(distribution: str) -> dict[str, set[str]]:
    """Returns, for each module, the modules of the same distribution that it imports."""
    known = modules(distribution)

    def module_of(target: str) -> str | None:
        return next((name for name in (target, target.rpartition(".")[0]) if name in known), None)

    return {name: {at for target in imported(path) if (at := module_of(target))} for name, path in known.items()}


def room(distribution: str, module: str) -> str:
    """Returns the package below the distribution that contains a module, or the module itself if it is at the top."""
    parts = module.split(".")
    return ".".join(parts[:2])


def rooms(distribution: str) -> dict[str, set[str]]:
    """Returns, for each package, the packages that its modules import."""
    found: dict[str, set[str]] = {}
    for module, targets in edges(distribution).items():
        here = room(distribution, module)
        found.setdefault(here, set()).update(room(distribution, each) for each in targets if each != distribution)
    return {here: targets - {here} for here, targets in found.items()}


def packages(distribution: str) -> list[str]:
    return [name for name, path in modules(distribution).items() if path.name == "__init__.py" and name != distribution]


def no_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a cycle of imports: {' <- '.join(error.args[1])}") from None


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_packages_have_no_import_cycles(distribution):
    no_circle(rooms(distribution))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_modules_of_a_package_have_no_import_cycles(distribution):
    found = edges(distribution)
    for package in {room(distribution, name) for name in found}:
        inside = {name: targets - {name} for name, targets in found.items() if room(distribution, name) == package}
        no_circle({name: {each for each in targets if each in inside} for name, targets in inside.items()})


PACKAGES = [
    (each, package) for each in ("atoll_server", "atoll", "atoll_forecast", "benchmarks") for package in packages(each)
]


@pytest.mark.parametrize(("distribution", "package"), PACKAGES)
def test_a_package_imports_what_its_docstring_declares(distribution, package):
    said = re.search(r"^May import: ([^.]+)\.", docstring(modules(distribution)[package]), re.MULTILINE)
    assert said, "the docstring lacks a line 'May import: ...'"
    allowed = set(re.split(r",\s*", said[1])) - {"nothing"}
    used = {each.rpartition(".")[2] for each in rooms(distribution)[package]}
    assert used == allowed, f"undeclared imports: {used - allowed}; unused declarations: {allowed - used}"


@pytest.mark.parametrize(("distribution", "package"), PACKAGES)
def test_a_package_has_few_modules(distribution, package):
    inside = [name for name in modules(distribution) if room(distribution, name) == package]
    assert len(inside) <= LARGER.get(package, MAX_MODULES), f"{len(inside)} modules: split {package} by purpose"


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_contract_server_and_learner_do_not_import_each_other(distribution):
    for name, path in modules(distribution).items():
        reached = {target.split(".")[0] for target in imported(path)} & FORBIDDEN.get(distribution, set())
        assert not reached, f"{name} imports {reached}"


def test_pure_modules_have_no_clock_no_io_and_no_threads():
    everything = {name: path for each in DISTRIBUTIONS for name, path in modules(each).items()}
    pure = {name: path for name, path in everything.items() if docstring(path).startswith("PURE:")}
    unsaid = [
        name for name, path in everything.items()
        if name.rpartition(".")[0] in PURE_PACKAGES and name not in pure and path.name != "__init__.py"
    ]  # fmt: skip
    assert not unsaid, f'{unsaid}: begin the docstrings with "PURE:", because the package is pure'
    for name, path in pure.items():
        reached = {target.split(".")[0] for target in imported(path)} & IMPURE
        assert not reached, f"{name} imports {reached}"
