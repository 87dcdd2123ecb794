"""Fewer bytes over slow links: what crosses between sites is coded, twice in each step however many sites there are.

A *site* is a part of the topology inside of which links are fast. Of each element one rank is the *owner*, and each
other site has a *collector*, who has the site's part of the sum. A range with the same owner and collectors is a
*cell*. A bucket moves so:

    1. inside each site, a reduce-scatter in full precision: collectors have their site's sums
    2. collectors send the owner codes of them; it adds what these stand for to its own site's sum, in the sites' order
    3. the owner codes what all are to have, and sends that to the collectors; all of them, the owner too, take what
       the codes stand for
    4. inside each site, an all-gather in full precision

All-reduces are all four, reduce-scatters the first two, all-gathers the others. So a link carries codes once in each
direction and half, nothing is coded again on its way, and all ranks have the same bits at the end. Of an all-gather of
parameters, differences from the values before are coded: all ranks have those.

What codes lack is kept, and added to the next numbers of the same elements (error feedback). ``docs/decisions/0059``.
After Wang et al., "ZeRO++" (2023), for sums of sites that are coded once; Jia et al., "SDP4Bit" (2024), for differences
of parameters; Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes" (2019).
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, groupby, pairwise
from operator import itemgetter
from typing import Literal

import torch

from syncline.runtime.communicator import Communicator
from syncline.runtime.work import Work
from syncline.runtime.worker_thread import WorkerThread
from syncline.schedule import Collective, lower_bound
from syncline.schedule.replicas import Replicas, find_replicas
from syncline.tensors.codec import Codec
from syncline.tensors.memory import bytes_of
from syncline.topology import Topology
from syncline.topology.tree import DirectedLink
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES, Bucket, BucketPlan
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.bucket_schedule import BucketSchedule, Runs, plan_for_owners
from syncline.updates.control import ControlStream
from syncline.updates.rule import Setting
from syncline.updates.shard import Segment, segments_of
from syncline.updates.state import CODING_ERROR, StateEntry, StateSource

Compress = Literal["off", "bf16", "int8", "int4", "auto"]
_BITS = {"bf16": 16, "int8": 8, "int4": 4, "auto": 8}
_PAYS = 2 / 3
"""``auto`` codes where the predicted time with codes, and of coding, is at most so much of that without."""
_CALLS_S = 0.003
"""What the calls of a crossing cost beside their bytes, for each bucket: messages, and threads that hand over."""
_Crossing = Generator[Work, None, None]
OwnedRuns = Sequence[tuple[int, int, int]]
"""Who owns what, in order and without gaps: (start, stop, rank)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Elements of a bucket with one owner, and one collector in each site: the owner in its own."""

    start: int
    stop: int
    owner: int
    collectors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """A cell in which this rank codes."""

    cell: Cell
    error: torch.Tensor
    """What the codes before lack, for each element."""
    codes: torch.Tensor


@dataclass(frozen=True, slots=True)
class CodeSetting:
    """By what codes numbers cross, and between which sites."""

    codec: Codec
    sites: Replicas


def cells_of(owners: OwnedRuns, sites: Replicas) -> tuple[Cell, ...]:
    """Divide a bucket into cells.

    In each site, what others own is divided evenly among its ranks, from the first to the last.
    """
    collected = [_collected(owners, ranks) for ranks in sites]
    ends = sorted({stop for runs in (owners, *collected) for _, stop, _ in runs})
    cells = []
    for start, stop in pairwise([0, *ends]):
        at_start = (bisect_right(runs, start, key=itemgetter(1)) for runs in (owners, *collected))
        owner, *collectors = (runs[at][2] for runs, at in zip((owners, *collected), at_start, strict=True))
        cells.append(Cell(start, stop, owner, tuple(collectors)))
    return tuple(cells)


def _collected(owners: OwnedRuns, ranks: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return who of one site has which range of its sum."""
    foreign = sum(stop - start for start, stop, rank in owners if rank not in ranks)
    limits = [foreign * (k + 1) // len(ranks) for k in range(len(ranks))]
    runs, before = [], 0
    for start, stop, owner in owners:
        if owner in ranks:
            runs.append((start, stop, owner))
            continue
        ends = [*(limit for limit in limits if before < limit < before + stop - start), before + stop - start]
        for first, last in pairwise([before, *ends]):
            runs.append((start + first - before, start + last - before, ranks[bisect_right(limits, first)]))
        before = ends[-1]
    return runs


def choose_sites(
    topology: Topology, num_bytes: int, bits: int, shares: Sequence[float] | None = None
) -> tuple[Replicas, float]:
    """Return the sites between which ``num_bytes`` are coded, with the least time that the model predicts, in seconds.

    ``shares``: what part each rank owns; None for equal ones. Each level of the tree is one choice: all nodes so far
    below the root are sites, so that on a tree of several levels one level is coded, and what lies above it too. Where
    no rates are known it is the first level with several nodes. The model adds the times of the phases, as if nothing
    of them overlapped. O(levels x ranks). There are no sites where one rank is alone.
    """
    height = max(len(topology.path(rank)) for rank in range(topology.num_ranks))
    levels = [find_replicas(topology, level) for level in range(1, height + 1)]
    several = [sites for sites in levels if len(sites) > 1]
    if not several:
        return (), 0.0
    if not topology.has_rates:
        return several[0], 0.0
    times_s = [_predict_s(topology, sites, num_bytes, bits, shares) for sites in several]
    best = min(range(len(several)), key=times_s.__getitem__)
    return several[best], times_s[best]


def _predict_s(topology: Topology, sites: Replicas, num_bytes: int, bits: int, shares: Sequence[float] | None) -> float:
    inside_s = max(lower_bound(topology.restricted(ranks), Collective.ALL_REDUCE, num_bytes) for ranks in sites)
    crossing = crossing_bytes(topology, sites, num_bytes, bits, shares)
    return inside_s + max(num / topology.bytes_per_s(link) for link, num in crossing.items())


def crossing_bytes(
    topology: Topology, sites: Replicas, num_bytes: int, bits: int, shares: Sequence[float] | None = None
) -> dict[DirectedLink, float]:
    """Return the bytes of codes on each link that some cross: of ``num_bytes`` of sums to owners, and back.

    ``shares``: what part each rank owns; None for equal ones.
    """
    crossing: dict[DirectedLink, float] = {}
    num_elements, num_ranks = num_bytes // 4, topology.num_ranks
    cells = cells_of(owners_by_share(num_elements, shares or [1 / num_ranks] * num_ranks), sites)
    pairs = [(cell, collector) for cell in cells for collector in cell.collectors if collector != cell.owner]
    for cell, collector in pairs:
        for link in (*topology.route(collector, cell.owner), *topology.route(cell.owner, collector)):
            crossing[link] = crossing.get(link, 0.0) + (cell.stop - cell.start) * (bits + 0.125) / 8
    return crossing


def time_with_codes_s(coded_s: float, num_bytes: int, coding_s_per_byte: float, num_buckets: int) -> float:
    """Return the time on links, with that of coding and of the calls of each bucket's crossing."""
    return coded_s + coding_s_per_byte * num_bytes + _CALLS_S * num_buckets


def even_owners(num_elements: int, num_ranks: int) -> OwnedRuns:
    """Give each rank as many elements, as far as there are, in rank order."""
    cuts = [num_elements * k // num_ranks for k in range(num_ranks + 1)]
    return [(start, stop, rank) for rank, (start, stop) in enumerate(pairwise(cuts)) if start < stop]


def owners_by_share(num_elements: int, shares: Sequence[float]) -> OwnedRuns:
    """Give each rank its part, in rank order."""
    ends = [round(num_elements * part) for part in accumulate(shares, initial=0.0)]
    cuts = [*ends[:-1], num_elements]
    return [(start, stop, rank) for rank, (start, stop) in enumerate(pairwise(cuts)) if start < stop]


def compress(setting: Setting, wish: Compress) -> None:
    """Let the buckets of ``setting`` cross slow links in codes, if ``wish`` says so; every rank calls it alike."""
    collectives, plans = setting.collectives, [bucket.plan for bucket in setting.buckets]
    schedules = [
        schedule
        for schedule, plan in zip(collectives.bucket_schedules, plans, strict=True)
        if plan.dtype == torch.float32
    ]
    if not schedules:
        return
    way = choose_way(collectives.communicator, collectives.control, wish, schedules)
    if way is None:
        return
    collectives.crossing = SiteCrossing(
        collectives.communicator,
        plans,
        [_owners_of(schedule, plan) for schedule, plan in zip(collectives.bucket_schedules, plans, strict=True)],
        way,
        control=collectives.control,
        reserve_streams=setting.reserve_streams,
        class_of=lambda index: collectives.classes[index],
    )


def choose_way(
    communicator: Communicator, control: ControlStream, wish: Compress, schedules: Sequence[BucketSchedule] = ()
) -> CodeSetting | None:
    """Return how float32 crosses slow links; None if not in codes. Every rank calls it alike.

    ``schedules``: how the buckets move without codes, and so who owns what; without any, by all-reduces. ``"auto"``
    looks at the rates of the topology and at the slowest rank's codec, which all tell each other.
    """
    topology, is_auto = communicator.topology, wish == "auto"
    if wish == "off" or (is_auto and not topology.has_rates):
        return None
    codec = Codec(_BITS[wish])
    sites, coded_s = choose_sites(topology, DEFAULT_BUCKET_BYTES, codec.bits, _shares_of(schedules))
    if is_auto and sites:
        coding_s = max(control.gather_numbers(codec.measure_s_per_byte(), "speed of coding"))
        whole_s = _whole_s(topology, schedules)
        if time_with_codes_s(coded_s, DEFAULT_BUCKET_BYTES, coding_s, 1) > _PAYS * whole_s:
            return None
    return CodeSetting(codec, sites) if sites else None


def _shares_of(schedules: Sequence[BucketSchedule]) -> tuple[float, ...] | None:
    """Return what part of all buckets each rank owns; None where they are not divided."""
    if not schedules or any(Collective.ALL_REDUCE in schedule.schedules for schedule in schedules):
        return None
    owned = [sum(counts) for counts in zip(*(schedule.num_owned for schedule in schedules), strict=True)]
    return tuple(count / sum(owned) for count in owned)


def _whole_s(topology: Topology, schedules: Sequence[BucketSchedule]) -> float:
    """Return what the busiest link needs for a bucket's worth of float32, as divided buckets' schedules put it there.

    An all-reduce is taken for one of large buckets, which keep to the bound: small ones go by other schedules.
    """
    if _shares_of(schedules) is None:
        return lower_bound(topology, Collective.ALL_REDUCE, DEFAULT_BUCKET_BYTES)
    num_elements = sum(schedule.layout.num_elements for schedule in schedules)
    carried: Counter[DirectedLink] = Counter()
    for bucket in schedules:
        num_bytes = DEFAULT_BUCKET_BYTES * bucket.layout.num_elements // num_elements
        for schedule in bucket.schedules.values():
            carried.update(schedule.link_bytes(topology, num_bytes))
    return max(num / topology.bytes_per_s(link) for link, num in carried.items())


class SiteCrossing:
    """How some buckets cross from site to site on one rank; see the head of this module.

    ``owners`` are those of each bucket: (start, stop, rank) in order and without gaps. ``thread`` codes for others too,
    and whoever gives it closes it. Errors call buckets by ``names``.
    """

    def __init__(
        self,
        job: Communicator,
        plans: Sequence[BucketPlan],
        owners: Sequence[OwnedRuns],
        way: CodeSetting,
        *,
        control: ControlStream,
        reserve_streams: Callable[[int], range],
        class_of: Callable[[int], int] = lambda _: 0,
        thread: WorkerThread | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._job, self._rank = job, job.rank
        self._codec, self.sites = way.codec, way.sites
        self._class_of = class_of
        self._site = next(number for number, ranks in enumerate(self.sites) if self._rank in ranks)
        self._plans = plans
        self._names = names or [f"bucket {plan.index}" for plan in plans]
        self._cells = [cells_of(of_plan, self.sites) for of_plan in owners]
        self._parts = [self._parts_of(cells) for cells in self._cells]
        self._befores: dict[int, list[torch.Tensor]] = {}
        self._streams = reserve_streams(len(plans))
        self._own_thread = thread is None
        self._thread = thread or coding_thread(job)
        self._inside = self._open_site(plans, control, reserve_streams(1 + len(plans)))

    def _open_site(
        self, plans: Sequence[BucketPlan], control: ControlStream, streams: range
    ) -> BucketCollectives | None:
        ranks = self.sites[self._site]
        if len(ranks) == 1:
            return None
        group = self._job.open_group(ranks, streams=streams)
        runs = [_runs_inside(cells, self._site, ranks) for cells in self._cells]
        schedules = plan_for_owners(group, plans, runs, first_stream=group.user_stream + 1)
        return BucketCollectives(group, control=control, bucket_schedules=schedules)

    def start(
        self,
        index: int,
        collective: Collective,
        step: int | None,
        values: torch.Tensor,
        *,
        errors: Sequence[torch.Tensor] | None = None,
        after: Sequence[Work] = (),
    ) -> Work | None:
        """Begin to move ``values``, float32 in host memory; None for a bucket of other numbers, which are not coded.

        ``errors`` are what codes of such values lack, in place of the bucket's own (:meth:`new_errors`). Nothing of
        this is done before ``after`` is over.
        """
        if values.dtype != torch.float32:
            return None
        parts = self._parts[index]
        if errors is not None:
            parts = [replace(part, error=error) for part, error in zip(parts, errors, strict=True)]
        work = self._job.begin_work(f"coded {collective.value} of {self._names[index]}")
        steps = chain(
            () if collective is Collective.ALL_GATHER else self._scatter(index, step, values, parts),
            () if collective is Collective.REDUCE_SCATTER else self._gather(index, step, values, parts, collective),
        )
        self._thread.submit(index, after, partial(self._go_on, index, steps, work, None))
        return work

    def new_errors(self, index: int) -> list[torch.Tensor]:
        """Return what codes of a bucket lack before the first one: nothing."""
        return [torch.zeros_like(part.error) for part in self._parts[index]]

    def keep(self, bucket: Bucket) -> None:
        """Keep the owned parameters of a bucket as all ranks have them, before they are stepped."""
        if bucket.plan.dtype == torch.float32:
            cells = (part.cell for part in self._parts[bucket.index] if part.cell.owner == self._rank)
            self._befores[bucket.index] = [bucket.parameters[cell.start : cell.stop].cpu().clone() for cell in cells]

    def close(self) -> None:
        """Give up what is under way."""
        if self._own_thread:
            self._thread.close()
        if self._inside is not None:
            self._inside.communicator.close()

    def state_entries(self) -> Iterator[StateEntry]:
        """Yield what codes of this rank lack, for a checkpoint; nothing else codes."""
        for segment, key, values in self._errors():
            part = segment.part
            yield StateEntry(parameter=part.parameter, key=key, value=values, start=part.start, stop=part.stop)

    def load_state(self, source: StateSource) -> None:
        """Take that from a checkpoint of the same sites and owners; of others it starts anew."""
        for segment, key, values in self._errors():
            values.zero_()
            if isinstance(source.values(segment.slot.name).get(key), torch.dtype):
                source.fill(segment.slot, key, segment.part.start, values)

    def _errors(self) -> Iterator[tuple[Segment, str, torch.Tensor]]:
        for plan, cells, parts in zip(self._plans, self._cells, self._parts, strict=True):
            key = f"{CODING_ERROR}{zlib.crc32(repr(cells).encode()):08x}.{self._site}"
            for part in parts:
                first = part.cell.start
                for segment in segments_of(plan.slots, ((first, part.cell.stop),)):
                    yield segment, key, part.error[segment.start - first : segment.stop - first]

    def _parts_of(self, cells: Iterable[Cell]) -> list[_Part]:
        mine = [cell for cell in cells if cell.collectors[self._site] == self._rank]
        return [
            _Part(
                cell,
                torch.zeros(cell.stop - cell.start),
                torch.empty(self._codec.num_bytes(cell.stop - cell.start), dtype=torch.uint8),
            )
            for cell in mine
        ]

    def _go_on(self, urgency: int, steps: Iterator[Work], whole: Work, awaited: Work | None) -> None:
        """Go on with a crossing; on the thread for codes."""
        try:
            if awaited is not None:
                awaited.wait()  # it is over, well or not
            waits_for = next(steps, None)
        except Exception as error:
            whole.end(error)
            return
        if waits_for is None:
            whole.end(None)
        else:
            self._thread.submit(urgency, (waits_for,), partial(self._go_on, urgency, steps, whole, waits_for))

    def _scatter(self, index: int, step: int | None, values: torch.Tensor, parts: Sequence[_Part]) -> _Crossing:
        if self._inside is not None:
            yield self._inside.start(self._plans[index], Collective.REDUCE_SCATTER, step, values=values)
        sent, received = [], []
        for part in parts:
            cell = part.cell
            if cell.owner != self._rank:
                self._codec.encode(values[cell.start : cell.stop], part.error, part.codes)
                sent.append((cell.owner, part.codes))
            else:
                received += [
                    (peer, part, torch.empty_like(part.codes)) for peer in cell.collectors if peer != self._rank
                ]
        yield from self._exchange(index, "sums", sent, [(peer, codes) for peer, _, codes in received], step)
        for _, part, codes in received:
            self._codec.add(codes, values[part.cell.start : part.cell.stop])

    def _gather(
        self, index: int, step: int | None, values: torch.Tensor, parts: Sequence[_Part], collective: Collective
    ) -> _Crossing:
        sent, received = [], []
        befores = iter(self._befores.pop(index, ()))
        for part in parts:
            cell = part.cell
            own = values[cell.start : cell.stop]
            is_sum = collective is Collective.ALL_REDUCE
            if cell.owner != self._rank:
                if is_sum:
                    own.zero_()
                received.append((part, own))
                continue
            before = torch.zeros_like(own) if is_sum else next(befores)
            self._codec.encode(own - before, part.error, part.codes)
            own.copy_(before)
            self._codec.add(part.codes, own)
            sent += [(peer, part.codes) for peer in cell.collectors if peer != self._rank]
        coming = [(part.cell.owner, part.codes) for part, _ in received]
        yield from self._exchange(index, "results", sent, coming, step)
        for part, own in received:
            self._codec.add(part.codes, own)
        if self._inside is not None:
            yield self._inside.start(self._plans[index], Collective.ALL_GATHER, step, values=values)

    def _exchange(
        self,
        index: int,
        what: str,
        sent: Sequence[tuple[int, torch.Tensor]],
        received: Sequence[tuple[int, torch.Tensor]],
        step: int | None,
    ) -> _Crossing:
        """Send codes, and wait for those of others: to each peer one message, its cells in their order."""
        sends = {peer: torch.cat(codes) for peer, codes in _by_peer(sent)}
        landing = [
            (peer, codes, torch.empty(sum(map(len, codes)), dtype=torch.uint8)) for peer, codes in _by_peer(received)
        ]
        yield self._job.start_direct(
            "all_to_all",
            sends=tuple((peer, bytes_of(codes)) for peer, codes in sends.items()),
            receives=tuple((peer, bytes_of(whole)) for peer, _, whole in landing),
            about=f"codes of {what} of {self._names[index]}",
            label=f"codes of {what} of {self._names[index]}",
            stream=self._streams[index],
            urgency=index,
            connection_class=self._class_of(index),
            step=step,
        )
        for _, codes, whole in landing:
            for one, part in zip(codes, torch.split(whole, [len(one) for one in codes]), strict=True):
                one.copy_(part)


def coding_thread(job: Communicator) -> WorkerThread:
    """Return a thread that codes; what fails on it ends the calls of ``job``."""
    return WorkerThread(f"syncline-codes-{job.rank}", on_failure=lambda error: job.give_up(str(error)))


def _owners_of(schedule: BucketSchedule, plan: BucketPlan) -> OwnedRuns:
    """Return who owns which range of a bucket, in order: as its schedules say, else all alike."""
    num_ranks = next(iter(schedule.schedules.values())).num_ranks
    if Collective.ALL_REDUCE in schedule.schedules:
        return even_owners(plan.num_elements, num_ranks)
    return sorted((start, stop, rank) for rank in range(num_ranks) for start, stop in schedule.held_by(rank))


def _runs_inside(cells: Sequence[Cell], site: int, ranks: Sequence[int]) -> Runs:
    """Return which of a site's ranks, by their numbers there, collects how many elements after another."""
    return tuple(
        (ranks.index(rank), sum(cell.stop - cell.start for cell in run))
        for rank, run in groupby(cells, key=lambda cell: cell.collectors[site])
    )


def _by_peer(pairs: Iterable[tuple[int, torch.Tensor]]) -> list[tuple[int, list[torch.Tensor]]]:
    ordered = sorted(pairs, key=lambda pair: pair[0])
    return [(peer, [codes for _, codes in run]) for peer, run in groupby(ordered, key=lambda pair: pair[0])]
