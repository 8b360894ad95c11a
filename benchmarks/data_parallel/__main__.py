"""Measures what failures cost a synchronous job.

python -m benchmarks.data_parallel --ranks 4 --seconds 300 --mtbf 60 --json PATH

The job trains the reference model and text under DistributedDataParallel (gloo, CPU, one process with one thread per
rank). A failure is the SIGKILL of one rank. The other ranks cannot continue without it, so the whole job ends,
restarts, and continues from its last checkpoint.

goodput = useful rank-seconds / provisioned rank-seconds. Useful time is time in steps whose result is in the final
model. A repeated step counts once. Waiting for other ranks inside a step counts as useful. Failures are detected
immediately, and a spare machine is always available. These assumptions favour the synchronous job. Provisioned time
begins when all ranks have read their text and built their model for the first time. (A learner of Atoll is provisioned
from its first join.) It excludes the first start of interpreters (first_start_s), but includes later starts
(interpreter_start_s). See also `time_accounts.balance`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll_wire.errors import UserError
from rich.console import Console
from rich.table import Table

from benchmarks.data_parallel.job import Job, JobSettings
from benchmarks.data_parallel.time_accounts import Balance, Kill, balance, failures


def main() -> None:
    """Runs the job, prints a table, and writes its figures as JSON."""
    options = _options()
    settings = JobSettings(
        options.ranks, options.seconds, options.tokens, options.seed, options.checkpoint_steps, options.preset
    )
    console = Console()
    with tempfile.TemporaryDirectory() as place:
        job = Job(settings, Path(place), _kills(options), console)
        try:
            end_s = job.run()
        except UserError as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
        steps, loss = _final_model(settings, Path(place))
    history = job.history
    assert history.began_s is not None, "the job ran"
    found = balance(history, end_s, steps)
    summary = {
        **_figures(found),
        "kills": len(history.kills),
        "killed": [asdict(kill) for kill in history.kills],
        "steps": steps,
        "first_steps": [lives[0].first_step for lives in history.lives],  # one per start; null: the ranks did not meet
        "first_start_s": history.began_s - history.lives[0][0].spawned_s,
        "validation_loss": loss,
        "settings": asdict(settings) | {"mtbf_s": options.mtbf},
    }
    console.print(_table(summary))
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=whole_number, default=4)
    parser.add_argument(
        "--seconds", type=positive_seconds, help="seconds after which the job ends, at the end of a step"
    )
    parser.add_argument(
        "--tokens",
        type=whole_number,
        help="tokens of all ranks after which the job and its learning rate schedule end (default schedule: 4M)",
    )
    parser.add_argument(
        "--mtbf", type=positive_seconds, help="mean seconds between failures of the job (default: no failures)"
    )
    parser.add_argument(
        "--kills", type=seconds_and_ranks, help='failures to use instead of random ones, as SECONDS:RANK: "12.5:2,40:0"'
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the failures, the model and the text")
    parser.add_argument("--checkpoint-steps", type=whole_number, default=50, help="steps between checkpoints")
    parser.add_argument("--preset", default="tiny", choices=("tiny", "25m", "124m"))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.seconds is None and options.tokens is None:
        parser.error("the job would never end: give --seconds or --tokens")
    if options.kills is not None and options.mtbf is not None:
        parser.error("--kills and --mtbf cannot be combined: give only one of them")
    if any(kill.rank >= options.ranks for kill in options.kills or ()):
        parser.error(f"--kills names an unknown rank: give 0 to {options.ranks - 1}")
    if options.json is not None:
        try:
            options.json.touch()  # raises OSError before the training, not after it
        except OSError as error:
            parser.error(f"--json {options.json} cannot be written ({error.strerror}): give another path")
    return options


def whole_number(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def positive_seconds(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise ValueError
    return float(text)


def seconds_and_ranks(text: str) -> list[Kill]:
    pairs = [part.split(":") for part in text.split(",")]
    kills = [Kill(float(at_s), int(rank)) for at_s, rank in pairs]
    if any(kill.at_s < 0 or kill.rank < 0 for kill in kills):
        raise ValueError
    return sorted(kills, key=lambda kill: kill.at_s)


def _kills(options: argparse.Namespace) -> Iterator[Kill]:
    if options.mtbf is not None:
        return failures(options.seed, options.mtbf, options.ranks)
    return iter(options.kills or ())


def _final_model(settings: JobSettings, directory: Path) -> tuple[int, float]:
    """Returns the number of steps and the validation loss of the last checkpoint, loaded into the plain model."""
    from atoll.reference import data  # noqa: PLC0415 - torch is loaded only after the ranks have ended
    from atoll.reference.model import SIZES, build  # noqa: PLC0415
    from atoll.reference.train import validation_loss  # noqa: PLC0415

    from benchmarks.data_parallel.rank import CHECKPOINT, load  # noqa: PLC0415

    model = build(settings.preset, settings.seed)
    steps = load(directory / CHECKPOINT, model, None)
    return steps, validation_loss(model, data.load(None, SIZES[settings.preset].context))


def _figures(found: Balance) -> dict[str, Any]:
    return {
        "tokens_trained": found.tokens_trained,
        "tokens_kept": found.tokens_kept,
        "tokens_lost": found.tokens_trained - found.tokens_kept,
        "seconds": found.seconds,
        "goodput": found.goodput,
        "goodput_without_interpreter_start": found.goodput_without_interpreter_start,
        "useful_s": found.useful_s,
        "provisioned_s": found.provisioned_s,
        "lost_s": found.lost_s,
        "interpreter_start_s": found.lost_s["interpreter"],
        "redone_s": found.lost_s["redone"],
        "restart_s": found.restart_s,
    }


def _table(summary: dict[str, Any]) -> Table:
    settings, lost_s = summary["settings"], summary["lost_s"]
    restarts = [each for each in summary["restart_s"] if each is not None]
    table = Table("what", "figure", title="synchronous job")
    table.add_row("job", f"{settings['ranks']} ranks, {settings['preset']}, {summary['steps']:,} steps in the model")
    table.add_row("validation loss", f"{summary['validation_loss']:.3f}")
    table.add_row("killed during training", f"{summary['kills']} ranks; the job restarted each time")
    table.add_row("goodput", f"{summary['goodput']:.3f}")
    table.add_row("... without interpreter starts", f"{summary['goodput_without_interpreter_start']:.3f}")
    table.add_row("tokens", f"{summary['tokens_trained']:,} trained, {summary['tokens_lost']:,} of them lost")
    if restarts:
        mean_s = sum(restarts) / len(restarts)
        table.add_row("from kill to useful step", f"{mean_s:.1f} s on average, {max(restarts):.1f} s at most")
    table.add_row("provisioned rank-seconds", f"{summary['provisioned_s']:.0f}")
    table.add_row("... useful", f"{summary['useful_s']:.0f}")
    for cause, seconds in lost_s.items():
        table.add_row(f"... {cause.replace('_', ' ')}", f"{seconds:.1f}")
    table.add_row("seconds", f"{summary['seconds']:.0f}, after a first start of {summary['first_start_s']:.1f}")
    return table


if __name__ == "__main__":
    main()
