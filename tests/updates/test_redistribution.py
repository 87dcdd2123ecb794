"""Who sends whom which state: each range once, from one that has it, and nothing that a rank has itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from syncline.runtime import communicators_in_memory
from syncline.testing import run_threads
from syncline.topology import Topology
from syncline.updates.bucket import Slot
from syncline.updates.control import ControlStream
from syncline.updates.peer_state import HeldState, StateLostError, StatePart, plan_redistribution, redistribute

SIZES = {"weight": 97, "bias": 11, "scale": 1}
Parts = list[StatePart]


def divide(num_ranks: int, chance: random.Random, *, num_spares: int = 0) -> list[Parts]:
    """Give each element to one rank and to so many others, in random ranges."""
    parts: list[Parts] = [[] for _ in range(num_ranks)]
    for name, size in SIZES.items():
        cuts = sorted({0, size, *chance.choices(range(size), k=4)})
        for start, stop in pairwise(cuts):
            for rank in chance.sample(range(num_ranks), min(num_ranks, 1 + num_spares)):
                parts[rank].append(StatePart(name, start, stop))
    return parts


def elements(parts: Sequence[StatePart]) -> set[tuple[str, int]]:
    return {(part.parameter, place) for part in parts for place in range(part.start, part.stop)}


@pytest.mark.parametrize("seed", range(60))
def test_each_range_moves_once_from_one_that_has_it(seed: int) -> None:
    chance = random.Random(seed)
    num_ranks = chance.randint(1, 6)
    held = divide(num_ranks, chance, num_spares=1)
    lost = chance.sample(range(num_ranks), chance.randint(0, num_ranks // 2))
    held = [[] if rank in lost else parts for rank, parts in enumerate(held)]
    wanted = divide(num_ranks, chance, num_spares=chance.randint(0, 1))
    moves, missing = plan_redistribution(held, wanted)
    everything = set().union(*map(elements, held))
    for rank in range(num_ranks):
        moved = [move for move in moves if move.destination == rank]
        assert sum(move.part.stop - move.part.start for move in moved) == len(elements([m.part for m in moved]))
        needed = elements(wanted[rank]) - elements(held[rank])
        assert elements([move.part for move in moved]) == needed & everything
        assert needed - everything <= elements(missing)
        for move in moved:
            assert elements([move.part]) <= elements(held[move.source])
    assert elements(missing) == set().union(*map(elements, wanted)) - everything


def test_holders_share_the_work_and_the_nearest_is_asked_first() -> None:
    whole = [StatePart("weight", 0, 12)]
    held = [whole, whole, whole, [], [], []]
    wanted = [whole] * 6
    sources = [move.source for move in plan_redistribution(held, wanted)[0]]
    assert sources == [0, 1, 2]
    near, _ = plan_redistribution(held, wanted, distance=lambda a, b: abs(a - b))
    assert [move.source for move in near] == [2, 2, 2]


def value_of(name: str, key: str, start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop, dtype=torch.float64) * len(name) + len(key)


def slot_of(name: str) -> Slot:
    return Slot(name=name, position=0, start=0, stop=SIZES[name], shape=(SIZES[name],), stride=(1,))


@pytest.mark.parametrize(("num_old", "num_new"), [(4, 3), (2, 5), (3, 1), (1, 4)])
def test_state_arrives_with_its_bits(num_old: int, num_new: int) -> None:
    """Between any divisions; ranks beyond the old ones are new and have nothing."""
    chance = random.Random(num_old * 10 + num_new)
    held, wanted = divide(num_old, chance, num_spares=1), divide(num_new, chance, num_spares=1)
    if num_new < num_old:
        held = [held[0] + [part for parts in held[num_new:] for part in parts], *held[1:num_new]]
    communicators = communicators_in_memory(num_new, Topology.flat(num_new))

    def on_rank(rank: int) -> None:
        control = ControlStream(communicators[rank], stream=1)
        own = [
            HeldState(
                part=part,
                divided={
                    "exp_avg": value_of(part.parameter, "exp_avg", part.start, part.stop),
                    "half": value_of(part.parameter, "half", part.start, part.stop).to(torch.bfloat16),
                },
                single={"step": torch.tensor(7.0), "lr": 0.1 + 0.2},
            )
            for part in (held[rank] if rank < len(held) else [])
        ]
        source = redistribute(control, own, wanted)
        for part in wanted[rank]:
            values = source.values(part.parameter)
            assert values == {"exp_avg": torch.float64, "half": torch.bfloat16, "step": 7.0, "lr": 0.1 + 0.2}
            found = torch.empty(part.stop - part.start, dtype=torch.float64)
            source.fill(slot_of(part.parameter), "exp_avg", part.start, found)
            assert torch.equal(found, value_of(part.parameter, "exp_avg", part.start, part.stop))
            halves = torch.empty(part.stop - part.start, dtype=torch.bfloat16)
            source.fill(slot_of(part.parameter), "half", part.start, halves)
            expected = value_of(part.parameter, "half", part.start, part.stop).to(torch.bfloat16)
            assert torch.equal(halves, expected)

    try:
        run_threads(num_new, on_rank)
    finally:
        for communicator in communicators:
            communicator.close()


def test_what_nobody_has_is_named_on_every_rank() -> None:
    communicators = communicators_in_memory(2)

    def on_rank(rank: int) -> None:
        control = ControlStream(communicators[rank], stream=1)
        held = [HeldState(part=StatePart("weight", 0, 40 if rank else 20))]
        with pytest.raises(StateLostError, match=r"elements 40 to 97 of 'weight'; go on from a checkpoint") as caught:
            redistribute(control, held, [[StatePart("weight", 0, 97)]] * 2)
        assert caught.value.parts == (StatePart("weight", 40, 97),)

    try:
        run_threads(2, on_rank)
    finally:
        for communicator in communicators:
            communicator.close()
