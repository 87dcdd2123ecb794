"""Several buckets, with a server each, of workers whose steps wait for all of them: nobody waits for ever."""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import dataclass, field

import pytest
import torch
from overlapped_training import one_step, start

from small_regression import parameters_of
from syncline.updates import Overlapped
from syncline.updates.overlapped.server import End, Push, Reply, ReplyAverage, ServerShard
from syncline.updates.overlapped.worker import BucketWorker, PeriodClock, Send
from thread_fleets import run_fleets

Choice = tuple[str, int, int]
"""What happens, to which worker, in which bucket."""


@dataclass(slots=True)
class Link:
    machine: BucketWorker
    up: deque[Push | End] = field(default_factory=deque)
    down: Reply | ReplyAverage | None = None
    has_average: bool = False


class Worker:
    def __init__(self, links: list[Link], num_iterations: int) -> None:
        self.links = links
        self.clock = PeriodClock(num_iterations)
        self.is_waiting = self.has_ended = self.is_dead = False


class Buckets:
    """Decisions only, as :class:`ServerClient` has them made; gradients are left out."""

    def __init__(self, *, num_workers, num_buckets, num_iterations, quorum, max_staleness):
        self.max_staleness = max_staleness
        self.shards = [ServerShard(workers=range(num_workers), quorum=quorum) for _ in range(num_buckets)]
        self.workers = [
            Worker(
                [Link(BucketWorker(rank=rank, num_rounds=num_iterations)) for _ in range(num_buckets)],
                num_iterations,
            )
            for rank in range(num_workers)
        ]

    def choices(self) -> list[Choice]:
        found = []
        for rank, worker in enumerate(self.workers):
            if worker.is_dead:
                continue
            if not worker.has_ended and not worker.is_waiting:
                found.append(("step", rank, 0))
            found += [("up", rank, bucket) for bucket, link in enumerate(worker.links) if link.up]
            found += [("down", rank, bucket) for bucket, link in enumerate(worker.links) if link.down is not None]
        return found

    def do(self, what: str, rank: int, bucket: int) -> None:
        worker = self.workers[rank]
        if what == "step":
            self.step(rank, worker)
        elif what == "up":
            self.up(bucket, worker.links[bucket])
        else:
            self.down(rank, bucket, worker.links[bucket])
        if not worker.has_ended:
            self.go_on(rank, worker)

    def step(self, rank: int, worker: Worker) -> None:
        iteration = worker.clock.tick(fleet=max(link.machine.clock for link in worker.links), weight=1.0)
        for link in worker.links:
            self.push(link, link.machine.step(iteration=iteration, weight=1.0))
            link.machine.use()

    def up(self, bucket: int, link: Link) -> None:
        event = link.up.popleft()
        if isinstance(event, Push):
            link.machine.sent()
        self.obey(bucket, self.shards[bucket].hear(event))

    def down(self, rank: int, bucket: int, link: Link) -> None:
        reply, link.down = link.down, None
        if isinstance(reply, ReplyAverage):
            link.has_average = True
        elif not self.workers[rank].has_ended:
            link.machine.arrived(reply)
        self.obey(bucket, self.shards[bucket].replied(rank))

    def go_on(self, rank: int, worker: Worker) -> None:
        while self.is_too_stale(worker) and self.is_news(worker):
            worker.clock.catch_up(reached=max(link.machine.reached for link in worker.links))
            for link in worker.links:
                self.push(link, link.machine.hurry(iteration=worker.clock.iteration))
                link.machine.use()
        worker.is_waiting = self.is_too_stale(worker)
        if not worker.is_waiting and worker.clock.is_last:
            worker.has_ended = True
            for link in worker.links:
                link.up.append(End(worker=rank, period=0, weight=1.0))

    def ask(self) -> None:
        """Let everyone who waits ask all servers."""
        for rank, worker in enumerate(self.workers):
            if worker.is_waiting and not worker.is_dead:
                for bucket, shard in enumerate(self.shards):
                    self.obey(bucket, shard.wait(rank))

    def kill(self, rank: int) -> None:
        self.workers[rank].is_dead = True
        for bucket, shard in enumerate(self.shards):
            self.obey(bucket, shard.lose(rank))

    def is_too_stale(self, worker: Worker) -> bool:
        return any(link.machine.staleness > self.max_staleness for link in worker.links)

    @staticmethod
    def is_news(worker: Worker) -> bool:
        return any(link.machine.num_unused or link.machine.can_hurry for link in worker.links)

    @staticmethod
    def push(link: Link, instructions) -> None:
        for one in instructions:
            if isinstance(one, Send):
                link.up.append(one.push)

    def obey(self, bucket: int, instructions) -> None:
        for instruction in instructions:
            if isinstance(instruction, Reply | ReplyAverage):
                link = self.workers[instruction.worker].links[bucket]
                assert link.down is None, "two replies at once"
                link.down = instruction


