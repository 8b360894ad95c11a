"""The quorum of a round, which an operator specifies as a number or a share of the learners."""

from __future__ import annotations

import math
from typing import Annotated

from atoll_wire.errors import UsageError
from pydantic import BaseModel, ConfigDict, Field


class Quorum(BaseModel):
    """The quorum of a round: a fixed number of learners, or a share of the live learners.

    learners: the fixed number; None to use the share. share: fraction of the live learners.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    learners: Annotated[int, Field(ge=1)] | None = None
    share: Annotated[float, Field(gt=0, le=1)] = 0.5

    def of(self, live: int) -> int:
        """Returns the quorum (K) for this number of live learners. The quorum is at most `live` but never below 1."""
        wanted = self.learners if self.learners is not None else math.ceil(self.share * live)
        return max(1, min(wanted, live))

    def __str__(self) -> str:
        """Returns the quorum as text that `parse` accepts."""
        return f"{100 * self.share:g}%" if self.learners is None else str(self.learners)

    @classmethod
    def parse(cls, text: str) -> Quorum:
        """Returns the quorum that a text describes: "3" for three learners, "0.5" or "50%" for half of the live ones.

        Raises UsageError if the text is neither a number of learners nor a share.
        """
        try:
            if text.endswith("%"):
                return cls(share=float(text[:-1]) / 100)
            return cls(share=float(text)) if "." in text else cls(learners=int(text))
        except ValueError as error:
            raise UsageError(
                f'quorum "{text}" is neither a number of learners nor a share: give a value such as 3, 0.5 or 50%'
            ) from error
