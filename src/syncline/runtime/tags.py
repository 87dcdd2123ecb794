"""How the messages of calls are numbered: 64 bits that no two messages in flight between two ranks share.

    stream (16 bits) | running number in the stream (18, wraps around) | slice (16) | message of the slice (14)

A running number may wrap because a rank cannot get 2**18 calls ahead of another: each call ends only after the rank
before has made it too.
"""

from __future__ import annotations

from syncline.errors import ConfigurationError

NUM_STREAMS = 1 << 16
NUMBER_BITS, SLICE_BITS, INDEX_BITS = 18, 16, 14
NUMBER_MASK = (1 << NUMBER_BITS) - 1
SLICE_TAGS = 1 << INDEX_BITS
"""From the first tag of a slice to that of the next."""


def first_tag(stream: int, number: int, slice_number: int) -> int:
    """Return the tag of message 0 of a slice; message k has k more."""
    call = (stream << NUMBER_BITS) | (number & NUMBER_MASK)
    return ((call << SLICE_BITS) | slice_number) << INDEX_BITS


def call_of_tag(tag: int) -> tuple[int, int]:
    """Return the stream and the running number (its lowest 18 bits) that ``tag`` belongs to."""
    call = tag >> (SLICE_BITS + INDEX_BITS)
    return call >> NUMBER_BITS, call & NUMBER_MASK


def check_tags_fit(*, label: str, stream: int, num_slices: int, num_messages: int) -> None:
    """Raise if the messages of a call cannot all be numbered."""
    if not 0 <= stream < NUM_STREAMS:
        raise ConfigurationError(f"{label}: a stream is a number from 0 to {NUM_STREAMS - 1}, not {stream}")
    if num_slices > 1 << SLICE_BITS:
        raise ConfigurationError(f"{label}: {num_slices} slices are more than {1 << SLICE_BITS}; cut larger slices")
    if num_messages > 1 << INDEX_BITS:
        raise ConfigurationError(
            f"{label}: {num_messages} messages between two ranks in one slice are more than {1 << INDEX_BITS}; "
            "choose a planner with fewer"
        )
