"""Which rank owns how much with the sharded update: what users see of the portions that were chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from syncline.schedule.spares import Apart
from syncline.schedule.step_candidates import BALANCED
from syncline.updates.bucket_schedule import BucketSchedule
from syncline.updates.host_portions import Portions

_ALIKE = 0.01
_MOST_LISTED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedStatistics:
    """How the parameters, and with them the optimizer's state, are divided among the ranks.

    >>> model, optimizer = syncline.distribute(model, optimizer, syncline.Sharded())
    >>> print(optimizer.statistics())
    portions="balanced": each rank owns 100.0 % of 10 elements
    """

    portions: Literal["balanced", "fastest", "given"] | float
    """What was asked for; "given" are those of a mapping."""
    shares: tuple[float, ...]
    """The part of all elements that each rank owns; what it is the spare of counts."""
    num_elements: int
    """Of all parameters in buckets."""
    num_replicas: int = 1
    """How many parts of the job own all elements, each by itself."""
    spares: Apart | None = None
    """What each range's owner and its spare are apart by: other racks, hosts or ranks; None without spares."""

    @classmethod
    def of(cls, bucket_schedules: Sequence[BucketSchedule], portions: Portions) -> ShardedStatistics:
        """Count what the ranks own of all buckets."""
        owned = [sum(numbers) for numbers in zip(*(one.num_owned for one in bucket_schedules), strict=True)]
        num_elements = sum(one.layout.num_elements for one in bucket_schedules)
        return cls(
            portions="given" if isinstance(portions, Mapping) else portions,
            shares=tuple(number / max(1, num_elements) for number in owned),
            num_elements=num_elements,
            num_replicas=max(1, len(bucket_schedules[0].replicas)) if bucket_schedules else 1,
            spares=bucket_schedules[0].apart if bucket_schedules else None,
        )

    @property
    def is_balanced(self) -> bool:
        """Whether no rank owns more than 1.25 / N, or twice that with what it is the spare of."""
        return max(self.shares, default=0.0) * len(self.shares) <= BALANCED * (1 + _ALIKE) * (
            1 if self.spares is None else 2
        )

    def __str__(self) -> str:
        """One line for people."""
        least, most = min(self.shares, default=0.0), max(self.shares, default=0.0)
        if math.isclose(least, most, rel_tol=_ALIKE):
            owned = f"each rank owns {_percent(most)} of {self.num_elements} elements"
        else:
            listed = ", ".join(
                f"rank {rank} {_percent(share)}" for rank, share in enumerate(self.shares[:_MOST_LISTED])
            )
            more = ", ..." if len(self.shares) > _MOST_LISTED else ""
            owned = f"of {self.num_elements} elements ranks own {_percent(least)} to {_percent(most)}: {listed}{more}"
        if self.spares is not None:
            return f"a spare of each range in another {self.spares}: {owned}"
        if self.num_replicas > 1:
            return f"{self.num_replicas} replicas: {owned}"
        if self.portions == "balanced" and not self.is_balanced:
            owned += (
                "; with at most 1.25 / N each the predicted step would be more than 10 % longer, or parameters are "
            )
            owned += "too large"
        asked = f'"{self.portions}"' if isinstance(self.portions, str) else f"{self.portions:g}"
        return f"portions={asked}: {owned}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
