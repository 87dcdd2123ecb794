"""How long the halves of a sharded step take, as drafts or proved, and how they are best laid over a buffer."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.schedule.cost import CostModel, Prediction, count_messages, predict
from syncline.schedule.draft import Draft
from syncline.schedule.outline import Outline
from syncline.topology import Topology

_WORTH_WINDOWS = 1.5
"""So many times the messages of windows slices may take. Slices load all links evenly at all times; windows go round
the owners, and a link whose owners are few has at times no window to carry: on virtual time, without any cost of
messages, a step took 1.93 s in windows and 1.74 s in slices on ``three-racks-uneven-uplinks``."""
Pair = tuple[Draft, Draft]
"""A reduce-scatter and an all-gather with the same cuts and owners."""
Halves = Pair | tuple[Outline, Outline]
"""The same, which may be in outline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """How long the halves of a sharded step take, one after another, or both at once for one bucket after another.

    >>> topology = Topology.flat(2, rate=1e6)
    >>> step = plan_sharded_step(topology, 16 << 20, portions=[1.0, 0.0])  # one direction each
    >>> prediction = predict_sharded_step(step, topology, 16 << 20)
    >>> round(prediction.overlapped_s / prediction.time_s, 2)
    0.52
    """

    reduce_scatter: Prediction
    all_gather: Prediction

    @property
    def time_s(self) -> float:
        """Both halves, the all-gather after the reduce-scatter."""
        return self.reduce_scatter.time_s + self.all_gather.time_s

    @property
    def overlapped_s(self) -> float:
        """Both halves at once, where each bucket is updated as soon as its own reduce-scatter is over."""
        scatter, gather = self.reduce_scatter, self.all_gather
        links_s = max((scatter.link_s[link] + gather.link_s[link] for link in scatter.link_s), default=0.0)
        busy_s = max(links_s, scatter.rank_s + gather.rank_s, scatter.processor_s + gather.processor_s)
        first_s = scatter.first_slice_s + gather.first_slice_s
        return min(self.time_s, first_s + busy_s * (1 - 1 / scatter.num_slices))

    @property
    def num_full_links(self) -> int:
        """Number of directed links that are nearly as busy as the busiest, in both halves together."""
        return self.reduce_scatter.num_full_links + self.all_gather.num_full_links


def in_windows(pair: Halves, num_slices: int) -> bool:
    """Whether windows on one owner's part each take far fewer messages than slices that look like the whole."""
    num_in_windows = sum(count_messages(draft, num_slices) for draft in pair)
    return num_in_windows * _WORTH_WINDOWS < sum(draft.num_messages for draft in pair)


def drawn(halves: Halves) -> Pair:
    """Return both halves with all transfers."""
    scatter, gather = halves
    if isinstance(scatter, Draft) and isinstance(gather, Draft):
        return scatter, gather
    assert isinstance(scatter, Outline)
    assert isinstance(gather, Outline)
    return scatter.drawn(), gather.drawn()


def predict_pair(
    pair: Halves, topology: Topology, num_bytes: int, slice_bytes: int, cost: CostModel | None
) -> StepPrediction:
    """Predict both halves, laid out as :func:`in_windows` says."""
    is_in_windows = in_windows(pair, max(1, -(-num_bytes // max(1, slice_bytes))))
    scatter, gather = (
        predict(half, topology, num_bytes, slice_bytes, in_windows=is_in_windows, cost=cost) for half in pair
    )
    return StepPrediction(reduce_scatter=scatter, all_gather=gather)
