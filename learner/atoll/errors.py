"""Errors that the user of a learner or follower can fix."""

from __future__ import annotations

from atoll_wire.errors import UserError


class LearnerError(UserError):
    """The learner cannot join or continue. The message is one line with the fact, the cause and the fix.

    Example:
        ```python
        try:
            learner.start()
        except atoll.LearnerError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(error.exit_status)
        ```
    """


class FollowerError(UserError):
    """The follower cannot read the published model. The message states the fact, the cause and the fix.

    Example:
        ```python
        try:
            follower.update()
        except atoll.FollowerError as error:
            print(error)
        ```
    """


NONSENSE = "use the same version of Atoll on both sides, and check proxies between them"
