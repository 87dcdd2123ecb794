"""Doing a recorded run again in one process: the same decisions, the same sums, the same bits.

Every rank records what its worker was told to do in each step, and who was in the global gradients of the shards that
it hosted (``Overlapped(should_record=True)``). That is all that arrivals ever decide; with the same data, the rest
follows. Workers are carried on in turn, each as far as what it used then exists. Runs in which a rank was lost cannot
be replayed, nor can averaged states and outer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from syncline.errors import UpdateError
from syncline.updates.bucket import Bucket
from syncline.updates.overlapped.arithmetic import Feed, add_mean, average, correction, sum_dtype
from syncline.updates.overlapped.events import Keep, Send, Use, WorkerInstruction
from syncline.updates.overlapped.recording import Recorder, ServerNote


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A worker to be carried on: its model's buckets, and how it makes a step."""

    rank: int
    buckets: Sequence[Bucket]
    backward: Callable[[int], None]
    """Leave the gradients of step k in the buckets."""
    step: Callable[[], None]
    """Step the optimizer."""


def replay(recorders: Sequence[Recorder], replicas: Sequence[Replica], *, should_spread: bool = True) -> None:
    """Carry ``replicas`` through what the ``recorders`` of all ranks (in rank order) hold; they end as in the run."""
    ledger = _Ledger([note for recorder in recorders for note in recorder.servers], replicas)
    running = [
        _carry(recorders[replica.rank], _Hands(replica, ledger, should_spread=should_spread)) for replica in replicas
    ]
    while running:
        before = ledger.num_events
        running = [worker for worker in running if next(worker, "ended") != "ended"]
        if running and ledger.num_events == before:
            raise UpdateError(
                "The records do not fit together: every worker waits for another; give those of all ranks"
            )


class _Ledger:
    """What was pushed and what the servers made of it."""

    def __init__(self, notes: Sequence[ServerNote], replicas: Sequence[Replica]) -> None:
        self._folds = {(note.bucket, note.period, note.number): note.members for note in notes if note.what == "fold"}
        self._averages = {(note.bucket, note.period): note.members for note in notes if note.what == "average"}
        self._plans = [bucket.plan for bucket in replicas[0].buckets]
        self._pushes: dict[tuple[int, int, int, int], torch.Tensor] = {}
        self._ends: dict[tuple[int, int, int], torch.Tensor] = {}
        self._sums: dict[tuple[int, int, int], torch.Tensor] = {}
        self.num_events = 0

    def push(self, bucket: int, period: int, turn: int, worker: int, values: torch.Tensor) -> None:
        self._pushes[bucket, period, turn, worker] = values.clone()

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
        given = [self._pushes.get((bucket, period, closed, worker)) for worker, _ in members]
        if before is None or any(values is None for values in given):
            return None
        result = before.clone()
        if members:
            add_mean(result, [values for values in given if values is not None], [weight for _, weight in members])
        self._sums[bucket, period, closed] = result
        return result

    def average(self, bucket: int, period: int) -> torch.Tensor | None:
        """Return the average that ended ``period``, if all have sent what they had."""
        members = self._averages[bucket, period]
        given = [self._ends.get((bucket, period, worker)) for worker, _ in members]
        if any(values is None for values in given):
            return None
        plan = self._plans[bucket]
        out = torch.empty(plan.num_elements, dtype=plan.dtype)
        average([values for values in given if values is not None], [weight for _, weight in members], out=out)
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
        hands.finish_step()
        replica.step()
        if number + 1 in recorder.ends:
            for index, bucket_memory in enumerate(replica.buckets):
                ledger.end(index, hands.period, replica.rank, bucket_memory.parameters)
            ledger.num_events += 1
            while not hands.end_period():
                yield "waits for the end of the period"


class _Hands:
    """What a worker holds between its instructions."""

    def __init__(self, replica: Replica, ledger: _Ledger, *, should_spread: bool) -> None:
        self.period = 0
        self.replica = replica
        self.ledger = ledger
        self._feeds = [Feed(should_spread=should_spread) for _ in replica.buckets]
        self._places: dict[tuple[int, int], torch.Tensor] = {}
        self._used = [0] * len(replica.buckets)

    def obey(self, bucket: int, instruction: WorkerInstruction) -> bool:
        """Do what was done; False if that cannot be done yet."""
        gradient = self.replica.buckets[bucket].gradients
        if isinstance(instruction, Use):
            return self._use(bucket, instruction, gradient)
        key = (bucket, instruction.place)
        if isinstance(instruction, Send):
            self.ledger.push(bucket, self.period, instruction.turn, self.replica.rank, self._places[key])
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
        change = correction(
            newest=newest,
            base=self.ledger.sum(bucket, self.period, used) if used else None,
            subtract=[self._places[bucket, place] for place in use.subtract],
        )
        self._feeds[bucket].take(gradient, change, use)
        self._used[bucket] = use.closed
        return True

    def finish_step(self) -> None:
        """Add what is left of earlier corrections."""
        for feed, memory in zip(self._feeds, self.replica.buckets, strict=True):
            feed.finish(memory.gradients)

    def end_period(self) -> bool:
        """Take the averages; False if they do not exist yet."""
        indices = range(len(self.replica.buckets))
        averages = [self.ledger.average(index, self.period) for index in indices]
        if any(values is None for values in averages):
            return False
        for memory, values in zip(self.replica.buckets, averages, strict=True):
            if values is not None:
                memory.parameters.copy_(values)
        for feed in self._feeds:
            feed.clear()
        self.period += 1
        self._used = [0 for _ in indices]
        return True
