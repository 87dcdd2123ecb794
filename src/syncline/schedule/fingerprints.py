"""Numbers that look random and are the same in every process: ranks stand for their contributions by them in proofs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
_STRIDE = np.uint64(0x9E3779B97F4A7C15)


def draw_words(count: int, *, seed: int) -> Words:
    """Return ``count`` words, each of which differs from all others: those of SplitMix64 from ``seed`` on.

    ``numpy.random`` has better ones, but loading it takes longer than planning for a small topology.
    """
    return scramble(np.uint64(seed) + _STRIDE * np.arange(1, count + 1, dtype=np.uint64))


def scramble(words: Words) -> Words:
    """Mix bits one to one (the finalizer of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed
