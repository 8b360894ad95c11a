"""Writes the dashboards: `python docker/grafana/make.py [FOLDER]`. The default folder is docker/grafana/dashboards.

This is a script and not a package, because a package `docker` would hide the PyPI package of that name.
"""

from __future__ import annotations

import sys
from pathlib import Path

from boards import learner, overview, regions, rounds
from grafana_foundation_sdk.cog.encoder import JSONEncoder

BOARDS = {
    "overview": overview.board,
    "regions-and-wan": regions.board,
    "rounds": rounds.board,
    "one-learner": learner.board,
}


def main(folder: Path) -> None:
    """Writes one file per dashboard."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, board in BOARDS.items():
        text = JSONEncoder(sort_keys=True, indent=1).encode(board())
        (folder / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "dashboards")
