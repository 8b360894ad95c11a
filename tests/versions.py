"""Tests with other versions than those in constraints.txt: `make test-newest`, `make test-oldest`, `make
test-newest-grpc`, `make test-integrations`, `make test-examples`.

newest: the versions that pip installs today. oldest: the floors in pyproject.toml. Both run for each installed Python
from 3.11 on, in separate environments under build/versions. Without a CPU build of torch, only tests that do not need
torch run. grpc: the newest grpcio and protobuf over this environment. integrations: the trainers of atoll.integrations,
first in their newest versions, then in the oldest that pyproject.toml allows, with this Python. examples: all examples,
with the newest trainers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
HOME = ROOT / "build/versions"
GRPC = ["grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf"]
EXTRAS = ["numerics", "learner", "server", "dashboard"]
TOOLS = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "pyyaml", "packaging"]
TRAINERS = ["accelerate", "lightning", "transformers"]  # extras in pyproject.toml
ONLY_TESTED = [Requirement(each) for each in ("datasets>=4.3.0", "peft>=0.17.1", "torchdata>=0.11.0")]
FAST = "not gpu and not slow and not ci and not root and not k8s and not compose and not observe and not frameworks"
FRAMEWORKS = [
    "tests/integrations",
    "tests/examples",
    "tests/learner/test_data_libraries.py",
    "tests/end_to_end/test_forking.py",
]
NEED_TORCH = [
    f"tests/server/test_{name}.py" for name in ("folder_writer", "memory_budget", "parameter_source", "tensor_file")
]
WITHOUT_TORCH = ["tests/server", "tests/wire", *(f"--ignore={each}" for each in NEED_TORCH)]
WITH_TORCH = ["tests/server", "tests/wire", "tests/learner", "tests/end_to_end"]
SHORT = ["test_forking.py", "test_training.py", "test_front.py", "test_uploads.py"]  # short end-to-end tests over gRPC
PIP = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet"]


def pythons() -> Iterator[tuple[str, Path]]:
    """Yields the version ("3.11") and interpreter of each Python on PATH or of pyenv."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(11, 20):
        version = f"3.{minor}"
        found = [shutil.which(f"python{version}"), *sorted(kept.glob(f"{version}.*/bin/python"), reverse=True)]
        for candidate in filter(None, found):
            asked = subprocess.run([candidate, "-c", "import venv"], capture_output=True, check=False)
            if asked.returncode == 0:  # pyenv's commands on PATH also stand for inactive versions
                yield version, Path(candidate)
                break


def needed(version: str) -> Iterator[Requirement]:
    """Yields the requirements of Atoll and its tests, except torch, for a Python of that version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *(each for name in EXTRAS for each in extras[name])]:
        requirement = Requirement(text)
        mine = requirement.marker is None or requirement.marker.evaluate({"python_version": version})
        if mine and requirement.name not in {"atoll", "torch"}:
            yield requirement


def trainers(which: str) -> list[str]:
    """Returns the trainers, and the libraries that only their tests use. which: newest or oldest."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = {each.name: each for name in TRAINERS for each in map(Requirement, extras[name]) if each.name != "atoll"}
    return [floor(each) if which == "oldest" else each.name for each in (*found.values(), *ONLY_TESTED)]


def floor(requirement: Requirement) -> str:
    """Returns the oldest allowed version: grpcio==1.76 for grpcio>=1.76."""
    (least,) = (each for each in requirement.specifier if each.operator in {">=", "=="})
    return f"{requirement.name}=={least.version}"


def torches(which: str) -> Iterator[str]:
    """Yields the CPU builds of torch to try, best first. The last is the one in constraints.txt."""
    learner = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["learner"]
    if which == "oldest":
        oldest = next(floor(each) for each in map(Requirement, learner) if each.name == "torch")
        yield f"{oldest}.0+cpu"
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    yield f"{pinned}+cpu"


