"""Streams that are over: what comes in them is thrown away, and counted."""

from __future__ import annotations

STREAM_SHIFT = 48
"""The stream is in the highest 16 bits of a tag."""


class DroppedStreams:
    """The streams of one peer, or of a fabric, in which nothing is received any more."""

    def __init__(self) -> None:
        self._streams: list[range] = []
        self.num_messages = 0
        """So many messages were thrown away."""

    def add(self, streams: range) -> None:
        """Let these be over."""
        self._streams.append(streams)

    def take(self, tag: int) -> bool:
        """Whether the message ``tag`` is in one of them; then it is counted."""
        is_over = any(tag >> STREAM_SHIFT in streams for streams in self._streams)
        self.num_messages += is_over
        return is_over
