"""Local steps: each party trains by itself, and what it has changed is averaged with the others' once a period.

The parameters are divided into *fragments* of the same size, for which buckets are cut, as the largest says how fast
links must be. Their rounds come one after the other, evenly over a period. With ``overlap`` a fragment's sum is on its
way while the next batches are computed, and is merged when the next fragment goes: at a step that is the same on all
ranks, however long it took. What a rank has moved meanwhile stays on top,

    parameters = what the round makes of the global ones + (parameters now - parameters that were sent)

and is part of what it brings to the fragment's next round: so every local step counts once. After McMahan et al.,
"Communication-efficient learning of deep networks from decentralized data" (2017); Douillard et al., "DiLoCo" (2023)
and "Streaming DiLoCo with overlapping communication" (2025).

**Pace.** A party that computes at half speed may make half as many steps between two rounds. What it has moved is the
sum of its steps, so it has the weight of one step's samples, and not of all: then each sample counts the same, as in a
synchronous step. (FedNova, Wang et al., 2020, divides by the steps, so that each party counts the same.)

**Ends.** Ranks may make different numbers of steps. Whoever ends its period (or closes its fleet) goes on in the
others' rounds, with no weight, until all have told that they end; then each fragment has one round more, and parameters
are equal on all. Rounds are counted, and the count says which fragment comes next, so followers need not be told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch

from syncline.arguments import Bounds, check_fields
from syncline.runtime.communicator import Communicator
from syncline.runtime.work import Work
from syncline.runtime.worker_thread import WorkerThread
from syncline.schedule import Collective, CostModel, lower_bound
from syncline.schedule.period import USUAL, PartyPeriod, measured_speeds
from syncline.schedule.replicas import Replicate, find_parties
from syncline.updates.attendance import Grace
from syncline.updates.bucket import Bucket, BucketPlan, Slot
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.bucket_schedule import BucketSchedule, BucketScheduleOptions, plan_bucket_schedules
from syncline.updates.control import ControlStream
from syncline.updates.mean_momentum import MeanMomentum
from syncline.updates.ownership import check_hosts
from syncline.updates.party import PartyUpdater
from syncline.updates.report import PendingReport
from syncline.updates.rounds import Move, Round
from syncline.updates.rule import Setting, UpdateRule
from syncline.updates.state import VELOCITY, StateSource

# The outer optimizer: what the averaged difference of a period does to the parameters (DiLoCo's Nesterov momentum).
#
#     difference = start of the period - average at its end
#     velocity   = momentum * velocity + difference
#     parameters = start - learning_rate * (difference + momentum * velocity)
#
# Every rank computes it from the same numbers, so all end with the same bits. With learning rate 1 and momentum 0 the
# parameters are the average. The velocity is kept in the optimizer's state, for checkpoints.


LEAST_BYTES = 128 * 1024
"""Of a fragment for which buckets are cut: what is less costs its calls, and not its bytes."""
_MOVED = 5
"""Where the steps of its moves stand in what a rank tells in a round; before them, whether it ends, its step, and how
long rounds have held it up, in what time and steps."""
_NUM_TOLD = _MOVED + 1
_LEAST_S = 1e-9

Pace = Literal["equal", "own"] | Grace | Mapping[str, Annotated[float, Bounds(above=0, below=math.inf)]]
"""How many steps each party makes in a period, and how long rounds wait for those that are late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPart:
    """What moves together in a round: elements ``start`` to ``stop`` of a bucket; ``plan`` is that of these alone."""

    bucket: Bucket
    start: int
    stop: int
    plan: BucketPlan

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of this part in a flat tensor of the whole bucket."""
        return flat[self.start : self.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nesterov:
    """SGD with Nesterov momentum on what a period has changed (DiLoCo, Douillard et al., 2023).

    With the difference d, the period's start less the average at its end, the velocity v becomes ``momentum`` v + d,
    and the next period starts from start - ``learning_rate`` (d + ``momentum`` v). With 1.0 and 0.0 that is the
    average. v has the shape and number type of each parameter, and is saved with the optimizer's state.

    Raises :class:`ConfigurationError` unless ``learning_rate`` is above 0 and ``momentum`` in [0, 1).

    >>> rule = syncline.LocalSteps(period=128, outer=syncline.Nesterov(learning_rate=0.7, momentum=0.9))
    >>> model, optimizer = syncline.distribute(model, optimizer, rule)
    """

    learning_rate: Annotated[float, Bounds(above=0, below=math.inf)] = 0.7
    momentum: Annotated[float, Bounds(0, below=1)] = 0.9

    def __post_init__(self) -> None:
        check_fields(self)


class OuterStep:
    """The outer optimizer of one bucket."""

    def __init__(
        self,
        bucket: Bucket,
        optimizer: torch.optim.Optimizer,
        rule: Nesterov,
        state: MutableMapping[torch.Tensor, Any],
    ) -> None:
        self._bucket = bucket
        self._state = state
        self._may_be_first = state is not optimizer.state or isinstance(optimizer, torch.optim.SGD)
        """Whether it may be in a state before anything else: Adam and others take what is there for their own."""
        self._rule = rule
        self._velocity = torch.zeros_like(bucket.parameters)

    @torch.no_grad()
    def apply(self, part: BucketPart, start: torch.Tensor, average: torch.Tensor) -> None:
        """Replace ``average`` by what the outer optimizer makes of its difference from ``start``."""
        self._load_velocity()
        difference, velocity = start - average, part.of(self._velocity)
        velocity.mul_(self._rule.momentum).add_(difference)
        change = difference.add_(velocity, alpha=self._rule.momentum)
        torch.add(start, change, alpha=-self._rule.learning_rate, out=average)
        self._show_velocity()

    @property
    def velocity(self) -> torch.Tensor:
        """Of the whole bucket, as it is now."""
        self._load_velocity()
        return self._velocity

    def _load_velocity(self) -> None:
        """Take a velocity that a checkpoint has brought."""
        for slot, tensor in zip(self._bucket.plan.slots, self._bucket.tensors, strict=True):
            view = slot.view(self._velocity)
            stored = self._state.get(tensor, {}).get(VELOCITY)
            if stored is not None and stored.data_ptr() != view.data_ptr():
                view.copy_(stored)

    def _show_velocity(self) -> None:
        """Keep the velocity where checkpoints find it."""
        for slot, tensor in zip(self._bucket.plan.slots, self._bucket.tensors, strict=True):
            if self._may_be_first or self._state.get(tensor):
                self._state.setdefault(tensor, {})[VELOCITY] = slot.view(self._velocity)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStepsStatistics:
    """The counters of one rank since the start."""

    num_steps: int
    num_rounds: int
    """Rounds of fragments that were merged."""
    num_waits: int
    """Of these, how many were not over when they were to be merged."""
    waited_s: float
    """Time for which ``step()`` and ``end_period()`` waited for rounds."""
    period: int
    """Steps of this rank between two rounds of a parameter, as it is now."""
    parties: tuple[tuple[int, ...], ...]
    """The ranks of each party."""
    num_left_out: int = 0
    """Rounds that went on without this rank's party, as it was late."""

    def __str__(self) -> str:
        """One line for people."""
        left_out = f", {self.num_left_out} without this party" if self.num_left_out else ""
        waits = f"{self.num_waits} waited for: {self.waited_s:.1f} s"
        return f"{self.num_rounds} rounds in {self.num_steps} steps, period {self.period}{left_out}, {waits}"


