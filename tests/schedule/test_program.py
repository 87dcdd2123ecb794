"""One rank's part: phases in order, numbered messages, and the receives that must wait for a send."""

import pytest
from hypothesis import given, settings as effort, strategies as st
from schedule_trees import trees

from syncline.errors import ScheduleError
from syncline.schedule import (
    PLANNERS,
    Collective,
    Phase,
    Receive,
    Send,
    plan_tree,
)
from syncline.topology import Topology

PAIRS = [(planner, collective) for planner in PLANNERS.values() for collective in sorted(planner.collectives)]


def test_two_ranks():
    program = plan_tree(Topology.flat(2), Collective.ALL_REDUCE).program(0)
    assert program == (
        Phase(step=0, sends=(Send(1, 1, 2, 0),), receives=(Receive(1, 0, 1, 0, True),)),
        Phase(step=1, sends=(Send(1, 0, 1, 1),), receives=(Receive(1, 1, 2, 1, False),)),
    )


@effort(max_examples=15)
@given(st.sampled_from(PAIRS), trees(max_ranks=12))
def test_sends_and_receives_match_one_to_one(pair, topology):
    planner, collective = pair
    schedule = planner.plan(topology, collective)
    sends, receives = {}, {}
    for rank in range(schedule.num_ranks):
        program = schedule.program(rank)
        steps = [phase.step for phase in program]
        assert steps == sorted(set(steps))
        for phase in program:
            adders = [receive.peer for receive in phase.receives if receive.add]
            assert adders == sorted(adders)
            for send in phase.sends:
                sends[rank, send.peer, send.index] = (phase.step, send.first, send.last)
            for receive in phase.receives:
                receives[receive.peer, rank, receive.index] = (phase.step, receive.first, receive.last)
    assert sends == receives
    assert len(sends) == len(schedule.transfers)
    for src, dst, index in sends:
        assert index == 0 or (src, dst, index - 1) in sends


def test_programs_are_cached_and_ranks_checked():
    schedule = plan_tree(Topology.flat(3), Collective.BROADCAST)
    assert schedule.program(1) is schedule.program(1)
    with pytest.raises(ScheduleError, match="ranks 0 to 2, not 3"):
        schedule.program(3)
