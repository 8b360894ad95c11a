"""Settings of `atoll demo`, and what follows from them: names and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from atoll_wire.settings import Option, Settings
from pydantic import Field

NAMES = ("eu-west", "us-east", "ap-south", "us-west", "eu-north", "sa-east")
BATCH, CONTEXT = 8, 128


class DemoSettings(Settings):
    """One demo."""

    command: ClassVar[str] = "demo"

    learners: Annotated[int, Field(ge=0, le=64, description="Learner processes. 0: three, or two in each region.")] = 0
    regions: Annotated[
        int,
        Field(
            ge=0, le=6,
            description="Regions with a front each, behind a link of 100 Mbit/s and 40 ms. 0: learners call the core.",
        ),
    ] = 0  # fmt: skip
    steps: Annotated[int, Field(ge=30, description="Inner steps of all learners together.")] = 2700
    kills: Annotated[bool, Field(description="Kill a learner, and later the core, on the way.")] = True
    solo: Annotated[bool, Field(description="Afterwards train the busiest learner's tokens alone, and compare.")] = (
        False
    )
    seed: Annotated[int, Field(ge=0, description="Of the first parameters and the text's order.")] = 0
    data: Annotated[
        Path | None,
        Field(description="A text file or a folder of them; else the Python standard library's sources."),
    ] = None
    json_path: Annotated[Path | None, Field(description="Write the summary there."), Option(name="json")] = None
    keep: Annotated[
        Path | None,
        Field(description="Keep the run there, recorded for atoll replay PATH/run, and the processes' logs."),
    ] = None

    @property
    def count(self) -> int:
        """Of learners."""
        return self.learners or 2 * self.regions or 3

    @property
    def total_tokens(self) -> int:
        """At which the run ends."""
        return self.steps * BATCH * CONTEXT

    def region(self, learner: int) -> str:
        """Of a learner: its own, where there are no fronts."""
        return region_name(learner % self.regions if self.regions else learner)

    def name(self, learner: int) -> str:
        """As which it joins."""
        return f"{self.region(learner)}-{learner // self.regions + 1}" if self.regions else region_name(learner)


def region_name(number: int) -> str:
    """Of a region, or of a learner that is alone in it."""
    return NAMES[number] if number < len(NAMES) else f"island-{number + 1}"
