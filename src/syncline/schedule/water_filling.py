"""Numbers within given ranges that sum to 1 and are as near to given proportions as can be."""

from __future__ import annotations

from collections.abc import Sequence

ROUNDING = 1e-9
_NUM_BISECTIONS = 60
_MOST_TIMES_THE_NEXT = 4
Range = tuple[float, float]


def limited_by_the_next(values: Sequence[float]) -> list[float]:
    """Return the values, none counted for more than four times the next one, unless that is zero."""
    most = _MOST_TIMES_THE_NEXT * sorted(values)[-2] or max(values)
    return [min(value, most) for value in values]


def nearest_to_equal(ranges: Sequence[Range]) -> list[float] | None:
    """Return one number of each range, clamp(level, low, high) with a common level, or None if no such sum is 1."""
    return nearest_to_proportions([1.0] * len(ranges), ranges)


def nearest_to_proportions(weights: Sequence[float], ranges: Sequence[Range]) -> list[float] | None:
    """Return clamp(level x weight, low, high) with a common level, or None if no such sum is 1; weights are above 0."""
    lows, highs = [low for low, _ in ranges], [min(1.0, high) for _, high in ranges]
    crossed = any(low > high + ROUNDING for low, high in zip(lows, highs, strict=True))
    if crossed or sum(lows) > 1 + ROUNDING or sum(highs) < 1 - ROUNDING:
        return None
    wanted = [weight / sum(weights) for weight in weights]
    if all(low <= part <= high for low, part, high in zip(lows, wanted, highs, strict=True)):
        return wanted

    def parts_at(level: float) -> list[float]:
        return [min(max(level * part, low), high) for low, part, high in zip(lows, wanted, highs, strict=True)]

    below, above = 0.0, 1 / min(wanted)
    for _ in range(_NUM_BISECTIONS):
        level = (below + above) / 2
        below, above = (below, level) if sum(parts_at(level)) >= 1 else (level, above)
    return parts_at(above)
