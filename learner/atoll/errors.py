"""What a learner tells its user in one line."""

from __future__ import annotations

from atoll_wire.errors import UserError


class LearnerError(UserError):
    """The learner cannot go on: what is wrong and what would help."""


NONSENSE = "use the same atoll on both sides, or look at what stands between them"
