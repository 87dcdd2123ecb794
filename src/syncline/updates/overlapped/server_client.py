"""One rank's part in the exchange with the servers: the links of its worker, the shards that it hosts, and who is lost.

Beside buckets ranks tell each other notes: small records, ahead of all else.

The training thread's methods never wait for the network but for two reasons, both bounded by a deadline: a gradient is
staler than ``max_staleness`` allows, or a period ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import torch

from syncline.errors import DeadlineError, FabricClosedError, PeerLostError, accusing
from syncline.fabric import PeerLeftError
from syncline.members import Membership, QuorumLostError, describe_ranks
from syncline.members.job_record import NO_FLAGS, Flags
from syncline.observe import Trace
from syncline.runtime.failures import LOOK
from syncline.runtime.loop import stand_back
from syncline.runtime.port import Port
from syncline.runtime.work import Work
from syncline.runtime.worker_thread import WorkerThread
from syncline.tensors.device_copies import HostCopier
from syncline.updates.bucket import Bucket, BucketPlan
from syncline.updates.control import ControlStream
from syncline.updates.messaging import LOOK_S, STALL_GRACE_S, Driver, LeftBehind
from syncline.updates.overlapped.link import BucketLayout, Feed, HostedRelay, HostedShard, Stopped, WorkerLink
from syncline.updates.overlapped.placement import ServerLayout, Succession
from syncline.updates.overlapped.rebase import Collect
from syncline.updates.overlapped.worker import PeriodClock
from syncline.updates.rounds import Move, Round
from syncline.updates.rule import MemberNews, Newcomers, NonfiniteOrigin


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """To a server or a relay: this worker waits, and asks for whom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To a worker: who is missing for what comes next."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nonfinite:
    """To everyone: the own gradient of this rank at ``step`` is not finite, first in the parameter at ``position``.

    It is told before the gradient is pushed, so that who gets NaN from a server knows whence it came.
    """

    step: int
    position: int


Note = Stopped | Question | Answer | Nonfinite | LeftBehind

BUCKETS_OF_NOTE = 512
"""A note is a control message, which is short; of more buckets there are several."""
DRAIN_S = 5.0
"""How long the last averages may take to leave when this rank closes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlappedStatistics:
    """All counters of one rank since the start."""

    num_steps: int
    num_periods: int
    """Periods that have ended."""
    iteration: int
    """The iteration within the period, which leaves numbers out where this rank is slower than the others."""
    mean_staleness: float
    """Own iterations for which no global gradient was used yet, after a step; of the bucket with the most."""
    max_staleness: int
    share_with_global: float
    """Share of the steps in which a global gradient was used."""
    dropped: tuple[int, ...]
    """For each rank, how many of its pushes the servers had dropped when the last period ended."""
    num_forgotten: int
    """Own pushes that died with a server."""
    waited_staleness_s: float
    """Time in which ``step()`` waited because gradients were too stale."""
    waited_period_s: float
    """Time in which ``step()`` waited for the end of a period."""
    waited_for: dict[int, int]
    """For each rank, in how many waits it was the one that was waited for."""
    lost: tuple[int, ...]
    """Ranks that died or left."""

    def __str__(self) -> str:
        """One line for people."""
        dropped = ", ".join(f"{count} of rank {rank}" for rank, count in enumerate(self.dropped) if count)
        return (
            f"stale {self.mean_staleness:.1f}, at most {self.max_staleness}  global {self.share_with_global:.0%}  "
            f"dropped {dropped or 'none'}  waited {self.waited_staleness_s:.1f}+{self.waited_period_s:.1f} s"
        )


@dataclass(slots=True)
class ClientCounts:
    """The counters, while they run."""

    num_steps: int = 0
    num_periods: int = 0
    sum_staleness: int = 0
    max_staleness: int = 0
    num_with_global: int = 0
    waited_s: dict[str, float] = field(default_factory=lambda: {"staleness": 0.0, "period": 0.0})
    waited_for: Counter[int] = field(default_factory=Counter)

    def note_step(self, *, staleness: int, num_rounds: int) -> None:
        """Count a step."""
        self.num_steps += 1
        self.sum_staleness += staleness
        self.max_staleness = max(self.max_staleness, staleness)
        self.num_with_global += num_rounds > 0

    def note_wait(self, phase: str, seconds: float, awaited: tuple[int, ...]) -> None:
        """Count a wait."""
        self.waited_s[phase] += seconds
        self.waited_for.update(awaited)


# The end of a period by the planner's all-reduce, where every rank is a worker that every global gradient needs.
#
# Through servers, an end costs a link between two halves of N workers N times the parameters, as each worker sends its
# own to each server and gets the average back. On the planner's tree it costs them once. A collective has no part for a
# rank that is lost: a fleet that goes on then ends its periods through the servers, this one included. Parameters are
# replaced only when it is known that the mean counts. It is a round as :mod:`syncline.updates.rounds` has them.
#
# Where a rank is lost meanwhile and the others go on, the collective may be over on some ranks when it fails on others.
# So on each rank it counts once the loop's thread has taken note of it (:meth:`ServerClient.end_together`), before or
# after it took note of the loss: either the mean is the start of the next period, which this rank then tells the new
# servers, or the parameters are sent to them as they were. A server that hears of both goes on from the later start,
# and gives it to those who lack it (see :mod:`.server`).


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What all ranks said of the period's end, in rank order."""

    num_samples: tuple[float, ...]
    iteration: int
    """The furthest that a rank has come since the start of the training."""
    last_to_come: tuple[int, ...]
    """Who kept others waiting when the period before this one ended: the one that itself hardly waited."""
    dropped: tuple[int, ...]
    """Gradients of each rank that the servers had dropped."""
    told: tuple[int, ...]
    """What rank 0 tells of the job's members: here all are in it."""
    means: tuple[torch.Tensor, ...] = field(repr=False)
    """Of each bucket's parameters, by the samples of all ranks."""


