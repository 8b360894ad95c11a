"""The first start on a machine logs why it is slow, and later starts do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMPILES = """
import numba
import numpy as np
from atoll_wire.codec.block_kernels import add_squares
from atoll_wire.codec.compiling import compiling_is_logged

with compiling_is_logged():
    numba.njit(lambda x: x)(1)  # another package's function
    for kind in ("<f4", "f8"):  # each is compiled by itself
        add_squares(np.ones(64, kind), np.zeros(64))
"""


def said(cache: Path) -> str:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_compiling_is_logged_once_and_only_if_the_cache_lacks_a_kernel(tmp_path: Path):
    assert said(tmp_path).count("compiling kernels: this takes about half a minute") == 1
    assert said(tmp_path) == ""
