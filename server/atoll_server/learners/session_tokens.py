"""PURE: issues and checks session tokens. To check a token, a process needs the run's key, but no list of sessions.

A token consists of the session's number and an HMAC-SHA-256 of the session's values. The HMAC proves that the registrar
issued the session. The number shows whether a newer session, a Leave or an eviction has ended the session.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, field

NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Issues and checks tokens. secret: the run's secret, which no process sends to a learner or a front.

    start: random value that the registrar draws at each start. The epoch would not suffice, since epochs repeat after a
    restore from a backup, and in two copies of a run's directory.
    """

    secret: bytes = field(repr=False)
    start: bytes = field(repr=False)
    run: str
    generation: int

    def token(self, name: str, incarnation: int, number: int) -> bytes:
        """Returns the token of a session. number: the session's number, 1 to 2**64 - 1."""
        said = json.dumps([self.start.hex(), self.run, self.generation, name, incarnation, number])
        return number.to_bytes(NUMBER_BYTES, "big") + hmac.digest(self.secret, said.encode(), "sha256")

    def number(self, name: str, incarnation: int, token: bytes) -> int:
        """Returns the session number that a token proves, or 0 if the token is invalid.

        A token is valid only for its name, incarnation, run, generation and start of the registrar.
        """
        number = int.from_bytes(token[:NUMBER_BYTES], "big")
        return number if hmac.compare_digest(token, self.token(name, incarnation, number)) else 0
