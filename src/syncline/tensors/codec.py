"""Numbers in fewer bits, made by compiled code: blocks of 128 float32 with one scale each (``native/codec.hpp``)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from syncline.fabric.compiled import check_compiled
from syncline.tensors.memory import bytes_of

_MEASURED = 1 << 18
"""Numbers that are coded to see how long it takes: a shard of a bucket."""


@dataclass(frozen=True, slots=True)
class Codec:
    """Codes of ``bits`` for each number: 4 or 8 (integers times the block's scale), or 16 (bfloat16).

    Tensors are flat, contiguous, float32 and in host memory. Another number never changes what becomes of one outside
    its block, and coding the same numbers gives the same bytes on every processor.
    """

    bits: int

    def num_bytes(self, count: int) -> int:
        """Bytes of the codes of ``count`` numbers."""
        num_bytes: int = _compiled().coded_bytes(self.bits, count)
        return num_bytes

    def encode(self, values: torch.Tensor, error: torch.Tensor, codes: torch.Tensor) -> None:
        """Write the codes of ``values + error`` to ``codes``, and what they lack of it to ``error``.

        A block with NaN or infinity becomes NaN; it leaves no error.
        """
        _compiled().encode(self.bits, bytes_of(values), bytes_of(error), bytes_of(codes))

    def add(self, codes: torch.Tensor, into: torch.Tensor) -> None:
        """Add the numbers that ``codes`` stand for to ``into``."""
        _compiled().decode(self.bits, bytes_of(codes), bytes_of(into))

    def measure_s_per_byte(self) -> float:
        """Return the seconds that coding and adding one byte of float32 takes here: the best of a few short runs."""
        values = torch.linspace(-1, 1, _MEASURED)
        error, sums = torch.zeros_like(values), torch.zeros_like(values)
        codes = torch.empty(self.num_bytes(_MEASURED), dtype=torch.uint8)
        times_s = []
        for _ in range(4):
            start_s = time.perf_counter()
            self.encode(values, error, codes)
            self.add(codes, sums)
            times_s.append(time.perf_counter() - start_s)
        return min(times_s) / values.nbytes


def _compiled() -> Any:
    check_compiled()
    from syncline.fabric import _native

    return _native
