"""Every order of events in small jobs, with a death at every point of every order."""

import pickle

import pytest
from cluster_world import World

from syncline.updates.clustered.agenda import Agenda


def explore(world: World, victim: int) -> int:
    """Walk through every order from here; the victim may die at any point, and any first part of its mail arrive."""
    seen = set()
    stack = [(world, True)]
    while stack:
        here, may_die = stack.pop()
        key = (here.key(), may_die)
        if key in seen:
            continue
        seen.add(key)
        image = pickle.dumps(here)
        choices = here.choices()
        if not choices:
            here.check_finished()
            continue
        for choice in choices:
            there = pickle.loads(image)
            there.happen(choice)
            stack.append((there, may_die))
        for num_kept in here.kept_after_death(victim) if may_die else ():
            there = pickle.loads(image)
            there.kill(victim, num_kept=num_kept)
            stack.append((there, False))
    return len(seen)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_cluster_of_three(victim: int) -> None:
    agenda = Agenda(period=1, reelect_every=1, exchanges=False)
    assert explore(World(((0, 1, 2),), agenda, num_entries=2), victim) > 500


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_pair_and_a_single(victim: int) -> None:
    agenda = Agenda(period=1, reelect_every=1)
    assert explore(World(((0, 1), (2,)), agenda, num_entries=2), victim) > 200


def test_two_singles_whose_results_differ_and_who_average() -> None:
    agenda = Agenda(period=1, reelect_every=1, averages=True)
    assert explore(World(((0,), (1,)), agenda, num_entries=6, shares_results=False), 0) > 100
