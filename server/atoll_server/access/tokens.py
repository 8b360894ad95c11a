"""Operator tokens. A file lists each operator's name and the SHA-256 sum of the token, but not the token itself."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from atoll_wire.contract import AUTHORIZATION, BEARER
from atoll_wire.errors import SettingsError, UsageError
from atoll_wire.security.certificate import NAME, Role

from atoll_server.access.identity import Caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.access.reread_file import RereadFile


class OperatorTokens:
    """The operator tokens in a file.

    The file is read again after a change, so that tokens of removed names become invalid.
    """

    def __init__(self, path: Path) -> None:
        fix = f"make the file readable, or create it with `atoll token NAME --file {path}`"
        self._file = RereadFile("--operator-tokens", path, partial(_sums, path), fix)

    def load(self) -> None:
        """Reads the file. Raises SettingsError if the file is unreadable or invalid."""
        self._file.load()

    def name_of(self, token: str) -> str | None:
        """Returns the name of the operator that has this token, or None if the file does not list the token.

        If the file has become invalid, the previous tokens stay valid.
        """
        found = hashlib.sha256(token.encode()).hexdigest()
        matching = [name for name, known in self._file.newest().items() if hmac.compare_digest(known, found)]
        return matching[0] if matching else None


def _sums(path: Path, text: str) -> dict[str, str]:
    """Returns the SHA-256 sums in a file's text, keyed by operator name. Raises SettingsError."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if any(len(line) != 2 or len(line[1]) != 64 for line in lines):
        raise SettingsError(
            f"--operator-tokens {path} contains a line that is not a name and a SHA-256 sum: delete it, and "
            "create tokens with `atoll token NAME`"
        )
    return {line[0]: line[1] for line in lines}


def new(path: Path, name: str) -> str:
    """Creates and returns an operator's token. An earlier token for this name becomes invalid.

    Raises SettingsError if the name is invalid or the file cannot be read or written.
    """
    if not NAME.fullmatch(name):
        raise UsageError(f'name "{name}" is not allowed: use 1 to 64 letters, digits, ".", "_" or "-"')
    token = secrets.token_urlsafe(32)
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if line.split()[:1] != [name]]
        part = path.with_name(path.name + ".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write("\n".join([*kept, f"{name} {hashlib.sha256(token.encode()).hexdigest()}"]) + "\n")
        part.replace(path)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read or written ({error}): give another --file") from error
    return token


def reader_name(tokens: OperatorTokens | None, caller: Caller, metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Returns the caller's name, or an empty string in the same cases as `operator_name`.

    Raises Refused if the caller may not read the published model. Readers, fronts and operators may read it. A front
    checks its own readers.
    """
    if caller.role in {Role.READER, Role.FRONT}:
        return caller.name
    try:
        return operator_name(tokens, caller, metadata)
    except Refused as refused:
        if refused.status is not Status.PERMISSION_DENIED:
            raise
        fix = "use a reader's certificate (atoll certs issue reader NAME)"
        fix = fix if caller.role is not None else "send an operator's token (atoll token NAME)"
        raise Refused(Status.PERMISSION_DENIED, f"this call is for readers: {fix}") from refused


def viewer_name(tokens: OperatorTokens | None, caller: Caller, metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Returns the caller's name, or an empty string in the same cases as `operator_name`.

    Raises Refused if the caller may not read the run's state. Viewers and operators may read it.
    """
    given = list(metadata)
    if caller.role is Role.VIEWER and all(key != AUTHORIZATION for key, _ in given):
        return caller.name
    try:
        return operator_name(tokens, caller, given)
    except Refused as refused:
        if refused.status is not Status.PERMISSION_DENIED:
            raise
        fix = "give --token-file, or a viewer's certificate" if tokens is not None else "give a viewer's certificate"
        text = f"this call is for viewers and operators: {fix} (atoll certs issue viewer NAME)"
        raise Refused(Status.PERMISSION_DENIED, text) from refused


def operator_name(tokens: OperatorTokens | None, caller: Caller, metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Returns the calling operator's name, or an empty string if callers need neither a certificate nor a token.

    tokens: None if the core accepts no tokens. Raises Refused if the caller is not an operator.
    """
    given = next((str(value) for key, value in metadata if key == AUTHORIZATION), "")
    if given:
        if tokens is None:
            text = "the core accepts no operator tokens: restart it with --operator-tokens FILE, or omit the token"
            raise Refused(Status.UNAUTHENTICATED, text)
        if (name := tokens.name_of(given.removeprefix(BEARER))) is None:
            raise Refused(
                Status.UNAUTHENTICATED,
                "the core does not know this token: create one with `atoll token NAME` in its --operator-tokens file",
            )
        return name
    if caller.role is Role.OPERATOR:
        return caller.name
    if caller.role is None and tokens is None:
        return ""
    fix = "give --token-file, or an operator's certificate" if tokens is not None else "give an operator's certificate"
    text = "this call is for operators"
    if caller.role is Role.VIEWER:
        text = f'the certificate of viewer "{caller.name}" allows only calls that show the run, but {text}'
    raise Refused(Status.PERMISSION_DENIED, f"{text}: {fix} (atoll certs issue operator NAME)")
