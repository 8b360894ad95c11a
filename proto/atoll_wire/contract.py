"""Constants on which learners and cores must agree, in addition to outer.proto: versions, names and limits."""

from __future__ import annotations

from enum import StrEnum

from atoll_wire import outer_pb2 as pb
from atoll_wire.layout.layout import MergeKind, TensorSpec

PROTOCOL = 3  # version of the wire protocol; a core refuses learners with a different version
JOIN_S = 60.0  # timeout of Join: a core may have to read a whole model before it answers
REPORT_S = 1.0  # longest time between two reports of a learner, in seconds
HEARTBEAT_S = 1.0  # time between two reports of a front, in seconds
REPORTED = 128  # limit on declined rounds, and on adoptions, in one report
UPDATES_KEPT = 16  # default limit on the published updates that a core or front keeps of each fragment
AUTHORIZATION, BEARER = "authorization", "Bearer "  # metadata that carries an operator's token


class LearnerState(StrEnum):
    """The states of a learner in status, metrics and the dashboard."""

    LIVE = "live"
    PAUSED = "paused"  # the learner announced a pause, or the whole run is paused
    JOINING = "joining"  # the core has not seen the learner's first step yet
    SILENT = "silent"  # the learner has reported no step for longer than usual
    CUT_OFF = "cut_off"  # like SILENT, but the learner's front is silent too, so the learner may be training
    LEFT = "left"
    EVICTED = "evicted"


class LinkState(StrEnum):
    """The states of a link in status, metrics and the dashboard."""

    CONNECTED = "connected"
    SILENT = "silent"  # no message arrives
    UNKNOWN = "unknown"  # no message has arrived since the core started


class Fate(StrEnum):
    """The fate of a contribution."""

    PENDING = "pending"  # acknowledged, waiting for its merge
    MERGED = "merged"
    REFUSED = "refused"
    TURNED_AWAY = "turned_away"  # refused before its upload was complete, without a receipt


FATES = {Fate.PENDING: pb.FATE_PENDING, Fate.MERGED: pb.FATE_MERGED, Fate.REFUSED: pb.FATE_REFUSED}
FATE_NAMES = {number: name for name, number in FATES.items()}
MERGE_KINDS = {pb.MERGE_KIND_AVERAGE: MergeKind.AVERAGE, pb.MERGE_KIND_DIRECTION: MergeKind.DIRECTION}
MERGE_KIND_NUMBERS = {kind: number for number, kind in MERGE_KINDS.items()}


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call with an operator's token. Returns no metadata for an empty token."""
    return ((AUTHORIZATION, BEARER + token),) if token else ()


def tensor_message(tensor: TensorSpec) -> pb.Tensor:
    """Returns a tensor's description for a JoinRequest."""
    return pb.Tensor(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        kind=MERGE_KIND_NUMBERS[tensor.kind],
        tied_names=tensor.tied_names,
    )


def tensor_spec(tensor: pb.Tensor) -> TensorSpec:
    """Returns the tensor that a JoinRequest describes. Raises KeyError for an unknown kind of merge."""
    kind = MERGE_KINDS[tensor.kind]
    return TensorSpec(tensor.name, tuple(tensor.shape), tensor.dtype, kind, tuple(tensor.tied_names))
