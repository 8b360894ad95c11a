"""The settings of a front process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from atoll_wire.process.settings import Address, Bytes, Option
from pydantic import Field

from atoll_server.access.quotas import Quotas
from atoll_server.settings import ServerLimits, Serving


class FrontSettings(Serving):
    """The options of `atoll front`."""

    command: ClassVar[str] = "front"

    core: Annotated[Address, Field(description="Address of the core. With several shards: address of the registrar.")]
    listen: Annotated[
        tuple[str, ...],
        Field(description="Addresses to listen on. Port 0: any free port."),
        Option(metavar="HOST:PORT"),
    ] = ("127.0.0.1:7071",)
    region: Annotated[str, Field(description="Name of the region, for metrics, logs and atoll doctor.")] = ""
    audit_log: Annotated[Path | None, Field(description="File that records refused calls as JSON lines.")] = None
    cache: Annotated[
        Bytes,
        Field(
            ge=1 << 20,
            description="Memory for cached updates and whole fragments. Items that do not fit are not cached.",
        ),
    ] = 48 << 20
    limits: ServerLimits = ServerLimits()
    quotas: Quotas = Quotas()

    def check(self) -> None:
        """Raises SettingsError if the front would send plain text over a network without permission.

        The check covers both the addresses that serve learners and the address of the core.
        """
        self.check_reach(*self.listen, self.core)
