"""A schedule: made by proof alone, the same in every process, split and asked for what ranks own."""

import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings as effort
from schedule_trees import balanced_tree, trees

from syncline.errors import ScheduleError
from syncline.schedule import PLANNERS, Collective, Schedule, plan_tree, verify
from syncline.schedule.verifier import split_at_owners
from syncline.topology import Topology


def test_only_the_verifier_makes_schedules():
    schedule = plan_tree(Topology.flat(2), Collective.ALL_REDUCE)
    claim = {field.name: getattr(schedule, field.name) for field in fields(schedule.draft)}
    with pytest.raises(ScheduleError, match=r"made by syncline.schedule.verify\(draft\) alone"):
        Schedule(**claim, digest="", token=object())
    with pytest.raises((ValueError, TypeError), match="token"):  # the latter from Python 3.13 on
        replace(schedule, transfers=schedule.transfers.shifted(1))


def test_digest_says_what_is_done_and_not_who_planned_it():
    draft = plan_tree(Topology.flat(3), Collective.REDUCE_SCATTER).draft
    digest = verify(draft).digest
    assert verify(replace(draft, planner="other")).digest == digest
    others = [
        plan_tree(Topology.flat(3), Collective.ALL_GATHER),
        plan_tree(Topology.flat(4), Collective.REDUCE_SCATTER),
        PLANNERS["ring"].plan(Topology.flat(3), Collective.REDUCE_SCATTER),
        plan_tree(Topology.flat(3), Collective.BROADCAST, root=0),
        plan_tree(Topology.flat(3), Collective.BROADCAST, root=1),
    ]
    assert len({digest, *(schedule.digest for schedule in others)}) == 6


def test_equal_divisions_have_equal_digests():
    balanced, ordered = (
        plan_tree(Topology.flat(4), Collective.ALL_REDUCE, target=target) for target in ("balanced", "rank_order")
    )
    assert balanced.digest == ordered.digest


def test_digest_is_the_same_in_another_process():
    probe = (
        "from syncline.schedule import *; from syncline.topology import Topology;"
        "topology = Topology.load('three-racks-uneven-uplinks');"
        "print(PLANNERS['weighted_tree'].plan(topology, Collective.ALL_REDUCE).digest)"
    )
    other = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    topology = Topology.load("three-racks-uneven-uplinks")
    assert other.stdout.strip() == PLANNERS["weighted_tree"].plan(topology, Collective.ALL_REDUCE).digest


@effort(max_examples=15)
@given(trees(max_ranks=12))
def test_all_reduce_splits_in_two_with_the_same_owners(topology):
    for planner in ("tree", "weighted_tree", "ring"):
        whole = PLANNERS[planner].plan(topology, Collective.ALL_REDUCE)
        scatter, gather = map(verify, split_at_owners(whole.draft))
        assert (scatter.collective, gather.collective) == (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        assert scatter.cuts == gather.cuts == whole.cuts
        assert scatter.owners.tolist() == gather.owners.tolist() == whole.owners.tolist()
        assert len(scatter.transfers) + len(gather.transfers) == len(whole.transfers)
        assert not len(gather.transfers) or gather.transfers.step[0] == 0


def test_what_has_no_owners_cannot_be_split():
    for schedule in (
        PLANNERS["recursive_doubling"].plan(Topology.flat(4), Collective.ALL_REDUCE),
        plan_tree(Topology.flat(4), Collective.ALL_GATHER),
    ):
        assert split_at_owners(schedule.draft) is None


def test_owned_runs_are_merged():
    schedule = plan_tree(balanced_tree([2, 1]), Collective.REDUCE_SCATTER)
    assert schedule.cuts == (0, 1, 2, 3, 4)
    assert schedule.owners.tolist() == [[0, 2, 1, 2]]
    assert [schedule.owned(rank) for rank in range(3)] == [((0, 1),), ((2, 3),), ((1, 2), (3, 4))]
    single = plan_tree(Topology.flat(1), Collective.REDUCE_SCATTER)
    assert single.owned(0) == ((0, 1),)


def test_offsets_are_floored_and_never_padded():
    schedule = plan_tree(Topology.flat(3), Collective.REDUCE_SCATTER)
    assert [schedule.offsets(n) for n in (0, 1, 2, 7)] == [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 2), (0, 2, 4, 7)]


def test_description_and_columns():
    schedule = plan_tree(Topology.flat(2), Collective.ALL_REDUCE)
    assert repr(schedule).startswith("<Schedule tree all_reduce of 2 ranks, 2 atoms, 4 transfers in 2 steps, ")
    with pytest.raises(ValueError, match="read-only"):
        schedule.transfers.src[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        schedule.owners[0, 0] = 1
