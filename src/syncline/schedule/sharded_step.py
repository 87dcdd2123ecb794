"""The planner of a sharded step: a reduce-scatter and, after it, an all-gather with the same owners.

The halves follow each other, so that each link works in one direction at a time: owners that suit an all-reduce, which
has both at once, do not suit them. Candidates are the halves of the all-reduces of all planners, and schedules with
the owners for which T_rs + T_ag is least (:mod:`syncline.schedule.step_flow`), drawn with different numbers of atoms
(:mod:`syncline.schedule.in_trees`). The least predicted sum of both wins; of those within 2 % of it, the one with the
fewest full links.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from syncline.arguments import checked
from syncline.errors import ScheduleError
from syncline.schedule.cost import DEFAULT_SLICE_BYTES, CostModel, StepPrediction, drawn, is_in_windows, predict_pair
from syncline.schedule.draft import Collective, Draft, check_plannable
from syncline.schedule.layout import Layout
from syncline.schedule.schedule import Schedule
from syncline.schedule.spares import Apart, draft_with_spares, spare_shares
from syncline.schedule.step_candidates import Portions, limits_of, upto
from syncline.schedule.step_flow import STEP, solve_step_flow
from syncline.schedule.transfers import Transfers
from syncline.schedule.verifier import verify
from syncline.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedStep:
    """A proved reduce-scatter and a proved all-gather with the same cuts and owners.

    Raises :class:`ScheduleError` for anything else.

    >>> step = plan_sharded_step(Topology.flat(4, rate=125e6), 16 << 20)
    >>> step.shares
    (0.25, 0.25, 0.25, 0.25)
    """

    reduce_scatter: Schedule
    all_gather: Schedule
    apart: Apart | None = None
    """What owners and spares are apart by; None if there are no spares."""

    def __post_init__(self) -> None:
        scatter, gather = self.reduce_scatter, self.all_gather
        kinds = (scatter.collective, gather.collective)
        is_alike = scatter.cuts == gather.cuts and np.array_equal(scatter.owners, gather.owners)
        if kinds != (Collective.REDUCE_SCATTER, Collective.ALL_GATHER) or not is_alike:
            raise ScheduleError(
                "a sharded step is a reduce_scatter and an all_gather with the same cuts and owners, not "
                f"{scatter!r} and {gather!r}; let plan_sharded_step make both"
            )

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the data that each rank owns; they sum to 1."""
        return self.reduce_scatter.shares

    @property
    def spare_shares(self) -> tuple[float, ...]:
        """The part of the data that each rank is the spare of; they sum to 1, or are 0 where there are none."""
        return spare_shares(self.reduce_scatter)


@checked
def plan_sharded_step(
    topology: Topology,
    num_bytes: int,
    *,
    most: Sequence[float] | None = None,
    portions: Portions = "balanced",
    spares: int = 0,
    apart: Apart | None = None,
    slice_bytes: int = DEFAULT_SLICE_BYTES,
    cost: CostModel | None = None,
) -> ShardedStep:
    """Plan a reduce-scatter and an all-gather with the same owners, such that both together take the least time.

    ``portions``: "balanced" (no rank owns over 1.25 / N, unless that takes over 10 % longer), "fastest", a number of at
    least 1 (no rank owns more than that times 1 / N, whatever it costs), or the part that each rank owns. N counts
    ranks that may own something. ``most``: what each may own in any case, as parts of the data (of its memory).
    Parts are met to 1 / 16384. With ``spares=1`` each range has a second owner (:mod:`syncline.schedule.spares`), in
    another rack where that makes the step at most a tenth longer, else on another host; ``apart`` asks for one of
    these where the owners allow it, and ``most`` then counts what a rank owns and what it is the spare of. One rank
    alone has no spares. ``num_bytes``, ``slice_bytes`` and ``cost`` are those of :func:`predict_sharded_step`.

    Two linear programmes over the tree, and O(candidates x ranks^2) transfers. Raises :class:`ScheduleError` if ranks
    may own less than everything together, or portions are not one for each rank, at least 0, with the sum 1.

    >>> topology = Topology.load("deep-asymmetric")
    >>> step = plan_sharded_step(topology, 16 << 20)
    >>> max(step.shares) < 1.25 / topology.num_ranks + 1e-3
    True
    """
    check_plannable(topology)
    (pair, _), apart, _ = draft_with_spares(
        topology,
        num_bytes,
        most=most,
        portions=portions,
        spares=spares,
        apart=apart,
        slice_bytes=slice_bytes,
        cost=cost,
    )
    scatter, gather = map(verify, drawn(pair))
    return ShardedStep(reduce_scatter=scatter, all_gather=gather, apart=apart)


