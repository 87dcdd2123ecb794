"""Temporaries in which contributions land before they are added: few, reused, and so still in the cache."""

from __future__ import annotations

from dataclasses import dataclass

MIN_BLOCK_BYTES = 4096


class TemporaryPool:
    """Blocks of memory in sizes of powers of two; what is given back is kept up to ``max_kept_bytes``.

    The last block given back is the first to be taken again.
    """

    def __init__(self, max_kept_bytes: int) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._free: dict[int, list[bytearray]] = {}
        self._kept_bytes = 0
        self._used_bytes = 0

    def take(self, num_bytes: int) -> Temporary:
        """Return a temporary of ``num_bytes``; its content is undefined."""
        size = max(MIN_BLOCK_BYTES, 1 << (num_bytes - 1).bit_length())
        self._used_bytes += size
        free = self._free.get(size)
        if free:
            self._kept_bytes -= size
            block = free.pop()
        else:
            block = bytearray(size)
        return Temporary(block=block, view=memoryview(block)[:num_bytes])

    def give_back(self, temporary: Temporary) -> None:
        """Let ``temporary`` be used again."""
        size = len(temporary.block)
        self._used_bytes -= size
        if self._kept_bytes + size <= self._max_kept_bytes:
            self._kept_bytes += size
            self._free.setdefault(size, []).append(temporary.block)

    def give_up(self, temporary: Temporary) -> None:
        """Never use ``temporary`` again: something may still hold its memory."""
        self._used_bytes -= len(temporary.block)

    @property
    def used_bytes(self) -> int:
        """Bytes that are out, now."""
        return self._used_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that wait to be used again, now."""
        return self._kept_bytes


@dataclass(slots=True, kw_only=True)
class Temporary:
    """A block and the part of it that is in use."""

    block: bytearray
    view: memoryview
