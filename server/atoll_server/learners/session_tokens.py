"""PURE: session tokens. Any process with the run's key can make and check them, without a list of sessions.

A token consists of the session's number and an HMAC-SHA-256 of the session's values. It proves that the registrar
issued the session. The number shows whether a newer session, a leave or an eviction ended the session.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, field

NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Makes and checks tokens. secret: the run's secret, which is never sent to a learner or a front.

    start: random value drawn at each start of the registrar. An epoch would not suffice, since it repeats after a
    restore from a backup, and in two copies of a directory.
    """

    secret: bytes = field(repr=False)
    start: bytes = field(repr=False)
    run: str
    generation: int

    def token(self, name: str, incarnation: int, number: int) -> bytes:
        """Returns a session's token, which proves that the session's process made a call. number: 1 to 2**64 - 1."""
        said = json.dumps([self.start.hex(), self.run, self.generation, name, incarnation, number])
        return number.to_bytes(NUMBER_BYTES, "big") + hmac.digest(self.secret, said.encode(), "sha256")

    def number(self, name: str, incarnation: int, token: bytes) -> int:
        """Returns the session number that a token proves.

        Returns 0 if the token belongs to another name, incarnation, run or start.
        """
        number = int.from_bytes(token[:NUMBER_BYTES], "big")
        return number if hmac.compare_digest(token, self.token(name, incarnation, number)) else 0
