"""Numbers within given ranges that sum to 1 and are as equal as can be."""

from __future__ import annotations

from collections.abc import Sequence

ROUNDING = 1e-9
_NUM_BISECTIONS = 60
Range = tuple[float, float]


def nearest_to_equal(ranges: Sequence[Range]) -> list[float] | None:
    """Return one number of each range, clamp(level, low, high) with a common level, or None if no such sum is 1."""
    lows, highs = [low for low, _ in ranges], [min(1.0, high) for _, high in ranges]
    crossed = any(low > high + ROUNDING for low, high in zip(lows, highs, strict=True))
    if crossed or sum(lows) > 1 + ROUNDING or sum(highs) < 1 - ROUNDING:
        return None
    equal = 1 / len(ranges)
    if all(low <= equal <= high for low, high in zip(lows, highs, strict=True)):
        return [equal] * len(ranges)
    below, above = 0.0, 1.0
    for _ in range(_NUM_BISECTIONS):
        level = (below + above) / 2
        total = sum(min(max(level, low), high) for low, high in zip(lows, highs, strict=True))
        below, above = (below, level) if total >= 1 else (level, above)
    return [min(max(above, low), high) for low, high in zip(lows, highs, strict=True)]
