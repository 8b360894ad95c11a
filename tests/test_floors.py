"""Imports point down only, found in the source with `ast`. A module in no list below must be given its floor."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"atoll_wire": "proto", "atoll_server": "server", "atoll": "learner", "atoll_dashboard": "dashboard"}

# Lowest first; a module may import from its own floor's line above it, and from any lower floor.
FLOORS = {
    "atoll_wire": [
        ["forking"],
        ["__init__", "errors", "checksums", "allocator", "outer_pb2", "arrivals", "spans", "memory", "calling"],
        ["outer_pb2_grpc", "layout", "logs", "access"],
        ["certificate", "scrape"],
        ["parts"],
        ["frames"],
        ["lanes"],
        ["links"],
        ["streams"],
        ["blocks"],
        ["quantising"],
        ["kernels"],
        ["codec"],
    ],
    "atoll_server": [
        ["quotas", "influence"],
        ["__init__", "events", "refusal", "goodput", "disk", "crash", "clock", "budget", "diary", "showing", "served"],
        ["process", "unshared"],
        ["settings", "tensorfile", "rows", "guard", "database", "calls", "identity", "acts"],
        ["certificates", "tokens", "outer", "gate", "versions"],
        ["members", "combining", "roster", "rounds"],  # pure, with the syncer
        ["merge"],
        ["reading", "syncer"],
        ["ledger", "writer", "metrics", "admission"],
        ["spool", "tallies", "timeline"],
        ["snapshot", "publications", "uploads", "contributions"],
        ["restore", "checkpoint"],
        ["engine", "initial", "audit"],
        ["keeper"],
        ["resumption"],
        ["core"],
        ["joining", "status", "eviction", "pausing", "attendance"],
        ["service", "operators", "gauges", "probing"],
        ["server", "offline", "remote"],
        ["receipts", "watching", "replaying"],
        ["commands", "issuing"],
        ["front.__init__", "front.sessions", "front.shelf", "front.upstream", "front.metrics", "front.settings"],
        ["front.fetching"],
        ["front.service", "front.passing"],
        ["front.server"],
        ["front.commands"],
        ["foresight.__init__", "foresight.islands", "foresight.goodput", "foresight.bandwidth", "foresight.paper"],
        ["foresight.fleet", "foresight.schedule", "foresight.job"],
        ["foresight.hardware", "foresight.others", "foresight.trial"],
        ["foresight.claims", "foresight.planner"],
        ["foresight.showing"],
        ["foresight.plots"],
        ["foresight.commands"],
        ["__main__"],
    ],
    "atoll_dashboard": [
        ["__init__", "shapes", "history", "headers", "asking"],
        ["telling", "moving"],
        ["feed"],
        ["looks", "acts"],
        ["app"],
        ["server"],
        ["commands"],
        ["__main__"],
    ],
    "atoll": [
        ["errors", "places"],
        ["adoption", "moves", "copies"],
        ["handover", "stats", "transport", "parameters", "windows", "samples", "incoming"],
        ["island"],
        ["doctor"],
        ["standing", "local", "watch"],
        ["sending", "joining"],
        ["fetching"],
        ["presence"],
        ["agent", "rounds"],
        ["learner"],
        ["__init__"],
        ["reference.__init__", "reference.model", "reference.data"],
        ["reference.train"],
        ["demo.__init__", "demo.processes", "demo.show", "demo.relay"],
        ["demo.regions"],
        ["demo.run", "chaos.__init__", "chaos.schedule"],
        ["chaos.deployment", "chaos.observer", "chaos.show"],
        ["chaos.run"],
        ["commands"],
        ["command"],
    ],
}
PURE = {
    "atoll_server": [
        "events",
        "members",
        "outer",
        "rounds",
        "syncer",
        "combining",
        "merge",
        "goodput",
        "roster",
        "refusal",
        "quotas",
        "guard",
        "influence",
        "admission",
        "rows",
        "front.sessions",
        "identity",
        "foresight.schedule",
        "foresight.bandwidth",
        "foresight.job",
        "foresight.others",
        "foresight.trial",
        "foresight.planner",
    ],
    "atoll": ["places", "adoption", "moves", "incoming"],
}
IMPURE = {"time", "asyncio", "threading", "socket", "os", "random", "sqlite3", "grpc", "subprocess", "pathlib"}


def modules(package: str) -> dict[str, Path]:
    base = ROOT / PACKAGES[package] / package
    return {".".join(path.relative_to(base).with_suffix("").parts): path for path in sorted(base.rglob("*.py"))}


def imported(path: Path) -> set[str]:
    """Full names of what a file imports, wherever in it; imports that are only for types count too.

    `from a import b` gives a.b, which `module_of` turns into whichever of the two is a module.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(target: str, package: str, known: dict[str, Path]) -> str | None:
    """The module of the package that an import names: itself, what holds the name, or a package's __init__."""
    parts = target.split(".")
    if parts[0] != package:
        return None
    inner, holder = ".".join(parts[1:]), ".".join(parts[1:-1])
    candidates = (inner, f"{inner}.__init__".lstrip("."), holder, f"{holder}.__init__".lstrip("."))
    return next((name for name in candidates if name in known), None)


def floor_of(package: str, name: str) -> int:
    for level, names in enumerate(FLOORS[package]):
        if name in names:
            return level
    raise AssertionError(f"{package}.{name} has no floor: add it to FLOORS in {Path(__file__).name}")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_has_a_floor_and_every_floor_its_modules(package):
    listed = [name for names in FLOORS[package] for name in names]
    there = set(modules(package))
    assert not there - set(listed), f"{there - set(listed)}: add it to a floor"
    assert not set(listed) - there, f"{set(listed) - there}: no such module, take it off its floor"
    assert len(listed) == len(set(listed)), "a module has one floor"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_down(package):
    known = modules(package)
    for name, path in known.items():
        for target in imported(path):
            lower = module_of(target, package, known)
            if lower is not None:
                assert floor_of(package, lower) < floor_of(package, name), f"{package}.{name} imports {target}: upwards"


def test_the_contract_imports_neither_side_and_the_sides_not_each_other():
    forbidden = {
        "atoll_wire": {"atoll_server", "atoll", "torch"},
        "atoll_server": {"atoll", "torch"},
        "atoll": {"atoll_server"},
    }
    for package, others in forbidden.items():
        for name, path in modules(package).items():
            reached = {target.split(".")[0] for target in imported(path)}
            assert not reached & others, f"{package}.{name} imports {reached & others}"


def test_pure_modules_have_no_clock_no_io_and_no_threads():
    for package, names in PURE.items():
        for name in names:
            reached = {target.split(".")[0] for target in imported(modules(package)[name])}
            assert not reached & IMPURE, f"{package}.{name} imports {reached & IMPURE}"
