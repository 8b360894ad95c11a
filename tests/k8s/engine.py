"""Calls Helm's engine in its own environment, because the engine needs a newer Python than Atoll."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CHART = ROOT / "k8s/atoll"
ENVIRONMENT = ROOT / "build/k8s-venv"
NEEDS = HERE / "requirements.txt"
LEAST = (3, 12)
NAMED = "ATOLL_PYTHON312"


class NoPythonError(Exception):
    """No Python on this machine is new enough. The message is one line with the fix."""


def render(asked: dict[str, list[str | dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Renders the chart.

    asked: name -> values: files of the chart, or objects. Later values override earlier ones.
    """
    request = [
        {"name": name, "values": [str(CHART / part) if isinstance(part, str) else part for part in parts]}
        for name, parts in asked.items()
    ]
    command = [_environment(), HERE / "render.py", CHART]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return answers


def _environment() -> Path:
    """Returns the environment's interpreter. Makes the environment if it is missing."""
    python, ready = ENVIRONMENT / "bin/python", ENVIRONMENT / ".ready"
    wanted = hashlib.sha256(NEEDS.read_bytes()).hexdigest()
    if not ready.exists() or ready.read_text() != wanted:
        subprocess.run([_newer_python(), "-m", "venv", "--clear", ENVIRONMENT], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--requirement", NEEDS], check=True)
        ready.write_text(wanted)
    return python


def _newer_python() -> str:
    """Returns a newer Python. Raises NoPythonError."""
    named = os.environ.get(NAMED)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = [shutil.which(f"python3{minor}") for minor in (".12", ".13", ".14", "")]
    of_pyenv = [str(each) for each in sorted(pyenv.glob("3.1[2-4].*/bin/python"))]
    for found in [named] if named else [*filter(None, on_path), *of_pyenv]:
        if _is_new_enough(found):
            return found
    raise NoPythonError(
        f"Helm's engine needs Python 3.12 or newer, which this machine lacks: install it, or name it with {NAMED}"
    )


def _is_new_enough(python: str) -> bool:
    try:
        done = subprocess.run([python, "-c", f"import sys; sys.exit(sys.version_info < {LEAST})"], capture_output=True)
    except OSError:
        return False
    return done.returncode == 0
