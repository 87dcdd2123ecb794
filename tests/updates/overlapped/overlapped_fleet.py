"""A whole overlapped fleet in one object, for one bucket: the machines, exact numbers, and messages one may deliver.

A gradient is an integer with a digit of its own, so a sum of gradients tells what it was made of. The mean of a round
is exact, since every gradient is a multiple of all sums of weights that can occur.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import replace
from fractions import Fraction

from syncline.updates.overlapped.server import (
    Average,
    Clear,
    End,
    Fold,
    Push,
    Reply,
    ReplyAverage,
    ServerInstruction,
    ServerShard,
)
from syncline.updates.overlapped.worker import BucketWorker, Keep, PeriodClock, Send


class FleetWorker:
    def __init__(self, rank: int, fleet: Fleet) -> None:
        self.rank = rank
        self.machine = BucketWorker(rank=rank, num_rounds=fleet.num_iterations)
        self.clock = PeriodClock(fleet.num_iterations)
        self.places: dict[int, int] = {}
        self.newest = self.base = self.fed = self.own = 0
        self.up: deque[Push | End] = deque()
        self.down: tuple[Reply | ReplyAverage, int] | None = None
        self.is_waiting = self.has_ended = self.is_dead = False
        self.next_start: Fraction | None = None


def twin(original):
    """``copy.copy`` for an ordinary object, four times as fast."""
    twin = original.__class__.__new__(original.__class__)
    twin.__dict__.update(original.__dict__)
    return twin


def _twin_run(run):
    return run.__class__(run.place, run.first, run.last, run.weight, run.round_number, run.pushed_at)


def _twin_account(account):
    fields = (account.accepted, account.told, account.is_busy, account.final_round)
    return account.__class__(*fields, account.due.copy())


def clone_shard(original):
    shard = twin(original)
    shard._accounts = {rank: _twin_account(account) for rank, account in shard._accounts.items()}
    shard._held, shard._ends, shard.dropped = dict(shard._held), dict(shard._ends), Counter()
    return shard


def _clone_worker(worker: FleetWorker) -> FleetWorker:
    worker.up = worker.up.copy()
    worker.places = dict(worker.places)
    worker.clock, machine = twin(worker.clock), twin(worker.machine)
    worker.machine = machine
    twins = {id(run): _twin_run(run) for run in (machine._out, machine._making, machine._sending) if run is not None}
    machine._out, machine._making = twins.get(id(machine._out)), twins.get(id(machine._making))
    machine._sending = twins.get(id(machine._sending))
    return worker


class Fleet:
    """``num_workers`` workers with one server; the driver chooses what happens next among ``choices()``."""

    def __init__(
        self,
        num_workers,
        num_iterations,
        quorum,
        *,
        max_staleness=None,
        end=False,
        is_prompt=False,
    ):
        self.num_iterations = num_iterations
        self.scale = math.lcm(*range(1, num_workers * num_iterations + 1))
        self.digit_bits = self.scale.bit_length() + 16
        self.is_prompt = is_prompt  # a push leaves at once, so runs are of one iteration; replies arrive before a step
        self.max_staleness, self.with_end = max_staleness, end
        self.shard = ServerShard(workers=range(num_workers), quorum=quorum)
        self.workers = [FleetWorker(rank, self) for rank in range(num_workers)]
        self.cumulative = 0
        self.runs: dict[tuple[int, int], tuple[int, int]] = {}
        self.closings: dict[int, tuple[int, ...]] = {}
        self.average: Fraction | None = None
        self.most_held = 0
        """The most messages of one worker that the server has kept."""

    def host_of(self, _rank: int) -> ServerShard:
        """What the worker pushes to."""
        return self.shard

    @property
    def held(self) -> list[Push | End]:
        """What the server keeps."""
        return [*self.shard._held.values(), *self.shard._ends.values()]

    def gradient(self, worker: int, number: int) -> int:
        return self.scale << (self.digit_bits * (worker * self.num_iterations + number - 1))

    def divide(self, total: int, by: int) -> int:
        """Of a sum of gradients."""
        quotient, rest = divmod(total, by)
        assert rest == 0
        return quotient

    # --- what may happen -----------------------------------------------------------------------------------------

    def choices(self) -> list[tuple[str, int]]:
        found = []
        for worker in self.workers:
            if worker.is_dead:
                continue
            if not worker.has_ended and not worker.is_waiting:
                found.append(("step", worker.rank))
                if self.is_prompt and worker.down is not None:
                    found.append(("pull_and_step", worker.rank))
            if worker.up:
                found.append(("up", worker.rank))
            listens = not self.is_prompt or worker.is_waiting or (worker.has_ended and self.with_end)
            if worker.down is not None and listens:
                found.append(("down", worker.rank))
        return found

    def do(self, kind: str, rank: int) -> None:
        getattr(self, f"_{kind}")(self.workers[rank])

    def _pull_and_step(self, worker: FleetWorker) -> None:
        self._down(worker)
        self._step(worker)

    def _step(self, worker: FleetWorker) -> None:
        iteration = worker.clock.tick(fleet=worker.machine.clock, weight=1.0)
        own = self.gradient(worker.rank, worker.clock.num_steps)
        worker.own += own
        worker.fed += own
        for instruction in worker.machine.step(iteration=iteration, weight=1.0):
            if isinstance(instruction, Keep):
                before = worker.places[instruction.place] if instruction.add else 0
                worker.places[instruction.place] = before + own
            else:
                self._send(worker, instruction)
        self._use(worker)

    def _send(self, worker: FleetWorker, send: Send) -> None:
        push = replace(send.push, payload=worker.places[send.place])
        assert push.round_number <= push.iteration, "a gradient was pushed for a round from the future"
        run = worker.machine._out
        self.runs[worker.rank, push.round_number] = (run.first, run.last)
        worker.up.append(push)
        if self.is_prompt:
            worker.machine.sent()

    def _use(self, worker: FleetWorker) -> None:
        use = worker.machine.use()
        if use is not None:
            newest = max(
                (round_number for round_number in self.closings if round_number <= use.closed), default=0
            )  # the others are abandoned
            assert newest <= worker.clock.iteration, "a global gradient from the future was used"
            own = self.gradient(worker.rank, worker.clock.num_steps)
            replaced = own if use.replaces else 0
            worker.fed += worker.newest - worker.base - replaced
            worker.fed -= 0 if use.subtract is None else worker.places[use.subtract]
            worker.base = worker.newest
        self.check(worker)
        if self._is_too_stale(worker):
            for send in worker.machine.hurry(iteration=worker.clock.iteration):
                self._send(worker, send)
        worker.is_waiting = self._is_too_stale(worker)
        if not worker.is_waiting and worker.clock.is_last:
            self._end(worker)

    def _is_too_stale(self, worker: FleetWorker) -> bool:
        return self.max_staleness is not None and worker.machine.staleness > self.max_staleness

    def _end(self, worker: FleetWorker) -> None:
        worker.has_ended = True
        if self.with_end:
            end = End(worker=worker.rank, period=0, weight=worker.clock.num_samples, payload=worker.fed)
            worker.up.append(end)

    def _up(self, worker: FleetWorker) -> None:
        message = worker.up.popleft()
        if isinstance(message, Push) and not self.is_prompt:
            worker.machine.sent()
        self.hand_in(message)
        self._wake(worker)

    def _down(self, worker: FleetWorker) -> None:
        reply, value = worker.down
        worker.down = None
        if isinstance(reply, Reply):
            if worker.machine.arrived(reply):
                worker.newest = value
            self._wake(worker)
        else:
            worker.next_start = value
        self.obey(self.shard.replied(worker.rank))

    def _wake(self, worker: FleetWorker) -> None:
        if worker.is_waiting:
            worker.clock.catch_up(reached=worker.machine.reached)
            for send in worker.machine.hurry(iteration=worker.clock.iteration):
                self._send(worker, send)
            self._use(worker)

    def kill(self, rank: int) -> None:
        worker = self.workers[rank]
        worker.is_dead = True
        worker.up.clear()
        worker.down = None
        self.obey(self.shard.lose(rank))

    # --- the server's driver -------------------------------------------------------------------------------------

    def hand_in(self, message: Push | End) -> None:
        self.obey(self.shard.hear(message))
        self.most_held = max(self.most_held, sum(one.worker == message.worker for one in self.held))

    def obey(self, instructions: list[ServerInstruction]) -> None:
        for instruction in instructions:
            self._obey(instruction)

    def _obey(self, instruction) -> None:
        match instruction:
            case Fold(round_number=round_number, contributions=contributions):
                self.cumulative += self._mean(contributions)
                self.closings[round_number] = tuple(one.worker for one in contributions)
            case Average(contributions=contributions):
                total = sum(int(one.weight) * one.payload for one in contributions)
                self.average = Fraction(total, sum(int(one.weight) for one in contributions))
            case Clear():
                pass
            case Reply(worker=worker) | ReplyAverage(worker=worker):
                assert self.workers[worker].down is None, "two replies at once"
                value = self.cumulative if isinstance(instruction, Reply) else self.average
                self.workers[worker].down = (instruction, value)

    def _mean(self, contributions) -> int:
        assert list(contributions) == sorted(contributions, key=lambda one: one.worker)
        total = sum(int(one.weight) * one.payload for one in contributions)
        return self.divide(total, sum(int(one.weight) for one in contributions))

    # --- the plain reference -------------------------------------------------------------------------------------

    def reference_cumulative(self, closed: int) -> int:
        """C(closed) from the list of who was in, and what each had put in its run."""
        total = 0
        for round_number, members in self.closings.items():
            if round_number <= closed:
                runs = [(member, *self.runs[member, round_number]) for member in members]
                total += self.divide(sum(self._run_sum(*run) for run in runs), len(runs))
        return total

    def _run_sum(self, worker: int, first: int, last: int) -> int:
        return sum(self.gradient(worker, number) for number in range(first, last + 1))

    def check(self, worker: FleetWorker) -> None:
        """All that was fed is C(used) and the own gradients that are not in it; each gradient enters once."""
        used = worker.machine.used
        inside = [
            round_number
            for round_number, members in self.closings.items()
            if round_number <= used and worker.rank in members
        ]
        own_inside = sum(self._run_sum(worker.rank, *self.runs[worker.rank, round_number]) for round_number in inside)
        assert worker.base == self.reference_cumulative(used)
        assert worker.fed == worker.base + worker.own - own_inside
        settled = {number for round_number in inside for number in range(*self.runs[worker.rank, round_number])}
        assert len(settled) == sum(
            self.runs[worker.rank, round_number][1] - self.runs[worker.rank, round_number][0] for round_number in inside
        )

    # --- states that differ only in the workers' names are one ---------------------------------------------------

    def after(self, kind: str, rank: int) -> Fleet:
        """A copy in which that has happened; what only worker ``rank`` could change is copied for it alone."""
        other = self._clone(rank)
        other.do(kind, rank)
        return other

    def _clone(self, rank: int) -> Fleet:
        other = twin(self)
        other.runs, other.closings = dict(self.runs), dict(self.closings)
        other.workers = [twin(worker) for worker in self.workers]
        other.workers[rank] = _clone_worker(other.workers[rank])
        other.shard = clone_shard(self.shard)
        return other

    def key(self) -> tuple[object, ...]:
        """All that decides what can happen from here; what was fed follows from it (see ``check``)."""
        return (self.shard.closed, self.shard.clock, *sorted(self._worker_key(worker) for worker in self.workers))

    def _worker_key(self, worker: FleetWorker) -> tuple[object, ...]:
        machine, host = worker.machine, self.host_of(worker.rank)
        account = host._accounts[worker.rank]
        making, sending, out = machine._making, machine._sending, machine._out
        reply = worker.down[0] if worker.down else None
        return (
            worker.clock.iteration,
            worker.clock.num_steps,
            worker.is_waiting,
            machine._turnaround,
            machine.closed,
            machine.clock,
            machine.used,
            (making.first, making.last) if making else (),
            sending.round_number if sending else 0,
            (out.round_number, out.first, out.last, out.pushed_at) if out else (),
            tuple((event.round_number, event.iteration) for event in worker.up if isinstance(event, Push)),
            (reply.closed, reply.clock) if isinstance(reply, Reply) else (),
            account.told,
            account.is_busy,
            tuple(
                (round_number, *self.runs[worker.rank, round_number])
                for round_number, members in self.closings.items()
                if worker.rank in members
            ),
            host._held[worker.rank].iteration if worker.rank in host._held else 0,
        )
