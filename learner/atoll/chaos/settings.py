"""Settings of `atoll chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from atoll_wire.process.settings import Count, Option, Settings
from pydantic import Field

from atoll.reference.settings import Size

WHAT = Option(panel="Deployment")


class ChaosSettings(Settings):
    """The options of `atoll chaos`: a deployment and the failures to inject."""

    command: ClassVar[str] = "chaos"

    learners: Annotated[int, Field(ge=1, le=64, description="Number of learners.")] = 4
    seconds: Annotated[float, Field(ge=1, description="Seconds to run once all learners are training.")] = 300.0
    mtbf_s: Annotated[
        float, Field(ge=0, description="Mean seconds between failures of any learner. 0: no failures.")
    ] = 60.0
    core_mtbf_s: Annotated[
        float, Field(ge=0, description="Mean seconds between failures of the core. 0: no failures.")
    ] = 0.0
    pauses: Annotated[float, Field(ge=0, le=1, description="Share of learner failures that are pauses (SIGSTOP).")] = (
        0.0
    )
    restart_after_s: Annotated[float, Field(ge=0, description="Seconds from a kill to the restart of the process.")] = (
        0.0
    )
    schedule: Annotated[
        str | None,
        Field(
            description="Failures to inject instead of random ones, as SECOND:ACTION:PROCESS. Add a pause's length in "
            "seconds. Example: 12:kill:eu-west,30:pause:us-east:5,40:kill:core."
        ),
    ] = None
    seed: Annotated[
        int, Field(ge=0, description="Seed of the failures, the initial parameters and the text's order.")
    ] = 0
    procfile: Annotated[
        Path | None,
        Field(description="File with your own deployment: one `name: command` per line. The core must be named core."),
        WHAT,
    ] = None
    server: Annotated[
        str,
        Field(description="Address of the core in --procfile."),
        Option(metavar="HOST:PORT", panel=WHAT.panel),
    ] = "127.0.0.1:7070"
    size: Annotated[Size, Field(description="Size of the model in parameters. tiny has 1M."), WHAT] = "tiny"
    batch: Annotated[int, Field(ge=1, description="Text windows per step."), WHAT] = 8
    total_tokens: Annotated[
        Count,
        Field(ge=1, description="Length of the learning rate schedule in tokens. The run ends after this many tokens."),
        WHAT,
    ] = 20_000_000
    core_options: Annotated[
        tuple[str, ...],
        Field(description="An option for the core, such as --core-option=--fragments=8."),
        Option(name="core-option", panel=WHAT.panel),
    ] = ("--fragments=8", "--snapshot-every-s=30")
    keep: Annotated[Path | None, Field(description="Store the run and all logs in this directory.")] = None
