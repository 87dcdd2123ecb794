"""Reports of the agreement as control messages."""

from __future__ import annotations

import struct
from functools import lru_cache

from syncline.elastic.agreement import Loss, Report
from syncline.elastic.epoch import Epoch
from syncline.errors import ConfigurationError, FabricError
from syncline.fabric import MAX_CONTROL_BYTES

_HEAD = struct.Struct("<IIHH")
_LOSS = struct.Struct("<HHB")


def encode_report(report: Report) -> bytes:
    """Encode a report: a head, a bit for each rank that may be a member of the base, and the losses."""
    members = sum(1 << member for member in report.base.members)
    bits = members.to_bytes(-(-members.bit_length() // 8), "little")
    losses = [_LOSS.pack(rank, loss.accuser, loss.has_left) for rank, loss in sorted(report.losses.items())]
    payload = _HEAD.pack(report.base.number, report.first_free, len(bits), len(losses)) + bits + b"".join(losses)
    if len(payload) > MAX_CONTROL_BYTES - 16:
        raise ConfigurationError(
            f"A report of {len(report.losses)} lost ranks among {len(report.base.members)} has {len(payload)} bytes, "
            f"more than fit into a control message of {MAX_CONTROL_BYTES}; start such a job again from a checkpoint"
        )
    return payload


def decode_report(payload: bytes) -> Report:
    """Decode a report; :class:`FabricError` for what is none."""
    try:
        number, first_free, num_bytes, num_losses = _HEAD.unpack_from(payload)
        start = _HEAD.size + num_bytes
        if len(payload) != start + num_losses * _LOSS.size:
            raise FabricError(f"A report of {len(payload)} bytes is cut off")
        base = _decode_base(number, payload[_HEAD.size : start])
        losses = {
            rank: Loss(accuser=accuser, has_left=bool(has_left))
            for rank, accuser, has_left in _LOSS.iter_unpack(payload[start:])
        }
    except struct.error as error:
        raise FabricError(f"{len(payload)} bytes are no report: {error}") from error
    return Report(base=base, losses=losses, first_free=first_free)


@lru_cache(maxsize=8)
def _decode_base(number: int, encoded: bytes) -> Epoch:
    """Decode the base of a report: once for all ranks that tell the same, and one object for what is kept of them."""
    bits = int.from_bytes(encoded, "little")
    return Epoch(number=number, members=tuple(member for member in range(8 * len(encoded)) if bits >> member & 1))
