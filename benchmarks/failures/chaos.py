"""Compares Atoll with a synchronous job under the same failures.

python -m benchmarks.failures.chaos --seconds 600 --json PATH

First, `atoll chaos` kills random learners, with a given mean time between failures. Then, the synchronous job of
benchmarks/data_parallel trains the same model for the same time, and the same ranks are killed at the same times.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from atoll.chaos.local_deployment import NAMES
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions, write_record

MIN_GOODPUT = 0.95  # the promised goodput
BAR = 22  # number of characters in a full bar


def main() -> int:
    """Runs both jobs and prints a comparison. Returns 1 if Atoll's goodput is below MIN_GOODPUT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--mtbf", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tokens", type=int, default=12_000_000, help="length of the learning rate schedule in tokens, for both sides"
    )
    parser.add_argument("--json", type=Path, dest="json_path")
    options, under = parser.parse_args(), conditions()
    with tempfile.TemporaryDirectory() as place:
        mine, theirs = Path(place) / "atoll.json", Path(place) / "ddp.json"
        common = ["--seconds", str(options.seconds), "--seed", str(options.seed)]
        chaos = ["--learners", str(options.learners), "--mtbf-s", str(options.mtbf), "--json", str(mine)]
        _run("atoll.cli", "chaos", *chaos, "--total-tokens", str(options.tokens), *common)
        atoll = json.loads(mine.read_text())
        kills = ",".join(f"{at_s}:{NAMES.index(target)}" for at_s, _, target, _ in atoll["blows"])
        ddp_job = ["--ranks", str(options.learners), "--kills", kills, "--json", str(theirs)]
        _run("benchmarks.data_parallel", *ddp_job, "--tokens", str(options.tokens), *common)
        ddp = json.loads(theirs.read_text())
    Console().print(table(atoll, ddp))
    if options.json_path is not None:
        write_record(options.json_path, {"atoll": atoll, "ddp": ddp}, under)
    return 0 if atoll["goodput"] >= MIN_GOODPUT else 1


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


def table(atoll: dict[str, Any], ddp: dict[str, Any]) -> Table:
    """Returns a table of both results.

    Interpreter starts have their own row: they depend on the machine, not the method.
    """
    shown = Table("what", "Atoll", "synchronous job", title="the same failures")
    kept = atoll["tokens_merged"], ddp["tokens_kept"]
    rows = [
        ("learners killed", str(atoll["kills"]["learner"]), str(ddp["kills"])),
        ("goodput", f"{atoll['goodput']:.4f}", f"{ddp['goodput']:.4f}"),
        ("", bar(atoll["goodput"]), bar(ddp["goodput"])),
        (
            "  ... without interpreter starts",
            f"{_apart(atoll):.4f}",
            f"{ddp['goodput_without_interpreter_start']:.4f}",
        ),
        ("tokens in the model", f"{kept[0]:,}", f"{kept[1]:,}"),
        ("  ... per second", f"{kept[0] / atoll['seconds']:,.0f}", f"{kept[1] / ddp['seconds']:,.0f}"),
        ("tokens trained and lost", f"{atoll['tokens_trained'] - kept[0]:,}", f"{ddp['tokens_lost']:,}"),
        ("validation loss", f"{atoll['validation_loss']:.4f}", f"{ddp['validation_loss']:.4f}"),
    ]
    for row in rows:
        shown.add_row(*row)
    shown.add_section()
    for cause in dict.fromkeys((*atoll["goodput_lost_s"], *ddp["lost_s"])):
        shares = [
            f"{100 * lost[cause] / whole['provisioned_s']:.2f} %" if cause in lost else ""
            for lost, whole in ((atoll["goodput_lost_s"], atoll), (ddp["lost_s"], ddp))
        ]
        shown.add_row(f"lost: {cause.replace('_', ' ')}", *shares)
    return shown


def bar(share: float) -> str:
    """Returns a bar of characters. share: the filled share, 0 to 1."""
    return "█" * round(BAR * share) + "░" * (BAR - round(BAR * share))


def _apart(atoll: dict[str, Any]) -> float:
    value: float = atoll["useful_s"] / (atoll["provisioned_s"] - atoll["goodput_lost_s"]["restarting"])
    return value


if __name__ == "__main__":
    sys.exit(main())
