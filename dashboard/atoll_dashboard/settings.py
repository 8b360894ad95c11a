"""The settings of a dashboard process."""

from __future__ import annotations

from typing import Annotated, ClassVar

from atoll_wire.errors import SettingsError
from atoll_wire.process.settings import Address, Certificates, Option
from atoll_wire.security.transport import on_loopback
from pydantic import Field

LOCAL_NAMES = ("localhost",)  # besides all IP addresses


class DashboardSettings(Certificates):
    """The options of `atoll dashboard`. Its certificates are an operator's, for the core."""

    command: ClassVar[str] = "dashboard"

    server: Annotated[Address, Field(description="Address of a core, or of a front.")] = "127.0.0.1:7070"
    listen: Annotated[Address, Field(description="Where the page is. Port 0: any free one.")] = "127.0.0.1:7080"
    plaintext: Annotated[
        bool,
        Field(description="Allow an address beyond loopback: the page is plain HTTP, open to all who can reach it."),
    ] = False
    hosts: Annotated[
        tuple[str, ...],
        Field(description="A name that the page may be asked for by, beside localhost and addresses."),
        Option(name="host"),
    ] = ()
    token: Annotated[
        str,
        Field(
            description="Token to look with, where the core asks for one; "
            "operator actions need the token that is typed into the page."
        ),
        Option(variable="ATOLL_TOKEN"),
    ] = ""
    price_per_gb: Annotated[
        float, Field(ge=0, description="Price of a gigabyte on the WAN, in US dollars, for the cost that is shown.")
    ] = 0.09

    def check(self) -> None:
        """Raises SettingsError for invalid values, and for an address that would offer plain HTTP to a network.

        Raises TransportSecurityError for a core that must not be called.
        """
        self.security.check([self.server])
        if not self.plaintext and not on_loopback([self.listen]):
            text = f"--listen {self.listen} is not loopback: put a proxy with TLS in front of it, or give --plaintext"
            raise SettingsError(text)
        for host in self.hosts:
            if ":" in host or "/" in host:
                raise SettingsError(f"--host {host}: give a name alone, without scheme and port")
        if not (self.token.isascii() and self.token.isprintable()):
            raise SettingsError("--token has characters that no token has: give what `atoll token` printed")

    def names(self) -> tuple[str, ...]:
        """Host names that the dashboard answers to, besides IP addresses."""
        return (*LOCAL_NAMES, *self.hosts)
