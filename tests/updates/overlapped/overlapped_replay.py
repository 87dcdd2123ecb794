"""Doing a recorded run again in one process: the same decisions, the same sums, the same bits.

Every rank records what its worker was told to do in each step, and who was in the global gradients of the shards that
it hosted (`overlapped_recording`). That is all that arrivals ever decide; with the same data, the rest
follows. Workers are carried on one after the other, each as far as what it used then exists. Runs in which a rank was
lost cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from overlapped_recording import Recorder, Redo, ServerNote, WorkerDecision

from syncline.updates.bucket import Bucket
from syncline.updates.flat import shares, sum_dtype, weighted_sum
from syncline.updates.overlapped.link import Feed, add_mean, average, correction
from syncline.updates.overlapped.rebase import Collect, Rebase, Runs
from syncline.updates.overlapped.rule import Overlapped
from syncline.updates.overlapped.worker import Keep, Send, Use
from syncline.updates.rounds import exponent_for, from_steps, largest_move, to_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A worker to be carried on: its model's buckets, its optimizer, and where its gradients come from."""

    rank: int
    buckets: Sequence[Bucket]
    optimizer: torch.optim.Optimizer
    backward: Callable[[int], None]
    """Leave the gradients of step k in the buckets."""


def replay(recorders: Sequence[Recorder], replicas: Sequence[Replica], rule: Overlapped) -> None:
    """Carry ``replicas`` through what the ``recorders`` of all ranks (in rank order) hold; they end as in the run.

    ``rule`` is the one of the run.
    """
    notes = [note for recorder in recorders for note in recorder.servers]
    ledger = _Ledger(notes, replicas, num_ranks=len(recorders))
    running = [_carry(recorders[replica.rank], _Hands(replica, ledger, rule)) for replica in replicas]
    while running:
        before = ledger.num_events
        running = [worker for worker in running if next(worker, "ended") != "ended"]
        if running and ledger.num_events == before:
            raise AssertionError("the records do not fit together: every worker waits for another")


class _Ledger:
    """What was pushed and what the servers made of it."""

    def __init__(self, notes: Sequence[ServerNote], replicas: Sequence[Replica], *, num_ranks: int) -> None:
        self._folds = {(note.bucket, note.period, note.number): note.members for note in notes if note.what == "fold"}
        self._relayed = {
            (note.bucket, note.period, note.number, note.relay): note.members for note in notes if note.what == "relay"
        }
        self._averages = {(note.bucket, note.period): note.members for note in notes if note.what == "average"}
        self._plans = [bucket.plan for bucket in replicas[0].buckets]
        self._pushes: dict[tuple[int, int, int, int], torch.Tensor] = {}
        self._ends: dict[tuple[int, int, int], torch.Tensor] = {}
        self._starts: dict[tuple[int, int], torch.Tensor] = {}
        self._sums: dict[tuple[int, int, int], torch.Tensor] = {}
        self.num_events = 0
        self.num_ranks = num_ranks

    def push(self, bucket: int, period: int, round_number: int, worker: int, values: torch.Tensor) -> None:
        self._pushes[bucket, period, round_number, worker] = values.clone()

    def start(self, bucket: int, period: int, values: torch.Tensor) -> None:
        """Let ``values`` be what the period begins with, where it ends with a collective."""
        self._starts[bucket, period] = values.clone()

    def end(self, bucket: int, period: int, worker: int, values: torch.Tensor) -> None:
        self._ends[bucket, period, worker] = values.clone()

    def sum(self, bucket: int, period: int, closed: int) -> torch.Tensor | None:
        """Return C(closed), if all that is in it was pushed."""
        if closed == 0:
            plan = self._plans[bucket]
            return torch.zeros(plan.num_elements, dtype=sum_dtype(plan.dtype))
        known = self._sums.get((bucket, period, closed))
        if known is not None:
            return known
        before = self.sum(bucket, period, closed - 1)
        members = self._folds.get((bucket, period, closed), ())
        given = [self._pushed(bucket, period, closed, worker) for worker, _ in members]
        if before is None or any(values is None for values in given):
            return None
        result = before.clone()
        if members:
            add_mean(result, [values for values in given if values is not None], [weight for _, weight in members])
        self._sums[bucket, period, closed] = result
        return result

    def _pushed(self, bucket: int, period: int, number: int, worker: int) -> torch.Tensor | None:
        """Return what the server got: a push, or what a relay made of those of its site."""
        members = self._relayed.get((bucket, period, number, worker), ())
        given = [self._pushes.get((bucket, period, number, one)) for one, _ in members or ((worker, 1.0),)]
        if any(values is None for values in given):
            return None
        values = [one for one in given if one is not None]
        if not members:
            return values[0]
        mean = torch.empty(values[0].shape, dtype=sum_dtype(values[0].dtype))
        return weighted_sum(values, shares([weight for _, weight in members]), out=mean).to(values[0].dtype)

    def average(self, bucket: int, period: int) -> torch.Tensor | None:
        """Return the average that ended ``period``, if all have sent what they had."""
        members = self._averages[bucket, period]
        given = [self._ends.get((bucket, period, worker)) for worker, _ in members]
        if any(values is None for values in given):
            return None
        plan = self._plans[bucket]
        out = torch.empty(plan.num_elements, dtype=plan.dtype)
        values, weights = [one for one in given if one is not None], [weight for _, weight in members]
        start = self._starts.get((bucket, period))
        if start is None:
            average(values, weights, out=out)
        else:
            tree_mean(values, weights, start, out=out)
        return out


