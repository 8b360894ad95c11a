"""Errors that a learner shows to its user as one line."""

from __future__ import annotations

from atoll_wire.errors import UserError


class LearnerError(UserError):
    """The learner cannot continue. The message has the fact, the cause and the fix."""


NONSENSE = "use the same version of Atoll on both sides, and check proxies between them"
