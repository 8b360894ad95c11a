"""The images' packages are pinned with checksums, and their labels name this version."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
PIN = re.compile(r"^([\w.-]+)==([\w.]+)(?: ; [^\\]+)? \\$", re.MULTILINE)
FIX = "run `make locked`"


def _name(text: str) -> str:
    return re.split(r"[^\w.-]", text, maxsplit=1)[0].lower().replace("_", "-")


@pytest.mark.parametrize(("image", "extra"), {"front": "", "core": "server", "dashboard": "dashboard"}.items())
def test_an_images_packages_are_those_of_the_project_with_checksums(image, extra):
    locked = (ROOT / f"docker/locked/{image}.txt").read_text()
    pins = dict(PIN.findall(locked))
    assert len(pins) == len(re.findall(r"^\w", locked, re.MULTILINE)) > 15
    assert all("--hash=sha256:" in part for part in re.split(PIN, locked)[3::3]), "every package has a checksum"
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {_name(line): line.partition("==")[2] for line in constraints if "==" in line}
    assert pins == {name: pinned.get(name) for name in pins}, FIX
    command = [sys.executable, "docker/needs.py", *([extra] if extra else [])]
    needed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {_name(line) for line in needed} <= set(pins), FIX
    copied = f"COPY docker/locked/{image}.txt ./\n"
    assert f"{copied}RUN pip install --require-hashes --no-deps --requirement {image}.txt\n" in DOCKERFILE


def test_labels_name_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"org.opencontainers.image.version={version} " in DOCKERFILE


def test_the_base_image_is_one_argument():
    """An argument with only the version could not take a digest."""
    assert DOCKERFILE.count("FROM python") == DOCKERFILE.count("FROM python AS")
    assert "ARG PYTHON_IMAGE=python:3.12-slim\nFROM ${PYTHON_IMAGE} AS python\n" in DOCKERFILE