def prepare(which: str, version: str, interpreter: Path, more: Sequence[str] = ()) -> tuple[Path, bool]:
    """Makes a virtual environment. Returns its interpreter, and whether it has torch. more: further packages."""
    home = HOME / "-".join([which, version, *more])
    python = home / "bin/python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", home], check=True)
    tried = (subprocess.run([python, *PIP, each], capture_output=True, check=False) for each in torches(which))
    torch = any(done.returncode == 0 for done in tried)
    wanted = [str(each).partition(";")[0] if which == "newest" else floor(each) for each in needed(version)]
    wanted += [*TOOLS, *more]
    subprocess.run([python, *PIP, "--upgrade", "--only-binary=:all:", *wanted], check=True)
    subprocess.run([python, *PIP, "--no-deps", "--editable", ROOT], check=True)
    return python, torch


def tests(python: Path | str, what: list[str], options: list[str], **environment: str) -> bool:
    """Runs tests. Returns whether they pass."""
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *what, *options]
    # Kernels compiled with a different version of numba cannot be loaded, so each environment has its own cache.
    compiled = {"NUMBA_CACHE_DIR": str(HOME / "kernels" / Path(python).parent.parent.name)}
    return subprocess.run(command, cwd=ROOT, env=os.environ | compiled | environment, check=False).returncode == 0


def with_each(which: str, only: str | None, options: list[str]) -> bool:
    """Runs the tests with all installed Pythons, or with the given one. Returns whether they pass."""
    good, found = True, [(version, at) for version, at in pythons() if only in {None, version}]
    for version, interpreter in found:
        python, torch = prepare(which, version, interpreter)
        script = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in %r), sep=', ')"
        names = ["grpcio", "protobuf", "numba", "numpy", *(["torch"] if torch else [])]
        told = subprocess.run([python, "-c", script % names], capture_output=True, text=True, check=True).stdout.strip()
        print(f"== {which}, Python {version}: {told}{'' if torch else ', no CPU build of torch'}", flush=True)
        good &= tests(python, WITH_TORCH if torch else WITHOUT_TORCH, ["-m", FAST, *options])
        if torch:
            good &= tests(python, ["tests/end_to_end/test_forking.py"], ["-m", "slow or ci", *options])
    return good and bool(found)


def with_newest_grpc(options: list[str]) -> bool:
    """Runs the tests in a layer over the current environment. Returns whether they pass."""
    over = HOME / "grpc"
    shutil.rmtree(over, ignore_errors=True)
    subprocess.run([sys.executable, *PIP, "--target", over, *GRPC], check=True)
    path = os.pathsep.join(filter(None, [str(over), os.environ.get("PYTHONPATH")]))
    names = " or ".join(("stranger", "fork", "learners_behind", "acknowledged", "resume", "bit_identical"))
    return tests(
        sys.executable,
        [f"tests/end_to_end/{name}" for name in SHORT],
        ["-m", FAST, "-k", names, *options],
        PYTHONPATH=path,
    )


def with_trainers(options: list[str]) -> bool:
    """Runs the tests of integrations. Returns whether they pass with both versions of each trainer."""
    good, version = True, f"{sys.version_info.major}.{sys.version_info.minor}"
    for which in ("newest", "oldest"):
        packages = trainers(which)
        python, _ = prepare("newest", version, Path(sys.executable), packages)
        print(f"== integrations: {', '.join(packages)}", flush=True)
        good &= tests(python, FRAMEWORKS, ["-m", "frameworks", *options], HF_HUB_OFFLINE="1")
    return good


def with_examples(options: list[str]) -> bool:
    """Runs all examples with the newest trainers. Returns whether they pass."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = [*trainers("newest"), "matplotlib"]  # gpt.py draws a curve
    python, _ = prepare("newest", version, Path(sys.executable), packages)
    return tests(python, ["tests/examples"], options, HF_HUB_OFFLINE="1")


def main() -> None:
    """Runs the tests. Exits with 1 if a test fails, or no Python is found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=["newest", "oldest", "grpc", "integrations", "examples"])
    parser.add_argument("--only", help="test one Python version, such as 3.12 (default: all installed)")
    known, options = parser.parse_known_args()
    match known.which:
        case "grpc":
            good = with_newest_grpc(options)
        case "integrations":
            good = with_trainers(options)
        case "examples":
            good = with_examples(options)
        case _:
            good = with_each(known.which, known.only, options)
    sys.exit(not good)


if __name__ == "__main__":
    main()