def _carry(recorder: Recorder, hands: _Hands) -> Iterator[str]:
    """Carry one worker on; yields whenever it needs what does not exist yet."""
    replica, ledger = hands.replica, hands.ledger
    for number, instructions in enumerate(recorder.steps):
        replica.backward(number)
        for bucket, instruction in instructions:
            while not hands.obey(bucket, instruction):
                yield "waits for a global gradient"
            ledger.num_events += 1
        hands.step()
        if number + 1 in recorder.ends:
            hands.send_end()
            ledger.num_events += 1
            while not hands.end_period():
                yield "waits for the end of the period"


class _Hands:
    """What a worker holds between its instructions."""

    def __init__(self, replica: Replica, ledger: _Ledger, rule: Overlapped) -> None:
        self.period = 0
        self.replica = replica
        self.ledger = ledger
        buckets, optimizer = replica.buckets, replica.optimizer
        self._feeds = [Feed() for _ in buckets]
        kind = rule.kind(optimizer)
        self._replaces = kind == "swap"
        self._rebase = Rebase(buckets, optimizer) if kind == "rebase" else None
        self._collects = [Collect() for _ in buckets]
        self._own: list[Runs] = [[] for _ in buckets]
        self._places: dict[tuple[int, int], torch.Tensor] = {}
        self._used = [0] * len(replica.buckets)
        self._ends_on_tree = rule.layout(ledger.num_ranks).ends_on_tree
        self._note_start()

    def _note_start(self) -> None:
        if self._ends_on_tree:
            for bucket, memory in enumerate(self.replica.buckets):
                self.ledger.start(bucket, self.period, memory.parameters)

    def obey(self, bucket: int, instruction: WorkerDecision) -> bool:
        """Do what was done; False if that cannot be done yet."""
        gradient = self.replica.buckets[bucket].gradients
        if isinstance(instruction, Use):
            return self._use(bucket, instruction, gradient)
        if isinstance(instruction, Redo):
            self._own[bucket] = [(self._places[bucket, place], count) for place, count in instruction.runs]
            return True
        key = (bucket, instruction.place)
        if isinstance(instruction, Send):
            self.ledger.push(bucket, self.period, instruction.push.round_number, self.replica.rank, self._places[key])
        elif isinstance(instruction, Keep) and instruction.add:
            self._places[key].add_(gradient)
        else:
            self._places[key] = gradient.clone()
        return True

    def _use(self, bucket: int, use: Use, gradient: torch.Tensor) -> bool:
        newest = self.ledger.sum(bucket, self.period, use.closed)
        if newest is None:
            return False
        used = self._used[bucket]
        own = self._places[bucket, use.subtract] if use.subtract is not None else gradient if use.replaces else None
        subtract = own if self._replaces and not use.replaces else None
        change = correction(newest, self.ledger.sum(bucket, self.period, used) if used else None, subtract=subtract)
        if not self._replaces:
            use = replace(use, replaces=False)
        taker = self._feeds[bucket] if self._rebase is None else self._collects[bucket]
        taker.take(gradient, change, use, own)
        self._used[bucket] = use.closed
        return True

    def step(self) -> None:
        """Step the optimizer on what the gradients have become, or on what was pulled and the own ones again."""
        if self._rebase is not None:
            self._rebase.step([collect.collected() for collect in self._collects], self._own)
            return
        for feed, memory in zip(self._feeds, self.replica.buckets, strict=True):
            feed.finish(memory.gradients)
        self.replica.optimizer.step()

    def send_end(self) -> None:
        """Hand in what the period ends with."""
        if self._rebase is not None:
            self._rebase.finish(self._own)
        for bucket, memory in enumerate(self.replica.buckets):
            self.ledger.end(bucket, self.period, self.replica.rank, memory.parameters)

    def end_period(self) -> bool:
        """Take the averages; False if they do not exist yet."""
        averages = [self.ledger.average(bucket, self.period) for bucket in range(len(self.replica.buckets))]
        if any(values is None for values in averages):
            return False
        for memory, average_of_it in zip(self.replica.buckets, averages, strict=True):
            assert average_of_it is not None, "all are there"
            memory.parameters.copy_(average_of_it)
        if self._rebase is not None:
            self._rebase.begin()
        for feed in self._feeds:
            feed.clear()
        self.period += 1
        self._used = [0 for _ in averages]
        self._note_start()
        return True


def tree_mean(
    values: Sequence[torch.Tensor], weights: Sequence[float], start: torch.Tensor, *, out: torch.Tensor
) -> None:
    """Write what a collective makes of all ranks' ``values`` to ``out``, in one process."""
    exponent = exponent_for([largest_move(one, start) for one in values], start.dtype)
    steps = [
        to_steps(one, start, share=share, exponent=exponent) for one, share in zip(values, shares(weights), strict=True)
    ]
    from_steps(torch.stack(steps).sum(0), start, exponent=exponent, out=out)
