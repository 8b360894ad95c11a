"""The systemd units of the pages: systemd accepts them, and `atoll` accepts their command lines."""

from __future__ import annotations

import configparser
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.fences import Fence, all_fences
from tests.documents.test_fences import command

UNITS = [fence for fence in all_fences("ini") if fence.title.endswith(".service")]
PROGRAM = "/opt/atoll/venv/bin/atoll"


def test_core_and_front_have_units():
    assert [unit.title for unit in UNITS] == ["atoll-core.service", "atoll-front.service"]


@pytest.mark.parametrize("unit", UNITS, ids=str)
def test_atoll_accepts_the_command_line_of_a_unit(unit: Fence):
    program, process, *words = start(unit)
    assert program == PROGRAM
    with command().commands[process].make_context(process, words) as context:  # parses the options only
        assert context.params["tls"] == f"/etc/atoll/{process}-{'home' if process == 'core' else 'eu'}"
        assert context.params["listen"] == [f"0.0.0.0:{'7070' if process == 'core' else '7071'}"]


def test_a_wrong_command_line_is_found():
    with pytest.raises(Exception, match="No such option"):
        command().commands["core"].make_context("core", ["--dirr", "x"])


@pytest.mark.observe  # needs systemd-analyze from Debian's package systemd
@pytest.mark.parametrize("unit", UNITS, ids=str)
def test_systemd_accepts_a_unit(unit: Fence, tmp_path: Path):
    file = tmp_path / unit.title
    file.write_text(unit.text.replace(PROGRAM, sys.executable))  # the program must exist
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert unit.title not in checked.stderr, checked.stderr


def start(unit: Fence) -> list[str]:
    """Returns the words of a unit's ExecStart."""
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.text)
    assert set(parser.sections()) == {"Unit", "Service", "Install"}
    return shlex.split(parser["Service"]["ExecStart"])
