"""Settings of `atoll demo`, and the names and token counts that follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from atoll_wire.errors import UsageError
from atoll_wire.process.settings import Settings
from pydantic import Field

NAMES = ("eu-west", "us-east", "ap-south", "us-west", "eu-north", "sa-east")
BATCH, CONTEXT = 8, 128


class DemoSettings(Settings):
    """The options of `atoll demo`."""

    command: ClassVar[str] = "demo"

    learners: Annotated[int, Field(ge=0, le=64, description="Number of learners. 0: three, or two per region.")] = 0
    regions: Annotated[
        int,
        Field(
            ge=0,
            le=6,
            description="Number of regions. Each has a front behind a link of 100 Mbit/s and 40 ms each way. 0: none.",
        ),
    ] = 0
    shards: Annotated[
        int,
        Field(
            ge=1,
            le=8,
            description="Number of shards, each a process. With 2 or more, the learners use a front, "
            "and the demo kills a shard, the registrar, a learner and the front.",
        ),
    ] = 1
    steps: Annotated[int, Field(ge=30, description="Inner steps, summed over all learners.")] = 2700
    kills: Annotated[bool, Field(description="Kill a learner, and later the core, during training.")] = True
    solo: Annotated[
        bool,
        Field(
            description="Afterwards, train without Atoll on the busiest learner's number of tokens, and compare losses."
        ),
    ] = False
    seed: Annotated[int, Field(ge=0, description="Seed of the initial parameters and of the text's order.")] = 0
    data: Annotated[
        Path | None,
        Field(description="A text file, or a folder of text files. Default: sources of Python's standard library."),
    ] = None
    keep: Annotated[
        Path | None,
        Field(description="Store the run, its recording (for atoll replay PATH/run) and all logs in this directory."),
    ] = None

    def check(self) -> None:
        """Raises UsageError for contradictory options."""
        if self.regions and self.sharded:
            raise UsageError(
                "--regions and --shards cannot be combined, because a front calls shards directly, not over the demo's "
                "links: give only one of them"
            )

    @property
    def sharded(self) -> bool:
        """Whether the run has several shards."""
        return self.shards > 1

    @property
    def count(self) -> int:
        """The number of learners in all regions."""
        return self.learners or 2 * self.regions or 3

    @property
    def total_tokens(self) -> int:
        """The number of tokens after which the run ends."""
        return self.steps * BATCH * CONTEXT

    def region(self, learner: int) -> str:
        """Returns a learner's region. Without fronts, each learner has its own region."""
        return region_name(learner % self.regions if self.regions else learner)

    def name(self, learner: int) -> str:
        """Returns the name under which a learner joins. learner: the learner's number, from 0."""
        return f"{self.region(learner)}-{learner // self.regions + 1}" if self.regions else region_name(learner)


def region_name(number: int) -> str:
    """Returns a region's name, which is also its only learner's name. number: the region's number, from 0."""
    return NAMES[number] if number < len(NAMES) else f"island-{number + 1}"