@checked
def predict_sharded_step(
    step: ShardedStep,
    topology: Topology,
    num_bytes: int,
    slice_bytes: int = DEFAULT_SLICE_BYTES,
    *,
    cost: CostModel | None = None,
) -> StepPrediction:
    """Predict both halves for ``num_bytes`` in slices of ``slice_bytes``, laid out as :func:`layout_of_step` does.

    Arguments and errors are those of :func:`predict`.

    >>> topology = Topology.load("two-racks-5-3")
    >>> step = plan_sharded_step(topology, 16 << 20)
    >>> round(predict_sharded_step(step, topology, 16 << 20).time_s / sharded_step_bound(topology, 16 << 20), 1)
    1.1
    """
    return predict_pair((step.reduce_scatter, step.all_gather), topology, num_bytes, slice_bytes, cost)


@checked
def sharded_step_bound(topology: Topology, num_bytes: int, *, most: Sequence[float] | None = None) -> float:
    """Return the seconds below which no reduce-scatter and all-gather with the same owners can be, one after another.

    ``most``: the most that each rank may own, as parts of the data. Latencies and the cost of messages are left out.
    :mod:`syncline.schedule.step_flow` has the proof. Raises :class:`ScheduleError` as :func:`plan_sharded_step`.

    >>> topology = Topology.load("three-racks-uneven-uplinks")
    >>> round(sharded_step_bound(topology, 16 << 20), 2)
    1.34
    """
    if num_bytes < 0:
        raise ScheduleError(f"a step moves at least 0 bytes, not {num_bytes}")
    limits = limits_of(topology, most)
    return solve_step_flow(topology, upto(limits), is_bound=True).seconds * num_bytes if topology.num_ranks > 1 else 0.0


@checked
def layout_of_step(step: ShardedStep, num_elements: int, slice_elements: int) -> Layout:
    """Return how both halves of a step are laid over a buffer: in windows if these take far fewer messages, or slices.

    Windows are of one owner's part each (:meth:`Layout.contiguous`), so that many atoms of an owner cost few messages;
    slices each look like the whole (:meth:`Layout.build`), so that a transfer of many owners' parts is one message.

    >>> step = plan_sharded_step(Topology.flat(2), 1000)
    >>> layout_of_step(step, 10, 5).slices
    ((0, 2, 5), (5, 7, 10))
    """
    num_slices = max(1, -(-num_elements // slice_elements)) if slice_elements > 0 else 1
    pair = (step.reduce_scatter, step.all_gather)
    build = Layout.contiguous if is_in_windows(pair, num_slices) else Layout.build
    return build(step.reduce_scatter, num_elements, slice_elements)


def pack_step(step: ShardedStep) -> bytes:
    """Return the step as bytes, for ranks that have not planned it: compressed columns, some 5 bytes a transfer."""
    halves = (step.reduce_scatter, step.all_gather)
    about = {
        "num_ranks": step.reduce_scatter.num_ranks,
        "cuts": step.reduce_scatter.cuts,  # of any size, so as text
        "apart": step.apart,
        "planners": [half.planner for half in halves],
    }
    columns: dict[str, Any] = {
        f"{half.collective}.{column.name}": getattr(half.transfers, column.name)
        for half in halves
        for column in fields(Transfers)
    }
    file = io.BytesIO()
    np.savez_compressed(
        file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), owners=step.reduce_scatter.owners, **columns
    )
    return file.getvalue()


def unpack_step(packed: bytes | bytearray) -> ShardedStep:
    """Return what :func:`pack_step` has packed, proved here: whoever packed it is not believed.

    Raises :class:`ScheduleError` where the proof fails.
    """
    columns = np.load(io.BytesIO(packed), allow_pickle=False)
    about = json.loads(columns["about"].tobytes())
    scatter, gather = (
        verify(
            Draft(
                collective=half,
                num_ranks=about["num_ranks"],
                cuts=tuple(about["cuts"]),
                transfers=Transfers(**{column.name: columns[f"{half}.{column.name}"] for column in fields(Transfers)}),
                owners=columns["owners"],
                planner=planner,
            )
        )
        for half, planner in zip(STEP, about["planners"], strict=True)
    )
    return ShardedStep(reduce_scatter=scatter, all_gather=gather, apart=about["apart"])
