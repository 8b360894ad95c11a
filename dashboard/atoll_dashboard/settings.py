"""The settings of a dashboard process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from atoll_wire.cli.option_groups import read_token
from atoll_wire.errors import SettingsError, UsageError
from atoll_wire.process.settings import Address, Certificates, Option
from atoll_wire.security.transport import on_loopback
from pydantic import Field

LOCAL_NAMES = ("localhost",)  # in addition to all IP addresses


class DashboardSettings(Certificates):
    """The options of `atoll dashboard`. With TLS, the core requires a viewer's certificate."""

    command: ClassVar[str] = "dashboard"

    server: Annotated[
        str,
        Field(description="Address of a core or a front."),
        Option(metavar="HOST:PORT", variable="ATOLL_SERVER"),
    ] = "127.0.0.1:7070"
    listen: Annotated[Address, Field(description="Address of the page. Port 0: any free port.")] = "127.0.0.1:7080"
    plaintext: Annotated[
        bool,
        Field(
            description="Allow plain HTTP beyond loopback. Anyone who can reach the address can read the run's state."
        ),
    ] = False
    hosts: Annotated[
        tuple[str, ...],
        Field(description="Host name of the page, as browsers use it. localhost and IP addresses are always allowed."),
        Option(name="host"),
    ] = ()
    token: Annotated[
        str,
        Field(
            description="Token for reading, if the core requires one. "
            "Operator actions need the operator's own token, entered on the page."
        ),
        Option(variable="ATOLL_TOKEN"),
    ] = ""
    token_file: Annotated[
        Path | None, Field(description="File that holds the token for reading."), Option(variable="ATOLL_TOKEN_FILE")
    ] = None
    history: Annotated[
        Path | None,
        Field(description="File that keeps charts and events when the dashboard restarts. Created if missing."),
    ] = None
    price_per_gb: Annotated[
        float, Field(ge=0, description="Price of a gigabyte on the WAN, in US dollars, for the displayed cost.")
    ] = 0.09

    def check(self) -> None:
        """Raises SettingsError for invalid values, and for an address that would serve plain HTTP to a network.

        Raises TransportSecurityError for unusable certificates, and for a core beyond loopback without TLS.
        """
        self.security.check([self.server])
        if not self.plaintext and not on_loopback([self.listen]):
            text = f"--listen {self.listen} is not loopback: put a proxy with TLS in front of it, or pass --plaintext"
            raise SettingsError(text)
        for host in self.hosts:
            if ":" in host or "/" in host:
                raise UsageError(f"--host {host} is not a host name: give the name without a scheme or port")
        if self.token and self.token_file is not None:
            raise UsageError("--token and --token-file cannot be combined: give only one of them")
        own = self.own_token()
        if not (own.isascii() and own.isprintable()):
            raise SettingsError("the token contains invalid characters: give the token that `atoll token` printed")

    def own_token(self) -> str:
        """Returns the token for reading; empty if there is none. Raises UserError if the file cannot be read."""
        return self.token if self.token_file is None else read_token(self.token_file)

    def names(self) -> tuple[str, ...]:
        """Returns the allowed host names, in addition to IP addresses."""
        return (*LOCAL_NAMES, *self.hosts)
