"""PURE: tokens of sessions. What has the run's key makes and checks them: no list of sessions is needed.

A token is a session's number and an HMAC-SHA-256 of all that the session stands for. It tells that the registrar gave
the session. That the session is over, by a newer one, a good-bye or an eviction, is known by its number.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, field

NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class SessionKey:
    """secret: of the run, never told to a learner or a front.

    start: random, of this start of the registrar. An epoch is a count: it comes again in a run that is restored from a
    backup, and in two copies of a directory.
    """

    secret: bytes = field(repr=False)
    start: bytes = field(repr=False)
    run: str
    generation: int

    def token(self, name: str, incarnation: int, number: int) -> bytes:
        """Proves that a call comes from the process that was given this session of a name. number: 1 to 2**64 - 1."""
        said = json.dumps([self.start.hex(), self.run, self.generation, name, incarnation, number])
        return number.to_bytes(NUMBER_BYTES, "big") + hmac.digest(self.secret, said.encode(), "sha256")

    def number(self, name: str, incarnation: int, token: bytes) -> int:
        """The number of the session that a token proves; 0: it is of another name, incarnation, run or start."""
        number = int.from_bytes(token[:NUMBER_BYTES], "big")
        return number if hmac.compare_digest(token, self.token(name, incarnation, number)) else 0
