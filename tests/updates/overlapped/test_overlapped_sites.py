"""Relays in every order, for small fleets in sites, and in random order for larger ones: each gradient enters once."""

from __future__ import annotations

import gc
import random

import pytest
from overlapped_sites import SiteFleet
from test_overlapped_every_order import explore

ONE_AND_TWO, TWO_AND_TWO, THREE_AND_ONE = ((0,), (1, 2)), ((0, 1), (2, 3)), ((0,), (1, 2, 3))
THREE_SITES, WITH_ONE_ALONE = ((0,), (1, 2), (3, 4)), ((0,), (1, 2), (3,))


def check_finished(fleet: SiteFleet) -> None:
    assert all(worker.has_ended for worker in fleet.workers), "a worker waits for ever"
    assert all(worker.period == fleet.num_periods - 1 for worker in fleet.workers), "a period does not end"


@pytest.mark.parametrize(
    ("sites", "num_iterations", "options"),
    [
        (ONE_AND_TWO, 3, {}),
        (ONE_AND_TWO, 3, {"may_stop": (2,), "max_staleness": 0}),
        (ONE_AND_TWO, 3, {"may_stop": (0, 1, 2), "max_staleness": 1}),
        (ONE_AND_TWO, 1, {"num_periods": 2, "is_prompt": True}),
        (ONE_AND_TWO, 2, {"num_periods": 2, "max_staleness": 0, "may_stop": (1,)}),
        (TWO_AND_TWO, 3, {"is_prompt": True}),
        (TWO_AND_TWO, 2, {"is_prompt": True, "may_stop": (2,)}),
        (TWO_AND_TWO, 2, {}),
        (TWO_AND_TWO, 1, {"num_periods": 2, "max_staleness": 0}),
        (THREE_AND_ONE, 2, {"is_prompt": True}),
        (THREE_AND_ONE, 3, {"may_stop": (1,), "max_staleness": 0}),
        (WITH_ONE_ALONE, 2, {"is_prompt": True}),
        (THREE_SITES, 2, {"max_staleness": 0}),
    ],
)
def test_in_every_order_each_gradient_enters_once_and_everybody_ends(sites, num_iterations, options) -> None:
    """Every worker is checked after each step; a worker may stop before the others, and periods follow each other."""
    gc.disable()
    try:
        assert explore(SiteFleet(sites, num_iterations, **options), check_finished) > 200
    finally:
        gc.enable()


def draw_sites(chance: random.Random) -> tuple[tuple[int, ...], ...]:
    sites, first = [], 0
    for _ in range(chance.randint(2, 4)):
        size = chance.randint(1, 4)
        sites.append(tuple(range(first, first + size)))
        first += size
    return tuple(sites)


@pytest.mark.parametrize("seed", range(60))
def test_larger_fleets_in_random_order(seed: int) -> None:
    """Links are fast and slow; what was pushed is in a global gradient or counted as dropped, once."""
    chance = random.Random(seed)
    sites = draw_sites(chance)
    num_workers = sum(map(len, sites))
    fleet = SiteFleet(
        sites,
        chance.randint(1, 10),
        may_stop=chance.sample(range(num_workers), chance.randint(0, num_workers)),
        num_periods=chance.randint(1, 3),
        max_staleness=chance.choice([None, 0, 1, 3]),
        is_prompt=chance.random() < 0.3,
    )
    speeds: dict[tuple[str, int], float] = {}
    while choices := fleet.choices():
        rates = [0.02 if kind == "end" else chance.choice([0.01, 0.1, 1.0]) for kind, _ in choices]
        weights = [speeds.setdefault(choice, rate) for choice, rate in zip(choices, rates, strict=True)]
        fleet.do(*chance.choices(choices, weights)[0])
        if chance.random() < 0.02:
            speeds.clear()
    check_finished(fleet)
    for rank in range(num_workers):
        assert fleet.num_pushed[rank] == fleet.num_folded[rank] + fleet.dropped(rank)
