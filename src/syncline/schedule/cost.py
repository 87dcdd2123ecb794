"""What a schedule costs on a topology: the model by which planners are compared.

The data runs through the schedule in slices, each slice through all steps by itself.

- A rank's communication loop handles one thing at a time: an overhead for each message that it sends or receives, and
  the bytes of these at ``rank_bytes_per_s``, those that it adds counted twice. A transfer is one message in each slice;
  where slices are windows on one owner's part each (a reduce-scatter, an all-gather), it is one in each window that it
  has a part in. So a transfer of a tenth of an owner's part costs a tenth of a message for each round of windows,
  and the windows at its ends.
- Where the ranks share ``num_processors``, all of them together take the sum of that, divided by the processors.
- To begin a call costs each rank ``call_overhead_s``, before its first message. A sum needs the contributions of all
  ranks, so it waits until all have begun, one after another where they share processors. What is only handed on moves
  as soon as its owner has begun; there the beginnings of the others are part of what the processors do meanwhile.
- One step of one slice takes as long as its busiest link (bytes / rate), its busiest rank or the processors, whichever
  is longest, plus the longest route's latency, plus one message's overhead. The latency counts ``num_crossings`` times
  where the step's messages are larger than ``unasked_bytes``: they are announced and granted before they are sent.
- Slices follow each other at the *period* of whatever is busiest over a whole slice, all steps together: a directed
  link, a rank, or the processors. Links and processors do not hide each other wholly: a link stands idle while what it
  should carry waits for a processor. So ``unhidden_share`` of the shorter of these two comes on top.
- The *first slice* takes the sum of its steps. It may be the part f of the others, and so may be the last, with slices
  in between at both ends (1/4, 1/2, 1 ... 1, 1/2, 1/4 has f = 1/4). That shortens a step only as far as it is faster
  than the period: of two steps that are equally slow, on links of their own, one always waits for a whole slice of the
  other (a flow shop: one path leads from slice to slice and from step to step, and the longest counts). A step of t
  seconds for a whole slice therefore takes f t, but at least t - (1 - f) (period - t); the slowest step takes f t.

    seconds = beginning + first slice + (slices that follow) x period

With one slice this is the sum of the steps; with many it tends to the busiest link's bytes / rate. A link's rate is
taken times ``payload_share``: what TCP/IP and Ethernet headers leave of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

import numpy as np
import numpy.typing as npt

from syncline.arguments import Bounds, Count, Share, check_fields, checked
from syncline.errors import ScheduleError
from syncline.schedule.draft import Collective, Draft
from syncline.schedule.outline import Outline
from syncline.schedule.traffic import Floats, LinkTable, StepTraffic, shares, traffic_of
from syncline.topology import DirectedLink, Link, Topology
from syncline.topology.tree import relinked

T = TypeVar("T")

DEFAULT_SLICE_BYTES = 512 * 1024
LEAST_BYTES_PER_RANK = 32 * 1024
"""Of a slice, however slow the links are: smaller messages cost more than they move."""
_NEARLY = 0.9
ABOUT_EQUAL = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Constants of the model; the defaults are those of CPython's event loop and of TCP on Ethernet of MTU 1500.

    Seconds for each message that a rank sends or receives, the share of a link's rate that headers leave, bytes per
    second that a rank sends, receives or adds. Raises :class:`ScheduleError` for values out of range.

    >>> topology = Topology.flat(2, rate=1e6)
    >>> wire = CostModel(message_overhead_s=0.0, payload_share=1.0)
    >>> round(predict(PLANNERS["ring"].plan(topology, Collective.ALL_REDUCE), topology, 1_000_000, cost=wire).time_s, 2)
    1.0
    """

    message_overhead_s: Annotated[float, Bounds(0)] = 30e-6
    payload_share: Annotated[float, Bounds(above=0, most=1)] = 1448 / 1514
    rank_bytes_per_s: Annotated[float, Bounds(above=0)] = 3e9
    num_processors: Annotated[float, Bounds(above=0)] = math.inf
    """That all ranks share; without limit where each has its own."""
    unhidden_share: Share = 0.0
    call_overhead_s: Annotated[float, Bounds(0)] = 0.0
    """What each rank does before its first message; nothing where a rank has a processor, beside what follows."""
    num_crossings: Count = 3
    """Of its way by a message that is asked for; 1 where none is, as with gloo."""
    unasked_bytes: Count = 16 << 10

    def __post_init__(self) -> None:
        check_fields(self, ScheduleError)

    @classmethod
    def of_links_alone(cls) -> CostModel:
        """Return a model in which links cost what their rates say and nothing else costs anything."""
        return cls(message_overhead_s=0.0, payload_share=1.0, rank_bytes_per_s=math.inf, num_crossings=1)

    @classmethod
    @checked
    def of_emulated_network(cls, num_processors: Count) -> CostModel:
        """Return a model of ranks that share one machine's processors with each other and with the network itself.

        The kernel's forwarding counts as the ranks' own work. The constants were measured (docs/decisions/0007).
        """
        return cls(
            message_overhead_s=70e-6,
            rank_bytes_per_s=2.2e9,
            num_processors=num_processors,
            unhidden_share=0.03,
            call_overhead_s=2.4e-3,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How long a collective takes, and why.

    ``link_s`` says how long each directed link is busy; ``bottleneck`` is the busiest, or None if none limits.
    ``rank_s`` says how long the busiest rank's communication loop is, ``processor_s`` how long the
    processors that all share are. ``time_s`` = ``first_slice_s`` + (``num_slices`` - 1) x ``period_s``, where a first
    slice that is smaller than the others counts as the part of a slice that it is; the beginning is in
    ``first_slice_s``.

    >>> topology = Topology.load("two-racks-5-3")
    >>> prediction = predict(plan_tree(topology, Collective.ALL_REDUCE), topology, 64 << 20)
    >>> str(prediction.bottleneck), round(prediction.time_s, 1)
    ('rack-a up', 2.8)
    """

    time_s: float
    first_slice_s: float
    period_s: float
    num_slices: int
    bottleneck: DirectedLink | None
    link_s: Mapping[DirectedLink, float]
    rank_s: float
    processor_s: float

    @property
    def num_full_links(self) -> int:
        """Number of directed links that are nearly as busy as the busiest, that one included."""
        busiest_s = max(self.link_s.values(), default=0.0)
        return sum(seconds > _NEARLY * busiest_s for seconds in self.link_s.values())


def predicted_slice_bytes(topology: Topology) -> int:
    """Return the size of slices by which schedules are compared: about that of slices between so many ranks."""
    return max(DEFAULT_SLICE_BYTES, LEAST_BYTES_PER_RANK * topology.num_ranks)


def fastest(candidates: Iterable[tuple[T, Prediction | StepPrediction]]) -> T:
    """Return what should be the fastest; of those that should take about equally long, that with the fewest full links.

    Where two links are equally full, each delays what the other is about to need. By how much is in no term of the
    model; with 26 links of which three or one were full it was a sixth of the time.
    """
    given = list(candidates)
    least_s = min(prediction.time_s for _, prediction in given)
    near = [one for one in given if one[1].time_s <= least_s * (1 + ABOUT_EQUAL)]
    return min(near, key=lambda one: (one[1].num_full_links, one[1].time_s))[0]


@checked
def predict(
    schedule: Draft | Outline,
    topology: Topology,
    num_bytes: int,
    slice_bytes: int = DEFAULT_SLICE_BYTES,
    *,
    first_slice_bytes: int | None = None,
    in_windows: bool | None = None,
    cost: CostModel | None = None,
) -> Prediction:
    """Predict the time of one run of ``num_bytes`` in slices of at most ``slice_bytes``.

    A step takes as long as its busiest link, rank or processor; the first slice takes the sum of its steps, and each
    that follows the period of whatever is busiest over all steps. ``first_slice_bytes``: of the first slice, where it
    is smaller than the others. ``in_windows``: whether a transfer is one message in each window that it has a part in,
    in place of one in each slice (default: for a reduce-scatter or an all-gather). ``cost``: the constants (default:
    ``CostModel()``).

    Raises :class:`ScheduleError` if ``topology`` has another number of ranks, or a size is negative or a slice empty.

    >>> topology = Topology.flat(2, rate=1e6)
    >>> round(predict(PLANNERS["ring"].plan(topology, Collective.ALL_REDUCE), topology, 1_000_000).time_s, 1)
    1.0
    """
    _check(schedule, topology, num_bytes, min(slice_bytes, first_slice_bytes or slice_bytes))
    num_slices = max(1, -(-num_bytes // slice_bytes))
    even_bytes = num_bytes / num_slices
    first_bytes = min(first_slice_bytes or even_bytes, even_bytes)
    table, model = LinkTable.of(topology), cost or CostModel()
    beginnings_s = model.call_overhead_s * max(1.0, schedule.num_ranks / model.num_processors)
    is_sum = schedule.collective.adds
    other_s = 0.0 if is_sum else model.call_overhead_s / num_slices
    if in_windows is None:
        in_windows = schedule.collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    steps = list(_traffic(schedule, table, num_slices if in_windows else None))
    pipeline = _Pipeline(steps, schedule.num_ranks, table, even_bytes, model, other_s=other_s)
    part = first_bytes / even_bytes if even_bytes else 1.0
    first = pipeline if part == 1 else _Pipeline(steps, schedule.num_ranks, table, first_bytes, model)
    first_slice_s = (beginnings_s if is_sum else model.call_overhead_s) + _fill(first, pipeline, part)
    return Prediction(
        time_s=first_slice_s + (num_slices - part) * pipeline.period_s,
        first_slice_s=first_slice_s,
        period_s=pipeline.period_s,
        num_slices=num_slices,
        bottleneck=table.links[int(pipeline.link_s.argmax())] if pipeline.busiest_link_s > 0 else None,
        link_s=dict(zip(table.links, (pipeline.link_s * num_slices).tolist(), strict=True)),
        rank_s=float(pipeline.rank_s.max()) * num_slices,
        processor_s=pipeline.processors_s * num_slices,
    )


def _traffic(draft: Draft | Outline, table: LinkTable, num_windows: int | None) -> Iterator[StepTraffic]:
    if isinstance(draft, Outline):
        return draft.traffic(table, num_windows)
    messages = np.ones(draft.num_messages) if num_windows is None else window_messages(draft, num_windows)
    return traffic_of(draft, table, messages)


def _check(draft: Draft | Outline, topology: Topology, num_bytes: int, slice_bytes: int) -> None:
    if draft.num_ranks != topology.num_ranks or num_bytes < 0 or slice_bytes < 1:
        raise ScheduleError(
            f"a prediction needs a schedule and a topology of as many ranks, at least 0 bytes and slices of 1 or more; "
            f"not {draft.num_ranks} and {topology.num_ranks} ranks, {num_bytes} and {slice_bytes} bytes"
        )


def _fill(first: _Pipeline, pipeline: _Pipeline, part: float) -> float:
    """Return how long the first slice takes, which is ``part`` of the others; the module says how."""
    period_s = pipeline.period_s
    slowest = max(range(len(pipeline.step_s)), key=pipeline.step_s.__getitem__, default=-1)
    waits_s = [whole_s - (1 - part) * (period_s - whole_s) for whole_s in pipeline.step_s]
    return sum(
        alone_s if step == slowest else max(alone_s, wait_s)
        for step, (alone_s, wait_s) in enumerate(zip(first.step_s, waits_s, strict=True))
    )


class _Pipeline:
    """Sends one slice through all steps and adds up what every link, every rank and the processors do for it.

    ``other_s`` is what each rank has to do besides.
    """

    def __init__(
        self,
        steps: Iterable[StepTraffic],
        num_ranks: int,
        table: LinkTable,
        slice_bytes: float,
        cost: CostModel,
        *,
        other_s: float = 0.0,
    ) -> None:
        self._cost = cost
        self._slice_bytes = slice_bytes
        self._s_per_byte = 1 / (table.bytes_per_s * cost.payload_share)
        self.link_s: Floats = np.zeros(len(table.links))
        self.rank_s: Floats = np.full(num_ranks, other_s)
        self.step_s = [self._step(step) for step in steps]

    @property
    def busiest_link_s(self) -> float:
        """How long the busiest link is busy."""
        return float(self.link_s.max(initial=0.0))

    @property
    def processors_s(self) -> float:
        """How long the processors are that all ranks share."""
        return float(self.rank_s.sum()) / self._cost.num_processors

    @property
    def period_s(self) -> float:
        """How long whatever is busiest is."""
        return self._together(self.busiest_link_s, float(self.rank_s.max()), float(self.rank_s.sum()))

    def _step(self, step: StepTraffic) -> float:
        link_s = step.links * self._slice_bytes * self._s_per_byte
        handled_s = step.handled * (self._slice_bytes / self._cost.rank_bytes_per_s)
        rank_s = self._cost.message_overhead_s * step.messages + handled_s
        self.link_s += link_s
        self.rank_s += rank_s
        message_bytes = self._slice_bytes * float(step.handled.sum()) / max(1.0, float(step.messages.sum()))
        num_crossings = self._cost.num_crossings if message_bytes > self._cost.unasked_bytes else 1
        latency_s = num_crossings * step.latency_s + self._cost.message_overhead_s
        return self._together(float(link_s.max(initial=0.0)), float(rank_s.max()), float(rank_s.sum())) + latency_s

    def _together(self, busiest_link_s: float, busiest_rank_s: float, all_ranks_s: float) -> float:
        processors_s = all_ranks_s / self._cost.num_processors
        unhidden_s = self._cost.unhidden_share * min(busiest_link_s, processors_s)
        return max(busiest_link_s, busiest_rank_s, processors_s) + unhidden_s


def window_messages(draft: Draft, num_slices: int) -> Floats:
    """Return how many messages each transfer takes in a round of windows; owners' parts have ``num_slices`` of them."""
    num_parts = 1 + np.count_nonzero(np.diff(draft.owners).any(axis=0))
    parts = shares(draft) * num_parts
    counts: Floats = parts + np.maximum(0.0, 1 - parts) / num_slices
    return counts


def count_messages(draft: Draft | Outline, num_windows: int | None) -> float:
    """Return how many messages a slice takes, or a round of windows."""
    if isinstance(draft, Outline):
        return draft.count_messages(num_windows)
    return draft.num_messages if num_windows is None else float(window_messages(draft, num_windows).sum())


# The choice of a schedule where nothing is known of the network between hosts.
#
# One switch is supposed, with equal links. If that is wrong, hosts that follow each other in the order of their ranks
# share a slower link: racks are numbered one after another. So of the schedules that would take about as long as the
# fastest on one switch, that is taken which puts the least on the link between any first hosts and the others.


Drafts = TypeVar("Drafts", Draft, tuple[Draft, Draft])

SUPPOSED_BYTES_PER_S = 125e6
"""Of each host's link: 1 Gbit/s. Only which schedules are about equally fast depends on it."""
MAY_LOSE = 1.05
"""How much longer a schedule may take than the fastest, if one switch is right."""


def supposed_network(topology: Topology) -> Topology:
    """Return ``topology``, with rates where nothing is known of it."""
    if not topology.is_unknown:
        return topology
    link = Link.symmetric(SUPPOSED_BYTES_PER_S)
    return Topology(name=topology.name, root=relinked(topology.root, {host.name: link for host in topology.hosts}))


def safest(candidates: Iterable[tuple[Drafts, Prediction | StepPrediction]], topology: Topology) -> Drafts:
    """Return what loads the link between neighbours least, of what takes about as long as the fastest."""
    given = list(candidates)
    allowed_s = min(prediction.time_s for _, prediction in given) * MAY_LOSE
    near = [one for one in given if one[1].time_s <= allowed_s]
    return min(near, key=lambda one: (round(most_across(one[0], topology), 6), one[1].time_s))[0]


def most_across(drafts: Draft | tuple[Draft, Draft], topology: Topology) -> float:
    """Return the most that crosses between some first hosts and the others, as a part of the data.

    Both directions count by themselves. What follows each other, as the halves of a step, adds up.
    """
    place = {host.name: index for index, host in enumerate(topology.hosts)}
    host_of = np.array([place[topology.host_of(rank).name] for rank in range(topology.num_ranks)])
    each = [_across(draft, host_of) for draft in (drafts if isinstance(drafts, tuple) else (drafts,))]
    return float(np.sum(each, axis=0).max(initial=0.0))


def _across(draft: Draft, host_of: npt.NDArray[np.int64]) -> Floats:
    """Return what crosses at each place, in the direction in which it is more."""
    source, target, moved = host_of[draft.transfers.src], host_of[draft.transfers.dst], shares(draft)
    ways = []
    for low, high in ((source, target), (target, source)):
        crosses = low < high
        begins, ends = (
            np.bincount(at[crosses], moved[crosses], minlength=int(host_of.max()) + 1) for at in (low, high)
        )
        ways.append(np.cumsum(begins - ends)[:-1])
    most: Floats = np.maximum(*ways)
    return most


# How long the halves of a sharded step take, drawn or in outline, and how they are best laid over a buffer.


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


def is_in_windows(pair: Halves, num_slices: int) -> bool:
    """Whether windows on one owner's part each take far fewer messages than slices that look like the whole."""
    num_in_windows = sum(count_messages(draft, num_slices) for draft in pair)
    return num_in_windows * _WORTH_WINDOWS < sum(draft.num_messages for draft in pair)


def drawn(halves: Halves) -> Pair:
    """Return both halves with all transfers."""
    scatter, gather = (half if isinstance(half, Draft) else half.drawn() for half in halves)
    return scatter, gather


def predict_pair(
    pair: Halves, topology: Topology, num_bytes: int, slice_bytes: int, cost: CostModel | None
) -> StepPrediction:
    """Predict both halves, laid out as :func:`is_in_windows` says."""
    windowed = is_in_windows(pair, max(1, -(-num_bytes // max(1, slice_bytes))))
    scatter, gather = (predict(half, topology, num_bytes, slice_bytes, in_windows=windowed, cost=cost) for half in pair)
    return StepPrediction(reduce_scatter=scatter, all_gather=gather)
