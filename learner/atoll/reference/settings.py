"""Settings of `atoll learner`: the model, its training, and the run that it joins. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

from atoll_wire.process.settings import Certificates, Metrics, Option, Settings
from pydantic import Field

MODEL = "Model and text"
Size: TypeAlias = Literal["tiny", "25m", "124m"]  # the keys of SIZES


class TrainSettings(Settings):
    """The options of a reference learner."""

    command: ClassVar[str] = "learner"
    panel: ClassVar[str] = MODEL

    size: Annotated[Size, Field(description="Size of the model in parameters. tiny has 1M.")] = "tiny"
    data: Annotated[
        Path | None,
        Field(description="A text file, or a folder of text files. Default: sources of Python's standard library."),
    ] = None
    batch: Annotated[int, Field(ge=1, description="Text windows per step.")] = 8
    learning_rate: Annotated[float, Field(ge=0, description="Peak learning rate of AdamW.")] = 3e-3
    max_steps: Annotated[
        int | None, Field(ge=1, description="Leave the run after this many steps of this process.")
    ] = None
    seed: Annotated[int, Field(ge=0, description="Seed of the initial parameters and of the text's order.")] = 0
    device: Annotated[str, Field(description="Training device: auto, cpu, cuda, cuda:1, ...")] = "auto"
    threads: Annotated[int, Field(ge=0, description="CPU threads for torch. 0: torch's default.")] = 1
    slow_down: Annotated[float, Field(ge=1, description="N: pause after each step, to train at 1/N of full speed.")] = (
        1.0
    )


class JoinSettings(Certificates, Metrics):
    """The run that the learner joins, and the learner's name in it."""

    command: ClassVar[str] = "learner"
    panel: ClassVar[str] = "Joining"

    servers: Annotated[
        tuple[str, ...],
        Field(description="Address of a core or a front."),
        Option(name="server", metavar="HOST:PORT", variable="ATOLL_SERVER"),
    ] = ("127.0.0.1:7070",)
    name: Annotated[str, Field(description="Name, unique in the run. Default: REGION.HOSTNAME.")] = ""
    region: Annotated[str, Field(description="Region of this learner, shown in status and metrics.")] = ""
    adoption: Annotated[
        Literal["rebase", "overwrite"],
        Field(description="When a new version arrives: rebase keeps outstanding work, overwrite drops it."),
    ] = "rebase"
    connect_timeout_s: Annotated[
        float, Field(ge=0, description="Longest wait for a core when joining, in seconds.")
    ] = 600.0
    if_refused: Annotated[
        Literal["exit", "wait"],
        Field(
            description="If the core refuses this learner permanently, for example after an eviction: exit with "
            "status 4, or wait for SIGTERM, so that no supervisor restarts it."
        ),
    ] = "exit"
    drain_s: Annotated[
        float, Field(ge=0, description="Longest wait for acknowledgements when leaving, in seconds.")
    ] = 30.0