class ServerClient(Driver):
    """Joins links, hosted shards and losses."""

    kinds_of_notes = get_args(Note)
    _last_end_s = 0.0
    """How long this rank waited when a period last ended on the tree."""

    def __init__(
        self,
        port: Port,
        layout: ServerLayout,
        buckets: Sequence[BucketLayout],
        *,
        max_staleness: int | None,
        feeds: Sequence[Feed | Collect],
        copiers: Sequence[HostCopier | None],
        timeout_s: float,
        trace: Trace,
        newcomers: Newcomers | None = None,
    ) -> None:
        super().__init__(port, Membership(layout.workers), timeout_s=timeout_s)
        self._newcomers = newcomers
        self._elders = () if newcomers is None else newcomers.elders
        """Who was there before newcomers came, as long as no period has ended since."""
        self.news: MemberNews | None = None
        """What was told at the end of the last period; whoever does what follows takes it away."""
        self.is_ending = False
        """Whether this rank leaves when the period is over, so that it takes in nobody."""
        self._may_switch = False
        """Whether ranks go over to another fabric in this period: who leaves this one may go on there."""
        self.layout = layout
        self.clock, self.counts = PeriodClock(layout.period), ClientCounts()
        self._ended_iterations = 0
        """Iterations of the periods that have ended: of each, those of the worker that came furthest."""
        self.lost = self.membership.lost
        self._succession = Succession(layout, [bucket.server for bucket in buckets])
        self._max_staleness = max_staleness
        self._shortage: Exception | None = None
        """Too few workers are left to begin anything; those who left had ended the period, so its averages come."""
        self._buckets = buckets
        self._answers: dict[int, tuple[int, ...]] = {}
        """Whom each server or relay waits for, as it last said."""
        self.nonfinite: NonfiniteOrigin | None = None
        """Where NaN or infinity was told to have begun first."""
        self.hosted: dict[int, HostedShard] = {}
        self._dropped_together: tuple[int, ...] = (0,) * layout.world_size
        self._relays = {relay for bucket in buckets for relay in bucket.relay_of.values()}
        """Until a rank is lost."""
        self._thread = WorkerThread("syncline-pushes", on_failure=self.fail)
        """Waits for copies from a device, if parameters are on one."""
        link = partial(WorkerLink, port, layout, changed=self._changed, trace=trace, thread=self._thread)
        of_worker = zip(buckets, feeds, copiers, strict=True) if port.rank in layout.workers else ()
        self.links = [link(bucket, feed=feed, copier=copier) for bucket, feed, copier in of_worker]
        self._ends_together = False
        """Whether the period ends on the tree, just now."""
        self._has_someone_left = False
        """Somebody left by itself, without whom this rank goes on when it needs anybody; on the loop's thread."""

    def start(self) -> None:
        """Begin to serve and to listen; returns when both are so."""
        self._port.call(self._start, self._timeout_s)

    def _start(self) -> None:
        stand_back()  # no step waits for these messages
        for bucket in self._buckets:
            if bucket.server == self._port.rank:
                self._host(bucket, epoch=0)
            elif self._port.rank in bucket.relay_of.values():
                self.hosted[bucket.index] = HostedRelay(self._port, self.layout, bucket)
        for link in self.links:
            link.listen()
        self._watch(self._buckets[0].stream)

    # --- the training thread -------------------------------------------------------------------------------------

    def step(self, gradients: Sequence[torch.Tensor], *, weight: float) -> None:
        """Push own gradients and fold into them what has come; waits only for what is too stale."""
        self.raise_failure()
        self._go_on()
        iteration = self.clock.tick(fleet=max(link.machine.clock for link in self.links), weight=weight)
        for link, gradient in zip(self.links, gradients, strict=True):
            link.step(gradient, iteration=iteration, weight=weight)
        num_rounds = self._use(gradients)
        while self._is_too_stale():
            self._wait_phase("staleness", lambda: self._is_news() or not self._is_too_stale())
            self.clock.catch_up(reached=max(link.machine.reached for link in self.links))
            for link in self.links:  # all of them: another worker may wait for what this one holds back
                link.hurry(iteration=self.clock.iteration)
            num_rounds += self._use(gradients)
        for link, gradient in zip(self.links, gradients, strict=True):
            link.finish_step(gradient)
        self.counts.note_step(staleness=max(link.machine.staleness for link in self.links), num_rounds=num_rounds)

    def tell_nonfinite(self, step: int, position: int) -> None:
        """Tell all others that the own gradient of ``step`` is not finite, before it is pushed."""
        self._port.call_soon(self._tell_others, Nonfinite(step=step, position=position))

    def end_period(self, parameters: Sequence[torch.Tensor]) -> None:
        """Replace the parameters of each bucket by their average over the workers."""
        self.raise_failure()
        told = self._tell_of_members()
        for link, values in zip(self.links, parameters, strict=True):
            link.end(values, iteration=self.iteration, weight=self.clock.num_samples, told=told)
        self._wait_phase("period", lambda: all(link.has_average for link in self.links))
        for link, values in zip(self.links, parameters, strict=True):
            link.take_average(values)
        # What is told of a bucket is alike on all ranks; if the lowest worker died meanwhile, another's counts of some.
        told = min(link.greeting.told for link in self.links)
        self._begin_period(max(link.greeting.iteration for link in self.links), told)

    def end_together(self, control: ControlStream, buckets: Sequence[Bucket]) -> bool:
        """Average the parameters on the tree, in place of the servers; False if a loss leaves it to them.

        Every rank calls it at the same point. Raises :class:`UpdateError` on every rank if a parameter of any rank is
        not finite.
        """
        self.raise_failure()
        start_s = time.monotonic()
        try:
            with self._progress.waiting("period"):
                ends = self._average_on_tree(control, buckets)
        except PeerLostError as error:
            self._port.call_soon(self._lose, error.rank, error)
            self._wait_for(lambda: False, LOOK_S)
            self.raise_failure()
            raise
        if ends is None:
            self.raise_failure()
            return False
        self.counts.note_wait("period", time.monotonic() - start_s, ends.last_to_come)
        self._dropped_together = ends.dropped
        self._begin_period(ends.iteration, ends.told)
        return True

    def _average_on_tree(self, control: ControlStream, buckets: Sequence[Bucket]) -> Ends | None:
        """Make the mean; None if a loss leaves it to the servers, and then parameters are as they were."""
        dropped = self._port.call(self._begin_end, self._timeout_s)
        if dropped is None:
            return None
        self._stop_links()
        try:
            ends = self._sum_on_tree(control, buckets, dropped)
        except (PeerLostError, DeadlineError) as error:
            if not self.layout.shrinks or (isinstance(error, DeadlineError) and not self._has_left_behind()):
                raise
            self._port.call(self._give_up_end, self._timeout_s)
            return None
        if not self._port.call(partial(self._keep_end, ends), self._timeout_s):
            return None
        for mean, bucket in zip(ends.means, buckets, strict=True):
            bucket.parameters.copy_(mean)
        return ends

    def _sum_on_tree(self, control: ControlStream, buckets: Sequence[Bucket], dropped: Sequence[int]) -> Ends:
        """Sum what all ranks have moved; ``dropped`` counts, for each rank, what the servers here dropped."""

        def start_sum(bucket: Bucket | BucketPlan, steps: torch.Tensor) -> Work:
            return control.start_sum(steps, f"mean of bucket {bucket.index} at the end of a period")

        start_s, starts = time.monotonic(), [link.start.values for link in self.links]
        under_way = Round(
            [Move(bucket, start, bucket.parameters) for bucket, start in zip(buckets, starts, strict=True)],
            weight=self.clock.num_samples,
            told=[self.iteration, self._last_end_s, *self._flags(), *map(float, dropped)],
            control=control,
            start_sum=start_sum,
            label="the end of a period",
        )
        told = under_way.wait_told()
        waits_s = told[:, 1]
        self._last_end_s = time.monotonic() - start_s
        return Ends(
            num_samples=tuple(under_way.weights),
            iteration=int(told[:, 0].max()),
            last_to_come=(int(waits_s.argmin()),) if waits_s.max() - waits_s.min() >= LOOK_S else (),
            dropped=tuple(int(count) for count in told[:, 4:].sum(0)),
            told=(0, *(int(flag) for flag in told[0, 2:4])),
            means=tuple(under_way.wait()),
        )

    @property
    def iteration(self) -> int:
        """The fleet's iteration since the start of the training, as far as this worker has come."""
        return self._ended_iterations + self.clock.iteration

    def _begin_period(self, iteration: int, told: tuple[int, ...]) -> None:
        for link in self.links:
            link.begin_period()
        if self._newcomers is not None:
            _, begun, decided, *lost = told
            self.news = MemberNews(flags=(begun, decided), lost=tuple(lost))
            self._may_switch, self._elders = bool(decided), ()
        self._ended_iterations = iteration
        self.clock.begin_period()
        self.counts.num_periods += 1

    def serve(self) -> None:
        """Serve until every worker has left; for a rank that is no worker."""
        with self._progress.waiting(), self._changed:
            self._changed.wait_for(lambda: self._is_alone() or isinstance(self._failure, FabricClosedError))
        if not self._is_alone():
            self.raise_failure()

    def _is_alone(self) -> bool:
        return all(worker in self.lost for worker in self.layout.workers)

    def statistics(self) -> OverlappedStatistics:
        """Return all counters."""
        told = zip(*(link.dropped for link in self.links), self._dropped_together, strict=True)
        counts = self.counts
        return OverlappedStatistics(
            num_steps=counts.num_steps,
            num_periods=counts.num_periods,
            iteration=self.clock.iteration,
            mean_staleness=counts.sum_staleness / max(1, counts.num_steps),
            max_staleness=counts.max_staleness,
            share_with_global=counts.num_with_global / max(1, counts.num_steps),
            dropped=tuple(sum(counted) for counted in told),
            num_forgotten=sum(link.num_forgotten for link in self.links),
            waited_staleness_s=counts.waited_s["staleness"],
            waited_period_s=counts.waited_s["period"],
            waited_for=dict(counts.waited_for),
            lost=tuple(sorted(self.lost)),
        )

    def raise_failure(self) -> None:
        """Raise what has gone wrong, if anything has."""
        super().raise_failure()
        if self._shortage is not None:
            raise self._shortage

    def drain(self) -> None:
        """Let the replies of the hosted shards leave."""
        self._port.run(self._drain(), 2 * DRAIN_S)

    def close(self) -> None:
        """Forget everything that is under way."""
        self._thread.close()
        self._port.call(self._port.close, DRAIN_S)

    async def _drain(self) -> None:
        end_s = time.monotonic() + DRAIN_S
        shards = self.hosted.values()
        while time.monotonic() < end_s and not all(shard.machine.is_quiet for shard in shards):  # noqa: ASYNC110
            await asyncio.sleep(0.002)  # once in a life, for a moment

    def _go_on(self) -> None:
        """Go on without those who left, if any did, before this rank needs anybody."""
        if self._has_someone_left:
            self._has_someone_left = False
            self._port.call_soon(self._move_buckets)

    def _stop_links(self) -> None:
        """End the period in all buckets, and tell their servers."""
        last_rounds: dict[int, list[tuple[int, int]]] = {}
        for link in self.links:
            last_rounds.setdefault(link.server, []).append((link.bucket.index, link.stop()))
        for server, rounds in last_rounds.items():
            for start in range(0, len(rounds), BUCKETS_OF_NOTE):
                some = tuple(rounds[start : start + BUCKETS_OF_NOTE])
                self._port.call_soon(self._send_note, server, Stopped(period=self.counts.num_periods, last_rounds=some))

    def _flags(self) -> Flags:
        return NO_FLAGS if self._newcomers is None or self.is_ending else self._newcomers.flags()

    def _tell_of_members(self) -> tuple[int, ...]:
        """Return what this rank tells at a period's end, if others may come: itself, its flags, and who is lost."""
        if self._newcomers is None:
            return ()
        return (self._port.rank, *self._flags(), *self._port.call(lambda: sorted(self.lost), self._timeout_s))

    def _use(self, gradients: Sequence[torch.Tensor]) -> int:
        return max(link.use(gradient) for link, gradient in zip(self.links, gradients, strict=True))

    def _is_too_stale(self) -> bool:
        most = self._max_staleness
        return most is not None and any(link.machine.staleness > most for link in self.links)

    def _is_news(self) -> bool:
        """Whether something has come that may end a wait, or a push may follow the one that has left."""
        return any(link.machine.num_unused or link.machine.can_hurry for link in self.links)

    def _wait_phase(self, phase: str, is_over: Callable[[], bool]) -> None:
        """Wait until ``is_over``; a failure, or the deadline, ends it with an error that names whom it waited for."""
        start_s = time.monotonic()
        self._go_on()
        self._answers.clear()
        self._wait(is_over, phase)
        self.counts.note_wait(phase, time.monotonic() - start_s, self._awaited())
        with self._changed:
            if is_over():
                return  # what was waited for came, whatever else has failed since
        self.raise_failure()
        raise self._late(phase)

    def _look(self) -> None:
        """Ask the servers, also new ones, whom they wait for."""
        self._port.call_soon(self.ask)

    def _has_left_behind(self) -> bool:
        """Look for those who do not train, for some seconds; whether somebody is lost since periods end together."""
        for _ in range(int(STALL_GRACE_S / LOOK_S)):
            self._port.call(self._leave_behind, self._timeout_s)
            if self._wait_for(lambda: not self._succession.on_tree, LOOK_S):
                break
        return not self._succession.on_tree

    def _awaited(self) -> tuple[int, ...]:
        told = (self._answers.get(rank, ()) for rank in self._whom_to_ask())
        return tuple(sorted({rank for ranks in told for rank in ranks if rank != self._port.rank}))

    def _whom_to_ask(self) -> set[int]:
        """Return who knows whom a bucket waits for: its server, and of each other site the relay."""
        return self._relays.union(self._succession.servers)

    def _late(self, phase: str) -> DeadlineError:
        what = {"staleness": "newer global gradients", "period": "the end of the period"}[phase]
        awaited = self._awaited() or tuple(sorted(set(self._succession.servers) - {self._port.rank}))
        return accusing(
            DeadlineError(
                f"{describe_ranks(awaited, self._port.describe_peer)} did not deliver: rank {self._port.rank} waited "
                f"{self._timeout_s:g} s for {what} at iteration {self.clock.iteration} of period "
                f"{self.counts.num_periods}; {LOOK}{self.membership.describe_lost(self._port.describe_peer)}"
            ),
            *awaited,
        )

    # --- the loop's thread ---------------------------------------------------------------------------------------

    def _host(self, bucket: BucketLayout, *, epoch: int) -> None:
        shard = HostedShard(self._port, self.layout, bucket, epoch=epoch, lost=self.lost)
        self.hosted[bucket.index] = shard

    def ask(self) -> None:
        """Ask the servers, and the relays of all sites, whom they wait for."""
        for rank in sorted(self._whom_to_ask()):
            self._send_note(rank, Question())

    def _on_note(self, peer: int, note: Note) -> None:
        if isinstance(note, Nonfinite):
            origin = NonfiniteOrigin(step=note.step, rank=peer, position=note.position)
            self.nonfinite = min(self.nonfinite or origin, origin)
        elif isinstance(note, Answer):
            self._answers[peer] = note.ranks
        elif isinstance(note, Question):
            shards = self.hosted.values()
            self._send_note(peer, Answer(ranks=tuple(sorted({rank for shard in shards for rank in shard.missing()}))))
            for shard in shards:
                shard.obey(shard.machine.wait(peer))
        elif isinstance(note, Stopped):
            for bucket, last_round in note.last_rounds:
                if bucket in self.hosted:
                    self.hosted[bucket].stop(peer, period=note.period, last_round=last_round)
        else:
            super()._on_note(peer, note)

    def _awaited_peers(self) -> tuple[int, ...]:
        return self.layout.workers

    def _on_lost(self, peer: int, error: Exception) -> None:
        if peer in self.lost:
            return
        has_left = isinstance(error, PeerLeftError) and not self._may_switch
        self.membership.lose(peer, error, has_left=has_left)
        if self._newcomers is not None:
            self._newcomers.note_loss(peer)
        for shard in self.hosted.values():
            shard.lose(peer)
        shortage = self._find_shortage()
        if shortage is not None and has_left:
            self._shortage = shortage
        elif shortage is not None:
            self.fail(shortage)
        elif has_left and any(link.is_owed_average(peer) for link in self.links):
            self._port.hear_out(lambda: sum(link.num_heard for link in self.links), self._move_buckets)
        elif has_left and self._defers_loss():
            self._has_someone_left = True
        else:
            self._move_buckets()
        with self._changed:
            self._changed.notify_all()

    def _find_shortage(self) -> QuorumLostError | None:
        """Return why too few are left, if so: of the workers, and of those that were there before newcomers came."""
        find = partial(
            Membership.shortage, quorum=self.layout.survival, what="workers", describe=self._port.describe_peer
        )
        elders = Membership(self._elders, self.membership.losses)
        shortage = find(self.membership) or (find(elders) if self._elders else None)
        return shortage and QuorumLostError(f"{shortage}{self._last_lost}", missing=shortage.missing)

    @property
    def _last_lost(self) -> str:
        """How somebody was lost last: it may be this rank that did not run."""
        newest = self.membership.newest_loss
        return "" if newest is None else f". Last lost: {newest[1]}"

    def _defers_loss(self) -> bool:
        """Whether a rank that left by itself changes nothing yet: all may be about to leave.

        Of a mean under way it may have done its part; if not, the collective says so.
        """
        is_between = self.clock.num_steps == 0 or self._ends_together
        return self._succession.on_tree and self.layout.shrinks and is_between

    def _begin_end(self) -> list[int] | None:
        """Begin to end a period on the tree, if that can be; count, for each rank, what the shards here dropped."""
        if self._has_someone_left:
            self._move_buckets()
        self._ends_together = self._succession.on_tree
        shards = self.hosted.values()
        dropped = [sum(shard.dropped(rank) for shard in shards) for rank in self.layout.workers]
        return dropped if self._ends_together else None

    def _give_up_end(self) -> None:
        """Go on through the servers: someone is lost, which this rank sees soon, if it has not yet."""
        self._ends_together = False
        self._move_buckets()

    def _keep_end(self, ends: Ends) -> bool:
        """Let the mean count, unless a loss that came before leaves it to the servers."""
        self._ends_together = False
        if not self._succession.on_tree:
            return False
        for link, values in zip(self.links, ends.means, strict=True):
            link.keep_mean(values, iteration=ends.iteration, told=ends.told)
        return True

    def _move_buckets(self) -> None:
        """Give buckets to other servers where theirs is dead; every rank finds the same ones, with the same epoch."""
        try:
            moves = self._succession.moves(self.lost)
        except QuorumLostError as error:
            self.fail(QuorumLostError(f"{error}{self._last_lost}", missing=error.missing))
            return
        self._relays = set()
        for move in moves:
            old = self.hosted.pop(self._buckets[move.position].index, None)
            if old is not None:
                old.retire()
            if move.server == self._port.rank:
                self._host(self._buckets[move.position], epoch=move.epoch)
            if self.links:
                self.links[move.position].move(move.server, epoch=move.epoch)
