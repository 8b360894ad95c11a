"""PURE: decides from a contribution's header whether its upload may begin."""

from __future__ import annotations

from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import FragmentLayout

from atoll_server.access.refusals import Refused, Status

MAX_TOKENS, MAX_STEPS = 1 << 50, 1 << 40  # limits for one contribution; larger numbers would make weights meaningless
MAX_NUMBER = 1 << 62  # limit on seq and on ordinals of units, below the largest integer that the ledger can store
MAX_RANGES = 64  # limit on the unit ranges of one contribution, one per lease


def check_header(header: pb.PushHeader, fragment: FragmentLayout, run_codec: Codec) -> None:
    """Raises Refused for a header that is invalid in this run."""
    most = sum(frame_codec.max_payload_bytes(span, run_codec) for span in fragment.frames)
    if int(header.codec) != int(run_codec):
        numbers = f"uses codec number {header.codec}, but the run uses {int(run_codec)} ({run_codec.name})"
        raise _malformed(header, f"{numbers}: use the same version of Atoll on both sides")
    if header.frames != len(fragment.frames) or not 0 < header.size_bytes <= most:
        raise _malformed(
            header,
            f"declares {header.frames} frames and {header.size_bytes} bytes instead of "
            f"{len(fragment.frames)} frames and at most {most} bytes: use the same version of Atoll on both sides",
        )
    if not (0 < header.tokens <= MAX_TOKENS and 0 < header.steps <= MAX_STEPS) or len(header.digest) != 32:
        raise _malformed(
            header,
            f"declares {header.tokens} tokens, {header.steps} steps and a digest of {len(header.digest)} bytes: "
            f"send 1 to {MAX_TOKENS} tokens, 1 to {MAX_STEPS} steps and a 32-byte digest",
        )
    if header.seq > MAX_NUMBER:
        raise _malformed(header, f"has a seq above {MAX_NUMBER}: use a smaller seq")
    leases = {units.lease for units in header.units}
    if len(leases) < len(header.units) or len(leases) > MAX_RANGES or not all(map(_is_range, header.units)):
        raise _malformed(
            header,
            f"declares an invalid list of {len(header.units)} ranges of data units: send at most {MAX_RANGES}, one per "
            "lease",
        )


def _is_range(units: pb.UnitRange) -> bool:
    return 0 < units.lease <= MAX_NUMBER and units.after <= units.upto <= MAX_NUMBER


def check_age(header: pb.PushHeader, version: int, staleness: float, max_staleness: int) -> None:
    """Raises Refused if the base version does not exist or is too old.

    version: the fragment's current version. staleness, max_staleness: numbers of outer steps.
    """
    if header.base_version > version:
        raise Refused(
            Status.OUT_OF_RANGE,
            f"contribution {_name(header)} is based on version {header.base_version}, but the "
            f"fragment is at version {version}, perhaps after a restore: fetch the whole fragment and drop the work",
        )
    if staleness > max_staleness:
        raise Refused(
            Status.OUT_OF_RANGE,
            f"contribution {_name(header)} is {staleness:.3g} outer steps old, but the limit is {max_staleness}: "
            "fetch the whole fragment and drop the outstanding work",
        )


def declared(header: pb.PushHeader) -> pb.PushHeader:
    """Returns the part of a header that describes the contribution.

    A repeated header may differ in the other fields.
    """
    said = pb.PushHeader.FromString(header.SerializeToString())
    said.ClearField("session")
    said.ClearField("cycle")
    said.ClearField("control_only")
    return said


def _malformed(header: pb.PushHeader, text: str) -> Refused:
    return Refused(Status.INVALID_ARGUMENT, f"contribution {_name(header)} {text}")


def _name(header: pb.PushHeader) -> str:
    session = header.session
    return f"{session.learner}/{session.incarnation}/{header.fragment}/{header.seq}"
