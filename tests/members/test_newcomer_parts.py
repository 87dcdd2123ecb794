"""Pure parts of growth: what a job knows of itself, one attempt, and who gives newcomers what they lack."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from syncline.errors import TopologyError
from syncline.members.job_record import Attempt, JobRecord, Newcomer
from syncline.pytorch.epochs import choose_sources
from syncline.topology import Topology

RACKS = Topology.load("two-racks-5-3")


def racks() -> JobRecord:
    machines = [RACKS.host_of(rank).name for rank in range(8)]
    return JobRecord.first(RACKS, machines=machines, join_addresses=[(name, 7) for name in machines])


def comer(machine: str, topology: str | None = None) -> Newcomer:
    return Newcomer(machine=machine, join_address=(machine, 8), topology=topology)


def test_a_machine_that_is_back_has_its_place_and_a_new_number() -> None:
    smaller = racks().without([0, 6])
    assert smaller.topology == RACKS.restricted([1, 2, 3, 4, 5, 7])
    larger = smaller.grown([comer("h6"), comer("h0")])
    assert larger.numbers == (1, 2, 3, 4, 5, 7, 8, 9)
    assert larger.topology == RACKS.restricted([1, 2, 3, 4, 5, 7, 6, 0])
    assert (larger.epoch, larger.next_number) == (2, 10)
    assert larger.join_addresses[-2:] == (("h6", 8), ("h0", 8))
    assert larger.without([6]).grown([comer("h6")]).numbers == (1, 2, 3, 4, 5, 7, 9, 10)


def test_a_newcomer_may_bring_the_tree_of_the_larger_job() -> None:
    tree = Topology.parse("{switch: s, children: [{host: 'h[0-1]', uplink: 1 Gbit/s}, {host: x, uplink: 9 Gbit/s}]}")
    larger = racks().without(range(2, 8)).grown([comer("x", tree.to_yaml())])
    assert larger.topology == tree
    with pytest.raises(TopologyError, match=r"has 3 ranks but the job has 9|3 ranks"):
        racks().grown([comer("x", tree.to_yaml())])


@given(st.lists(st.lists(st.integers(0, 7), max_size=3) | st.lists(st.sampled_from(["h1", "h7", "new"]), max_size=3)))
def test_records_stay_whole_whatever_happens(changes: list[list[int] | list[str]]) -> None:
    job, numbers = racks(), set(range(8))
    for change in changes:
        lost = {rank for rank in change if isinstance(rank, int) and rank < job.world_size}
        if len(lost) < job.world_size:
            job = job.without(lost)
        job = job.grown([comer(name) for name in change if isinstance(name, str)])
        new = set(job.numbers) - numbers
        assert all(number >= max(numbers) for number in new)
        numbers |= new
        assert job.topology.num_ranks == job.world_size == len(set(job.places)) == len(set(job.numbers))
        assert [job.topology.host_of(rank).name for rank in range(job.world_size)] == list(job.machines)
        assert JobRecord.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_an_attempt_is_connected_when_all_are() -> None:
    attempt = Attempt(number=3, job=racks().without(range(1, 8)).grown([comer("h1")]))
    assert not attempt.listens(0, ["h0", "a", 1])
    assert attempt.describe_missing() == "rank 1 of the larger job did not come"
    assert attempt.listens(1, ["h1", "b", 2])
    assert attempt.generation()["members"] == [["h0", "a", 1], ["h1", "b", 2]]
    assert not attempt.connected(1)
    assert attempt.describe_missing() == "rank 0 did not connect to all others"
    assert attempt.connected(0)
    assert attempt.is_connected


@given(st.sets(st.integers(0, 7), min_size=1, max_size=7))
def test_what_newcomers_need_crosses_each_link_once(holders: set[int]) -> None:
    lacking = sorted(set(range(8)) - holders)
    sources = choose_sources(RACKS, holders, lacking)
    assert sorted(rank for served in sources.values() for rank in served) == lacking
    crossed = [
        str(link)
        for source, served in sources.items()
        for link in {link for rank in served for link in RACKS.route(source, rank)}
        if link.direction == "down"
    ]
    assert len(crossed) == len(set(crossed))


def test_newcomers_of_a_group_take_from_a_member_of_it_or_all_from_one() -> None:
    """Nearer members of other groups have something else to give."""
    groups = ((0, 4, 6), (1, 5), (2, 3, 7))
    assert choose_sources(RACKS, (0, 1, 5), (2, 3, 4, 6, 7), groups=groups) == {0: (2, 3, 4, 6, 7)}
    assert choose_sources(RACKS, (0, 1, 5), (2, 7, 6), groups=((0, 1), (5, 6), (2, 7))) == {0: (2, 7), 5: (6,)}
