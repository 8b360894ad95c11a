"""PURE: tokens of sessions. A process with the run's key makes and checks them; it needs no list of sessions.

A token is a session's number and an HMAC-SHA-256 of all that the session stands for. It proves that the registrar gave
the session. The number shows when the session is over: by a newer session, a leave, or an eviction.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, field

NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class SessionKey:
    """secret: of the run, never sent to a learner or a front.

    start: random, drawn at each start of the registrar. An epoch is only a count: it repeats in a run that is restored
    from a backup, and in two copies of a directory.
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
        """The number of the session that a token proves; 0: the token is of another name, incarnation, run or start."""
        number = int.from_bytes(token[:NUMBER_BYTES], "big")
        return number if hmac.compare_digest(token, self.token(name, incarnation, number)) else 0
