"""How the messages of calls are numbered: 64 bits that no two messages in flight between two ranks share.

    stream (16 bits) | running number in the stream (18, wraps around) | slice (16) | message of the slice (14)

A running number may wrap because a rank cannot get 2**18 calls ahead of another: each call ends only after the rank
before has made it too.
"""

from __future__ import annotations

from syncline.errors import ConfigurationError
from syncline.fabric.slice_executor import CALL_TAGS, SLICE_TAGS

NUM_STREAMS = 1 << 16
NUMBER_BITS = 18
NUMBER_MASK = (1 << NUMBER_BITS) - 1
NUM_SLICES = CALL_TAGS // SLICE_TAGS
"""Slices of a call, at most."""


def first_tag(stream: int, number: int, slice_number: int) -> int:
    """Return the tag of message 0 of a slice; message k has k more."""
    return ((stream << NUMBER_BITS) | (number & NUMBER_MASK)) * CALL_TAGS + slice_number * SLICE_TAGS


def check_tags_fit(*, label: str, stream: int, num_slices: int, num_messages: int) -> None:
    """Raise if the messages of a call cannot all be numbered."""
    if not 0 <= stream < NUM_STREAMS:
        raise ConfigurationError(f"{label}: a stream is a number from 0 to {NUM_STREAMS - 1}, not {stream}")
    if num_slices > NUM_SLICES:
        raise ConfigurationError(f"{label}: {num_slices} slices are more than {NUM_SLICES}; cut larger slices")
    if num_messages > SLICE_TAGS:
        raise ConfigurationError(
            f"{label}: {num_messages} messages between two ranks in one slice are more than {SLICE_TAGS}; "
            "choose a planner with fewer"
        )
