"""`atoll doctor` for learners: the checks of `atoll_wire.doctor` and a comparison of a model with the run's model."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

from atoll_wire.doctor import DoctorSettings as ChecksSettings
from atoll_wire.doctor import Finding, LearnerToCheck, Severity, check_connection, check_disk, print_findings, report
from pydantic import Field

from atoll.reference.settings import Size

if TYPE_CHECKING:
    from torch import nn

    from atoll.model.parameters import Optimizers

__all__ = [
    "DoctorSettings",
    "Finding",
    "LearnerToCheck",
    "Severity",
    "check_connection",
    "check_disk",
    "of_model",
    "print_findings",
    "report",
]


class DoctorSettings(ChecksSettings):
    """The options of `atoll doctor`."""

    size: Annotated[
        Size | None,
        Field(
            description="Compare the reference model of this size with the run's model. "
            "For other models, use atoll.doctor.of_model."
        ),
    ] = None


def of_model(model: nn.Module, optimizer: Optimizers, unshared: Collection[str] = ()) -> dict[str, Any]:
    """Returns the arguments that describe a model to a LearnerToCheck.

    Args:
        model: As in `atoll.Learner`.
        optimizer: As in `atoll.Learner`.
        unshared: As in `atoll.Learner`.

    Returns:
        The arguments `tensors` and `frozen_digest`.

    Raises:
        LearnerError: If Atoll cannot train the model.

    Example:
        ```python
        learner = LearnerToCheck("127.0.0.1:7070", TransportSecurity(), **of_model(model, optimizer))
        ```
    """
    from atoll.model.parameters import Parameters  # noqa: PLC0415 - needs torch, which a front's host may not have

    parameters = Parameters(model, optimizer, unshared)
    return {"tensors": parameters.tensors, "frozen_digest": parameters.frozen_digest()}
