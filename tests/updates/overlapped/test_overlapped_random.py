"""Large fleets in random order, with losses and repeated messages: each gradient enters once, and everybody ends."""

import random
from fractions import Fraction

import pytest
from overlapped_fleet import Fleet

from syncline.updates.overlapped.server import Push


def repeat_something(fleet: Fleet, chance: random.Random) -> None:
    """Let a push that was counted (or dropped) arrive again, as it was or for an older period."""
    worker = chance.choice(fleet.workers)
    pushed = [round_number for rank, round_number in fleet.runs if rank == worker.rank]
    on_their_way = {message.round_number for message in worker.up if isinstance(message, Push)}
    pushed = [round_number for round_number in pushed if round_number not in on_their_way]
    if worker.is_dead or not pushed:
        return
    number, period = chance.choice(pushed), chance.choice([0, -1])
    push = Push(worker=worker.rank, period=period, round_number=number, iteration=1, weight=7.0, payload=12345)
    before, closed = fleet.cumulative, fleet.shard.closed
    fleet.hand_in(push)
    assert (fleet.cumulative, fleet.shard.closed) == (before, closed), "a repeated gradient changed a result"
    assert not any(one is push for one in fleet.held)


def run(fleet: Fleet, chance: random.Random, *, num_losses: int) -> None:
    speeds = [chance.choice([1, 1, 1, 4]) for _ in fleet.workers]
    while choices := fleet.choices():
        weights = [10 / speeds[rank] if kind == "step" else 10 for kind, rank in choices]
        fleet.do(*chance.choices(choices, weights)[0])
        if chance.random() < 0.05:
            repeat_something(fleet, chance)
        if num_losses and chance.random() < 0.02:
            num_losses -= 1
            fleet.kill(chance.choice([worker.rank for worker in fleet.workers if not worker.is_dead]))


@pytest.mark.parametrize("seed", range(40))
def test_random_fleet(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    num_workers = chance.randint(2, 9)
    quorum = chance.randint(1, num_workers)
    num_losses = chance.randint(0, num_workers - quorum)
    max_staleness = chance.choice([None, 0, 1, 3, 8])
    fleet = Fleet(
        num_workers=num_workers,
        num_iterations=chance.randint(1, 12),
        quorum=quorum,
        max_staleness=max_staleness,
        end=True,
        is_prompt=chance.random() < 0.3,
    )
    run(fleet, chance, num_losses=num_losses)
    alive = [worker for worker in fleet.workers if not worker.is_dead]
    assert all(worker.has_ended for worker in alive)
    assert all(isinstance(worker.next_start, Fraction) and worker.next_start == fleet.average for worker in alive)
    assert (fleet.shard.period, fleet.shard.closed, fleet.held) == (1, 0, [])
    assert fleet.most_held <= 2, "a push, and an end"
    if quorum == num_workers:
        assert {worker.clock.num_steps for worker in alive} == {fleet.num_iterations}
        weight = sum(worker.clock.num_samples for worker in alive)
        mean = Fraction(sum(worker.fed * int(worker.clock.num_samples) for worker in alive), int(weight))
        assert fleet.average == mean