def run(fleet: Buckets, chance: random.Random, *, death: int | None, asks_early: bool) -> None:
    """Let links be fast and slow, at random, until nothing can happen any more though everyone who waits has asked."""
    speeds: dict[Choice, float] = {}
    is_idle = False
    while not is_idle:
        choices = fleet.choices()
        if choices:
            weights = [speeds.setdefault(choice, chance.choice([0.001, 0.03, 1.0])) for choice in choices]
            fleet.do(*chance.choices(choices, weights)[0])
        if chance.random() < 0.02:
            speeds.clear()
        if death is not None and chance.random() < 0.05:
            fleet.kill(death)
            death = None
        if not choices or (asks_early and chance.random() < 0.05):
            fleet.ask()
            is_idle = not fleet.choices()


def play(seed: int, **options: int) -> Buckets:
    chance = random.Random(seed)
    fleet = Buckets(**options)
    run(fleet, chance, death=options["num_workers"] - 1 if seed % 3 == 0 else None, asks_early=seed % 2 == 0)
    for worker in fleet.workers:
        assert worker.is_dead or worker.has_ended, f"a worker waits for ever, seed {seed}"
        assert worker.is_dead or all(link.has_average for link in worker.links), f"an average is missing, seed {seed}"
    return fleet


@pytest.mark.parametrize("num_workers", [3, 4])
def test_workers_that_wait_for_each_other_in_two_buckets_go_on(num_workers: int) -> None:
    for seed in range(150):
        play(seed, num_workers=num_workers, num_buckets=4, num_iterations=8, quorum=2, max_staleness=0)


def test_where_all_workers_are_needed_nobody_waits_for_ever_or_leaves_iterations_out() -> None:
    for seed in range(1, 151):
        fleet = Buckets(num_workers=3, num_buckets=3, num_iterations=16, quorum=3, max_staleness=seed % 4)
        run(fleet, random.Random(seed), death=None, asks_early=True)
        assert all(worker.clock.num_steps == 16 for worker in fleet.workers)
        assert all(worker.has_ended for worker in fleet.workers)


def test_a_question_tells_the_servers_who_waits() -> None:
    """Ranks 0 and 1 ask as if they waited, so rank 2 is not kept waiting for a second push."""
    has_stepped = threading.Event()

    def body(fleet):
        model, optimizer = start(fleet, Overlapped(period=4, quorum=2, max_staleness=0, bucket_bytes=128))
        if fleet.rank == 2:
            one_step(model, optimizer, fleet.rank, 0)
            has_stepped.set()
        else:
            client = optimizer.training.updater.client
            client._port.call_soon(client.ask)
            assert has_stepped.wait(60)
        while optimizer.iteration < 4:
            one_step(model, optimizer, fleet.rank, 1)
        return parameters_of(model), optimizer.statistics()

    results = run_fleets(3, body)
    assert all(torch.equal(parameters, results[0][0]) for parameters, _ in results)
    assert results[0][1].dropped[2] >= 1
