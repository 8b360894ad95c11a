"""The shipped package: one wheel, which runs a core on a machine without other parts of Atoll."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (made,) = out.glob("*.whl")
    return made


def test_the_wheel_holds_the_five_packages_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    typed = [
        f"{package}/py.typed"
        for package in ("atoll_wire", "atoll_server", "atoll", "atoll_forecast", "atoll_dashboard")
    ]
    page = ("atoll_dashboard/page/index.html", "atoll_dashboard/page/views/overview.js", "atoll_dashboard/runbooks.md")
    for wanted in ("atoll_wire/outer.proto", "atoll_server/rounds/syncer.py", "atoll/learner.py", *typed, *page):
        assert wanted in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_runs_a_core_in_an_empty_environment(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    binary = tmp_path / "venv/bin"
    pip = [binary / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, wheel], check=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    helped = subprocess.run([binary / "atoll", "--help"], capture_output=True, text=True, check=True, env=clean)
    assert "core" in helped.stdout
    missing = subprocess.run([binary / "atoll", "demo"], capture_output=True, text=True, check=False, env=clean)
    assert missing.returncode == 1
    needs = "error: atoll demo needs torch, psutil, numba and zstandard: run pip install '.[learner]'"
    assert missing.stderr.startswith(needs)
    without = subprocess.run([binary / "atoll", "core", "--dir", "x"], capture_output=True, text=True, env=clean)
    assert without.stderr.startswith("error: atoll core needs numba and zstandard: run pip install '.[server]'")
    front = [binary / "atoll", "front", "--core", "127.0.0.1:1", "--listen", "127.0.0.1:0"]
    _serves(front, "atoll front listens on 127.0.0.1:", clean)
    subprocess.run([*pip, f"{wheel}[server]"], check=True)
    command = [binary / "atoll", "core", "--dir", tmp_path / "run", "--listen", "127.0.0.1:0"]
    _serves(command, "atoll core listens on 127.0.0.1:", clean)


def _serves(command: list, said: str, environment: dict) -> None:
    """Checks that the core reports its address, and ends cleanly at SIGTERM."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith(said)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
