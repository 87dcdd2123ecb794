"""Every order of events in small jobs, with a death at every point of every order."""

import pickle

import pytest
from cluster_world import World

from syncline.updates.clustered.messages import RecordSchedule


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
    record_schedule = RecordSchedule(period=1, reelect_every=1, has_outer_rounds=False)
    assert explore(World(((0, 1, 2),), record_schedule, num_records=2), victim) > 250


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_pair_and_a_single(victim: int) -> None:
    record_schedule = RecordSchedule(period=1, reelect_every=1)
    assert explore(World(((0, 1), (2,)), record_schedule, num_records=2), victim) > 140


def test_two_singles_who_average() -> None:
    record_schedule = RecordSchedule(period=1, reelect_every=1, averages=True)
    assert explore(World(((0,), (1,)), record_schedule, num_records=6), 0) > 100


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("proposals", [(((0, 1),), ((1,), (0,))), ((), ((0, 1),))])
def test_two_singles_become_a_pair_or_change_numbers(victim: int, proposals) -> None:
    """Each rank proposes something else, and ranks know at different times what is agreed."""
    record_schedule = RecordSchedule(period=1, reelect_every=1, averages=True)
    world = World(((0,), (1,)), record_schedule, num_records=5, propose=Proposals(proposals))
    assert explore(world, victim) > 50


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_of_a_pair_changes_sides(victim: int) -> None:
    record_schedule = RecordSchedule(period=1, reelect_every=1, averages=True)
    changed = ((1,), (0, 2))
    world = World(((0, 1), (2,)), record_schedule, num_records=4, propose=Proposals((changed,) * 3))
    after_records(world, 2)
    assert explore(world, victim) > 100


class Proposals:
    """What each rank proposes, in every term."""

    def __init__(self, of_rank) -> None:
        self._of_rank = of_rank

    def __call__(self, rank: int, term: int):
        return self._of_rank[rank]


def after_records(world: World, number: int) -> None:
    """Go on, without a death, until all hold so many records: so the orders that are left are fewer."""
    while any(len(player.applied) < number for player in world.players.values()):
        world.happen(world.choices()[0])
