"""Settings of `atoll learner`: the model and its training, and the run that it joins. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

from atoll_wire.settings import Certificates, Metrics, Option, Settings
from pydantic import Field

MODEL = "Model and text"
Size: TypeAlias = Literal["tiny", "25m", "124m"]  # the keys of SIZES


class TrainSettings(Settings):
    """One reference learner. slow_down: see `train`."""

    command: ClassVar[str] = "learner"
    panel: ClassVar[str] = MODEL

    size: Annotated[Size, Field(description="Size of the model, by its parameters; tiny has 1M.")] = "tiny"
    data: Annotated[
        Path | None,
        Field(description="A text file or a folder of them; else the Python standard library's sources."),
    ] = None
    batch: Annotated[int, Field(ge=1, description="Windows in a step.")] = 8
    learning_rate: Annotated[float, Field(ge=0, description="Peak of AdamW's rate.")] = 3e-3
    max_steps: Annotated[int | None, Field(ge=1, description="Leave after so many steps of this learner.")] = None
    seed: Annotated[int, Field(ge=0, description="Of the first parameters and the text's order.")] = 0
    device: Annotated[str, Field(description="auto, cpu, cuda, cuda:1, ...")] = "auto"
    threads: Annotated[int, Field(ge=0, description="CPU threads of torch. 0: its own choice.")] = 1
    slow_down: Annotated[float, Field(ge=1, description="Pause after each step, to run at 1/N of the speed.")] = 1.0


class Joining(Certificates, Metrics):
    """Where and as whom the learner joins."""

    command: ClassVar[str] = "learner"
    panel: ClassVar[str] = "Joining"

    servers: Annotated[
        tuple[str, ...],
        Field(description="Address of a core, or of a front."),
        Option(name="server", metavar="HOST:PORT"),
    ] = ("127.0.0.1:7070",)
    name: Annotated[str, Field(description="Unique among the run's learners; else REGION.HOSTNAME.")] = ""
    region: Annotated[str, Field(description="Where this learner is, for people.")] = ""
    adoption: Annotated[
        Literal["rebase", "overwrite"], Field(description="rebase keeps outstanding work, overwrite drops it.")
    ] = "rebase"
    connect_timeout_s: Annotated[float, Field(ge=0, description="Seconds to wait for the core at the start.")] = 600.0
    drain_s: Annotated[float, Field(ge=0, description="Seconds to wait for acknowledgements at the end.")] = 30.0
