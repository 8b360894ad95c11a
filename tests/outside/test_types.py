"""Users' programs that import Atoll are type-checked against its annotations. The types of other packages are left out,
because mypy needs minutes for torch's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/outside/program.py"
SETTINGS = """
[mypy]
strict = true
mypy_path = {paths}
cache_dir = {cache}

[mypy-atoll.*,atoll_wire.*]
follow_imports = silent

[mypy-torch.*,numpy.*,pydantic.*,typer.*,rich.*,cryptography.*,google.*,prometheus_client.*,psutil.*,grpc.*,structlog.*]
follow_imports = skip
"""


def checked(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Checks a program in its own folder, as a user would."""
    paths = ":".join(str(ROOT / part) for part in ("learner", "proto"))
    (folder / "mypy.ini").write_text(SETTINGS.format(paths=paths, cache=ROOT / ".mypy_cache/outside"))
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)


@pytest.mark.ci
@pytest.mark.timeout(1000)
def test_mypy_strict_finds_the_mistakes_in_a_users_program(tmp_path):
    program = PROGRAM.read_text()
    done = checked(tmp_path, program)
    assert done.returncode == 0, done.stdout
    lines = [number for number, line in enumerate(program.splitlines(), 1) if "type: ignore" in line]
    found = checked(tmp_path, program.replace("  # type: ignore", "  # not ignored")).stdout.splitlines()
    assert [int(line.split(":")[1]) for line in found if ": error:" in line] == lines
