"""Replaces `pip install` on the pages: the tests' own packages replace the download.

It runs with the Python of the page's own environment, checks the page's words, and needs only the standard library.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tomllib
from pathlib import Path

PACKAGES = "TESTED_PACKAGES"  # environment variable with the directory of the installed packages


def install(words: list[str]) -> None:
    """Installs packages. Takes the words after `pip`. Raises AssertionError if pip would refuse them."""
    assert sys.prefix != sys.base_prefix, "pip must run in a virtual environment"
    command, *rest = words
    assert command == "install", words
    if rest[0] in {"-c", "--constraint"}:
        assert Path(rest[1]).is_file(), f"the file {rest[1]} does not exist"
        rest = rest[2:]
    (what,) = rest
    found = re.fullmatch(r"\.(?:\[([a-z,]+)\])?", what)
    assert found, f"{what} is not this folder"
    known = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set((found[1] or "").split(",")) - {""} <= set(known), f"{what}: the extras are {sorted(known)}"
    Path(sysconfig.get_path("purelib"), "installed.pth").write_text(os.environ[PACKAGES] + "\n")
    atoll = Path(sysconfig.get_path("scripts"), "atoll")
    atoll.write_text(f"#!{sys.executable}\nfrom atoll.cli import main\n\nmain()\n")
    atoll.chmod(0o755)


if __name__ == "__main__":
    install(sys.argv[1:])