class LocalStepsUpdater(PartyUpdater):
    """Local steps at work on one model; ``within`` is the rule of each party, whose updater does all but rounds."""

    shares_buffers = True
    _last_told: torch.Tensor | None = None
    """What ranks have told in the last round that was merged."""

    def __init__(
        self,
        setting: Setting,
        *,
        within: UpdateRule,
        period: int | Literal["auto"] | None,
        outer: Nesterov | None,
        fragments: int,
        overlap: bool,
        parties: Replicate | None,
        pace: Pace,
    ) -> None:
        super().__init__(setting, within)
        self._overlaps = overlap
        number = min(fragments, period if isinstance(period, int) else USUAL)
        found = find_parties(self.collectives.communicator.topology, parties)
        self._has_pace = pace != "equal"
        self._period = self._begin_period(period, self._speeds(pace, found), number)
        self._start_parties(found, num_beside=1 if outer is None else 2)  # starts and velocities
        self._parts = _cut(self.buckets, 1 if self.collectives.crossing is not None else number)
        self._smallest = _divide(self._parts, number)
        """Fragments as a usual period has them; a shorter one has fewer, each of several of these."""
        self._fragments = _join(self._smallest, self._period.num_fragments(number))
        self._control, self._part_collectives = self._open_ways()
        self._starts = [bucket.parameters.clone() for bucket in self.buckets]
        self._outer = [OuterStep(one, self.optimizer, outer, self.whole_state) for one in self.buckets if outer]
        self._momentum = MeanMomentum(self.buckets, self.optimizer)
        self._rates = self._momentum.rates
        """When the round under way began."""
        self._flight: Round | None = None
        """What is on its way."""
        self._next_round = 0
        """Its number; the fragment that it is for is the rest of a division by the number of fragments."""
        self._num_ahead = 0
        """How many more rounds have begun than steps have asked for."""
        self._is_equal = True
        """Whether no step was made since all ranks had the same parameters."""
        self._weight = 0.0
        self._unsent = [(0.0, 0)] * len(self._fragments)
        """By fragment, the samples and the steps since its last round."""
        self._first_step = 0
        """After which rounds are counted with the period that there is now."""
        self._begin_judging(after=0)
        self._told_party: Sequence[int] = self._ranks
        """This party, as ranks were numbered when the round under way began."""
        self._counts = LocalStepsStatistics(
            num_steps=0, num_rounds=0, num_waits=0, waited_s=0.0, period=self._period.own_steps, parties=self.parties
        )

    def finish_backward(self, report: PendingReport) -> Sequence[bool] | None:
        """Take the party's gradients, and note how many samples are behind them."""
        present = super().finish_backward(report)
        self._weight = report.total / len(report.ranks or self._ranks)
        return present

    def step(self) -> None:
        """Make the party's step; merge the round that is under way, and begin the next one, when it is time."""
        if is_first := self._is_equal:
            self._begin_drifting()
        self.step_party()
        if is_first:  # which makes the optimizer's state, too
            self._begin_judging(after=self.step_number + 1)
        self._unsent = [(samples + self._weight, steps + 1) for samples, steps in self._unsent]
        self._weight = 0.0
        self.step_number += 1
        self._counts = replace(self._counts, num_steps=self._counts.num_steps + 1)
        if self._num_sends(self.step_number) + self._num_ahead > self._next_round:
            self._met_s = time.monotonic()
            self._meet()
            self._held_up_s, self._met_s = self._held_up_so_far_s, math.inf

    def end_period(self) -> None:
        """Follow the others' rounds until all ranks have called this; then all have the same parameters."""
        self._land()
        num_ends = 0
        while num_ends < len(self._fragments):
            self._send(ends=True)
            told = self._land()
            num_ends = num_ends + 1 if bool(told[:, 0].all()) else 0
        self.step_number = int(told[:, 1].max())  # of the rank that has come furthest
        self._period.begin()
        if self._is_free:
            self._first_step = self.step_number
        self._num_ahead = self._next_round - self._num_sends(self.step_number)
        self._is_equal = True

    def finish(self) -> None:
        """End the period, so that all ranks have the same parameters after a close."""
        self.end_period()

    def go_on_from(self, iteration: int) -> None:
        """Count from there on."""
        super().go_on_from(iteration)
        self._first_step = iteration if self._is_free else 0
        self._next_round, self._num_ahead = self._num_sends(iteration), 0

    @property
    def party_speeds(self) -> list[float]:
        """How fast each party computes, as parts of the fastest; empty if that is not known, or ranks were lost."""
        if self._last_told is None or len(self._last_told) != sum(map(len, self.parties)):
            return []
        speeds = measured_speeds(*self._last_told[:, 2:_MOVED].T.tolist())
        return [min(speeds[rank] for rank in ranks) for ranks in self.parties] if speeds else []

    def statistics(self) -> LocalStepsStatistics:
        """Return what was sent and waited for on this rank."""
        return self._counts

    def load_state(self, source: StateSource) -> None:
        """Take the party's, and go on as at the end of a period."""
        self._land()
        self._is_equal = True
        self._unsent = [(0.0, 0)] * len(self._fragments)
        super().load_state(source)

    def close(self) -> None:
        """Give up what is under way."""
        if self._part_collectives is not self.collectives:
            self._part_collectives.close()
        super().close()

    def release(self) -> None:
        """Let go of the memory."""
        super().release()
        self._starts.clear()
        self._outer.clear()

    @property
    def _is_free(self) -> bool:
        """Whether parties may make other numbers of steps in a period than before, or than others."""
        return self._period.is_found or self._has_pace

    def _speeds(self, pace: Pace, parties: Sequence[Sequence[int]]) -> tuple[float, float] | None:
        """Return how fast this party and the slowest are, of the fastest; a party is as fast as its slowest host."""
        if not isinstance(pace, Mapping):
            return None if pace == "own" else (1.0, 1.0)
        topology = self.collectives.communicator.topology
        check_hosts("the speeds of LocalSteps(pace=)", pace, topology)
        speeds = [min(pace[topology.host_of(rank).name] for rank in ranks) for ranks in parties]
        (own,) = (speed for speed, ranks in zip(speeds, parties, strict=True) if self.collectives.rank in ranks)
        return own / max(speeds), min(speeds) / max(speeds)

    def _begin_period(
        self, period: int | Literal["auto"] | None, speeds: tuple[float, float] | None, most: int
    ) -> PartyPeriod:
        """Return the period to begin with; where rates are known, with what rounds take on the links."""
        num_bytes = sum(bucket.plan.num_bytes for bucket in self.buckets)
        topology, round_s = self.collectives.communicator.topology, 0.0
        if topology.has_rates and self.collectives.crossing is None:
            round_s = lower_bound(topology, Collective.ALL_REDUCE, num_bytes) / CostModel().payload_share
        return PartyPeriod(period, speeds=speeds, round_s=round_s, most=min(most, num_bytes // LEAST_BYTES))

    def _num_sends(self, step: int) -> int:
        """Return how many rounds have begun by the end of a step, spread evenly over each period."""
        return (step - self._first_step) * len(self._fragments) // self._period.own_steps

    def _begin_judging(self, *, after: int) -> None:
        """Note when the period begins to be judged, and after which step; for how long rounds hold it up from there."""
        self._began_s, self._held_up_s, self._began_step = time.monotonic(), 0.0, after
        self._met_s = math.inf
        """When the step under way began to be held up by rounds."""

    @property
    def _held_up_so_far_s(self) -> float:
        return self._held_up_s + max(0.0, time.monotonic() - max(self._met_s, self._began_s))

    def _judge(self, told: torch.Tensor) -> None:
        """Let periods have other numbers of steps if the last ones, by what all ranks have told, did not fit.

        Not while a rank ends, as it follows rounds and makes no steps.
        """
        is_within = self._next_round % len(self._fragments) and not self._period.awaits_times
        if not self._period.is_found or is_within or bool(told[:, 0].any()):
            return
        _, _, held_up_s, taken_s, num_steps = told[:, :_MOVED].T.tolist()
        if not self._period.judge(held_up_s=held_up_s, taken_s=taken_s, num_steps=num_steps, party=self._told_party):
            return
        self._begin_judging(after=self.step_number)
        self._fragments = _join(self._smallest, self._period.num_fragments(len(self._smallest)))
        self._unsent = spread(self._unsent, len(self._fragments))
        self._first_step, self._next_round = self.step_number, 0
        self._num_ahead = 1  # that which begins in this step
        self._counts = replace(self._counts, period=self._period.own_steps)

    def _begin_drifting(self) -> None:
        """Note where all ranks have the same parameters, before this one makes a step."""
        for start, bucket in zip(self._starts, self.buckets, strict=True):
            start.copy_(bucket.parameters)  # which a checkpoint may have brought
        self._is_equal = False

    def _meet(self) -> None:
        """Merge the round that is under way, if any, and begin the next one."""
        self._land()
        self._send(ends=False)
        if not self._overlaps:
            self._land()
            self._is_equal = len(self._fragments) == 1

    def _send(self, *, ends: bool) -> None:
        """Begin the next round, of the fragment whose turn it is."""
        number = self._next_round % len(self._fragments)
        self._next_round += 1
        moves = self._moves(number, copies=self._overlaps and not ends)
        samples, steps = self._unsent[number]
        self._unsent[number], self._told_party = (0.0, 0), self._ranks
        weight, told = self._weight_of(samples, steps), self._told(steps, ends=ends)
        self._rates = self._momentum.rates
        self._flight = self._begin_round(number, moves, weight=weight, told=told)

    def _moves(self, number: int, *, copies: bool) -> list[Move]:
        """Return how far this rank has moved in a fragment; if it ``copies``, as it is now."""
        moves = []
        for part in self._fragments[number]:
            now = part.of(part.bucket.parameters)
            moves.append(Move(part.plan, part.of(self._starts[part.bucket.index]), now.clone() if copies else now))
        return moves

    @property
    def _round_thread(self) -> WorkerThread:
        """What begins the sums of rounds."""
        return self._part_collectives.thread

    def _begin_round(
        self,
        number: int,
        moves: Sequence[Move],
        *,
        weight: float,
        told: Sequence[float],
        on_over: Callable[[], None] | None = None,
    ) -> Round:
        """Begin a round of fragment ``number``."""
        return Round(
            moves,
            weight=weight,
            told=told,
            control=self._control,
            start_sum=self._start_sum(),
            label=f"a round of fragment {number}",
            is_coded=self.collectives.crossing is not None,
            thread=self._round_thread,
            on_over=on_over,
        )

    def _told(self, num_steps: int, *, ends: bool) -> Sequence[float]:
        """Return what this rank tells in a round, with moves of so many steps."""
        held_up_s = self._held_up_so_far_s
        taken_s = max(_LEAST_S, time.monotonic() - self._began_s)
        return ends, self.step_number, held_up_s, taken_s, self.step_number - self._began_step, num_steps

    def _weight_of(self, samples: float, steps: int) -> float:
        """Return the weight of what so many steps on so many samples have moved: with a pace, of one step."""
        return samples / max(1, steps) if self._has_pace else samples

    def _start_sum(self) -> Callable[[Bucket | BucketPlan, torch.Tensor], Work]:
        """Return what begins to sum whole numbers, by the collectives that there are now."""
        collectives, step = self._part_collectives, self.step_number

        def start(plan: Bucket | BucketPlan, steps: torch.Tensor) -> Work:
            return collectives.start(plan, Collective.ALL_REDUCE, step, values=steps)

        return start

    def _arrive(self, flight: Round) -> tuple[Round, list[torch.Tensor]]:
        """Return the means of a round when they are there, and what it has become meanwhile."""
        return flight, flight.wait()

    def _open_ways(self) -> tuple[ControlStream, BucketCollectives]:
        """Return what rounds are told by, and what moves their parts."""
        are_buckets = len(self._parts) == len(self.buckets)
        return self.collectives.control, self.collectives if are_buckets else self._open_parts()

    def _open_parts(self) -> BucketCollectives:
        """Return what moves parts that are no buckets."""
        job, plans = self.collectives.communicator, [part.plan for part in self._parts]
        schedules = _plan_whole(job, plans, self._reserve(len(plans)).start)
        return BucketCollectives(job, control=self.collectives.control, bucket_schedules=schedules)

    @torch.no_grad()
    def _land(self) -> torch.Tensor:
        """Merge the round that is under way, if any; return what the ranks have told in it."""
        if self._flight is None:
            return torch.empty(0, _NUM_TOLD)
        parts = self._fragments[(self._next_round - 1) % len(self._fragments)]
        start_s, num_waits = time.monotonic(), self._counts.num_waits + (not self._flight.is_over)
        with self.collectives.communicator.progress.waiting("round"):
            flight, means = self._arrive(self._flight)
        self._flight = None
        waited_s = self._counts.waited_s + time.monotonic() - start_s
        num_rounds = self._counts.num_rounds + 1
        self._counts = replace(self._counts, num_rounds=num_rounds, num_waits=num_waits, waited_s=waited_s)
        self._follow_momentum(flight, parts, means)
        self._step_outer(flight, parts, [move.start for move in flight.moves], means)
        for part, move, new in zip(parts, flight.moves, means, strict=True):
            take_over(new, part, since=move.values, start=move.start)
        self._note_merged(flight)
        self._last_told = told = flight.wait_told()
        self._judge(told)
        return told

    def _follow_momentum(self, flight: Round, parts: Sequence[BucketPart], means: Sequence[torch.Tensor]) -> None:
        """Draw this party's momentum to the mean of all, if moves tell of it, and no outer optimizer has one."""
        own_steps = flight.told[_MOVED]
        if self._outer or not self._momentum.is_there or not own_steps or not flight.weight:
            return
        weights, steps = torch.tensor(flight.weights, dtype=torch.float64), flight.wait_told()[:, _MOVED]
        self._momentum.follow(
            self._party.kept_entries(),
            [(part.bucket, part.start, move) for part, move in zip(parts, flight.moves, strict=True)],
            means,
            rates=self._rates,
            own_steps=own_steps,
            mean_steps=float((weights * steps).sum() / weights.sum()),
        )

    def _step_outer(
        self,
        flight: Round,
        parts: Sequence[BucketPart],
        starts: Sequence[torch.Tensor],
        means: Sequence[torch.Tensor],
    ) -> None:
        """Replace the means of a round by what the outer optimizer makes of them, if there is one."""
        if self._outer and sum(flight.weights) > 0:
            for part, start, mean in zip(parts, starts, means, strict=True):
                self._outer[part.bucket.index].apply(part, start, mean)

    def _note_merged(self, flight: Round) -> None:
        """Take note of a round that was merged."""


def take_over(new: torch.Tensor, part: BucketPart, *, since: torch.Tensor, start: torch.Tensor) -> None:
    """Let a part's parameters be ``new``, with what they have moved ``since``; ``start`` is to be where they begin."""
    now = part.of(part.bucket.parameters)
    if since.data_ptr() == now.data_ptr():
        now.copy_(new)
    else:
        now.add_(new - since)
    start.copy_(new)


def _plan_whole(job: Communicator, plans: Sequence[BucketPlan], first_stream: int) -> tuple[BucketSchedule, ...]:
    return plan_bucket_schedules(job, plans, BucketScheduleOptions(is_divided=False), first_stream=first_stream)


def _cut(buckets: Sequence[Bucket], num_fragments: int) -> list[BucketPart]:
    """Cut buckets where one of so many equal fragments ends and the next begins, in forward order.

    Not where that leaves less than a sixteenth of a fragment, which costs its calls; nor for more fragments than there
    are pieces of :data:`LEAST_BYTES`.
    """
    total = sum(bucket.plan.num_bytes for bucket in buckets)
    count, before = min(num_fragments, math.ceil(total / LEAST_BYTES)), 0
    parts: list[BucketPart] = []
    for bucket in buckets:
        size, num_bytes = bucket.plan.num_elements, bucket.plan.num_bytes
        ends = ((total * number // count - before) * size // num_bytes for number in range(1, count))
        cuts = [end for end in ends if total * size < 16 * count * num_bytes * min(end, size - end)]
        for start, stop in pairwise([0, *cuts, size]):
            shape = (stop - start,)
            whole = Slot(name=f"{start} to {stop}", position=0, start=0, stop=shape[0], shape=shape, stride=(1,))
            plan = replace(bucket.plan, index=len(parts), slots=(whole,))
            parts.append(BucketPart(bucket=bucket, start=start, stop=stop, plan=plan))
        before += num_bytes
    return parts


def _join(fragments: Sequence[list[BucketPart]], number: int) -> list[list[BucketPart]]:
    """Join neighbours, so that so many are left."""
    ends = [len(fragments) * count // number for count in range(number + 1)]
    return [[part for each in fragments[start:stop] for part in each] for start, stop in pairwise(ends)]


def spread(unsent: Sequence[tuple[float, int]], number: int) -> list[tuple[float, int]]:
    """Return for each of so many fragments what the one has that was in its place."""
    return [unsent[fragment * len(unsent) // number] for fragment in range(number)]


def _divide(parts: Sequence[BucketPart], number: int) -> list[list[BucketPart]]:
    """Divide parts into fragments of about as many bytes, in forward order; some are empty if there are few."""
    total = sum(part.plan.num_bytes for part in parts)
    fragments: list[list[BucketPart]] = [[] for _ in range(number)]
    before = 0
    for part in parts:
        middle = before + part.plan.num_bytes / 2
        fragments[int(middle * number / total)].append(part)
        before += part.plan.num_bytes
    return fragments
