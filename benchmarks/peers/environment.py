"""Creates a virtual environment for each peer once, under build/, from the package index in pip's configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAX_WAIT_S = 900.0


def install(directory: Path, *stages: tuple[str, ...]) -> Path:
    """Creates an environment, and returns the path of its Python. stages: packages, installed stage by stage.

    Raises SystemExit with the reason in one line.
    """
    python, ready = directory / "bin" / "python", directory / "ready"
    if not ready.exists() or ready.read_text() != repr(stages):
        _run([sys.executable, "-m", "venv", str(directory)])
        for wanted in stages:
            _run([str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *wanted])
        ready.write_text(repr(stages))
    return python


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=MAX_WAIT_S)
    except subprocess.CalledProcessError as error:
        said = f"{error.stdout}\n{error.stderr}"
        raise SystemExit(f"{' '.join(command[1:])} failed: {last_error(said)}") from error
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"{' '.join(command[1:])} took more than {MAX_WAIT_S:.0f} s") from error


def last_error(said: str) -> str:
    """Returns the last line of pip's output that begins with "ERROR:", or else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1]
