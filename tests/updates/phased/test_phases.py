"""The order of phases, without network, disk or time of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pair_clock import Costs, PairClock, Side

from syncline.updates.phased.phases import (
    Compute,
    Drop,
    Kind,
    Load,
    LoadState,
    Pass,
    Phase,
    Phases,
    Reduce,
    Send,
    Store,
    Update,
)

TRAIN, EVALUATE = Pass.TRAIN, Pass.EVALUATE


def forward(stage: int) -> Phase:
    return Phase(Kind.FORWARD, stage)


def loss_phase(stage: int) -> Phase:
    return Phase(Kind.LOSS, stage)


def backward(stage: int) -> Phase:
    return Phase(Kind.BACKWARD, stage)


def whole_pass(kind: Pass, num_stages: int) -> list[Phase]:
    if kind is EVALUATE:
        return [forward(stage) for stage in range(num_stages)]
    last = num_stages - 1
    return [forward(k) for k in range(last)] + [loss_phase(last)] + [backward(k) for k in reversed(range(last))]


def check_order(clock: PairClock, passes: list[Pass], side: Side) -> None:
    """Each rank computes its own phases in order, and (the clock saw to it) not before it has what it needs."""
    expected = [phase for kind in passes for phase in whole_pass(kind, side.phases.num_stages)]
    assert [one.phase for one in side.done if isinstance(one, Compute)] == [
        phase for phase in expected if phase.stage % 2 == side.phases.side
    ]
    if EVALUATE not in passes:  # nobody waits for the end of a forward pass alone
        assert clock.computed == expected


def test_one_step_of_four_stages_at_the_first_rank() -> None:
    phases = Phases(num_stages=4, side=0)
    assert phases.start() == [Load(0), Load(2)]
    assert phases.begin(TRAIN) == []
    assert phases.loaded(0) == [Compute(forward(0))]
    assert phases.computed(forward(0), TRAIN) == [Send(forward(1))]
    assert phases.loaded(2) == []
    assert phases.arrived(forward(2)) == [Compute(forward(2))]
    assert phases.computed(forward(2), TRAIN) == [Send(loss_phase(3))]
    assert phases.arrived(backward(2)) == [LoadState(2), Compute(backward(2))]
    assert phases.state_loaded(2) == []
    assert phases.computed(backward(2), TRAIN) == [Send(backward(1)), Reduce(2)]
    assert phases.reduced(2) == [Update(2)]
    assert phases.arrived(backward(0)) == [LoadState(0), Compute(backward(0))]
    assert phases.updated(2) == [Store(2)]
    assert phases.computed(backward(0), TRAIN) == [Reduce(0)]
    assert phases.is_idle
    assert not phases.is_settled
    assert phases.reduced(0) == []
    assert phases.state_loaded(0) == [Update(0)]
    assert phases.stored(2) == []
    assert phases.begin(TRAIN) == []  # stage 0 is being updated
    assert phases.awaited() == ["update"]
    assert phases.updated(0) == [Store(0), Compute(forward(0))]  # reading what is stored does no harm


def test_room_is_made_once_the_stage_is_stored() -> None:
    phases = Phases(num_stages=6, side=0)
    phases.start()
    phases.begin(TRAIN)
    phases.loaded(0)
    phases.loaded(2)
    assert phases.computed(forward(0), TRAIN) == [Send(forward(1)), Drop(0), Load(4)]
    phases.arrived(forward(2))
    phases.computed(forward(2), TRAIN)
    phases.loaded(4)
    phases.arrived(forward(4))
    assert phases.computed(forward(4), TRAIN) == [Send(loss_phase(5))]  # 4 and 2 are what the way back begins with
    phases.arrived(backward(4))
    phases.state_loaded(4)
    phases.computed(backward(4), TRAIN)
    phases.reduced(4)
    assert phases.updated(4) == [Store(4)]
    assert phases.stored(4) == [Drop(4), Load(0)]


def test_no_update_writes_to_memory_that_is_being_stored() -> None:
    phases = Phases(num_stages=2, side=1)
    phases.start()
    phases.loaded(1)
    for _ in range(2):
        phases.arrived(loss_phase(1))
        phases.begin(TRAIN)
        phases.state_loaded(1)
        phases.computed(loss_phase(1), TRAIN)
        done = phases.reduced(1)
        if done:
            assert done == [Update(1)]
            phases.updated(1)
    assert done == []
    assert phases.stored(1) == [Update(1)]


@pytest.mark.parametrize("max_stages", [1, 2, 3])
@pytest.mark.parametrize("num_stages", range(2, 13))
def test_any_number_of_stages_is_computed_in_order(num_stages: int, max_stages: int) -> None:
    passes = [TRAIN, EVALUATE, TRAIN, TRAIN, EVALUATE, EVALUATE, TRAIN]
    costs = Costs(state=0.3, store=0.7, reduce=0.2, update=0.1, send=0.05)
    clock = PairClock(num_stages, costs, passes, max_stages=max_stages).run()
    for side in clock.sides:
        check_order(clock, passes, side)
        assert side.most_held <= max_stages
        assert sum(isinstance(one, Store) for one in side.done) == 4 * len(side.phases.own_stages)


durations = st.lists(st.floats(0.0, 3.0), min_size=12, max_size=12)


@given(
    num_stages=st.integers(2, 12),
    max_stages=st.integers(1, 4),
    passes=st.lists(st.sampled_from([TRAIN, EVALUATE]), min_size=1, max_size=4),
    costs=st.tuples(*[durations] * 8),
)
def test_whatever_takes_how_long_nothing_is_stuck_and_memory_is_kept(
    num_stages: int, max_stages: int, passes: list[Pass], costs: tuple[list[float], ...]
) -> None:
    names = ("forward", "backward", "load", "state", "store", "reduce", "update", "send")
    tables = {name: table.__getitem__ for name, table in zip(names, costs, strict=True)}
    clock = PairClock(num_stages, Costs(**tables), passes, max_stages=max_stages).run()
    for side in clock.sides:
        check_order(clock, passes, side)
        assert side.most_held <= max_stages
        check_files(side.done)


def check_files(done: list[object]) -> None:
    """A stage is read and written in turn, and what was updated is stored before its memory is given away."""
    held: set[int] = set()
    unsaved: set[int] = set()
    for one in done:
        match one:
            case Load(stage):
                assert stage not in held | unsaved
                held.add(stage)
            case Drop(stage):
                assert stage in held - unsaved
                held.remove(stage)
            case Update(stage):
                assert stage in held - unsaved
                unsaved.add(stage)
            case Store(stage):
                assert stage in unsaved
                unsaved.remove(stage)
            case Compute(phase):
                assert phase.stage in held - unsaved


def step_seconds(num_stages: int, costs: Costs) -> float:
    """Seconds of a step in the long run."""
    short, long = (PairClock(num_stages, costs, [TRAIN] * count).run().time_s for count in (2, 6))
    return (long - short) / 4


@pytest.mark.parametrize("num_stages", [8, 9, 16])
def test_loading_as_long_as_computing_hides_behind_it(num_stages: int) -> None:
    """Each load takes as long as the phase that it is for: load-then-compute takes twice the computing."""
    costs = Costs(forward=1.0, backward=0.0, load=1.0)
    computing = 2 * num_stages - 1
    load_then_compute = 2 * computing
    assert step_seconds(num_stages, costs) <= 0.6 * load_then_compute
    assert step_seconds(num_stages, costs) == pytest.approx(computing)


@pytest.mark.parametrize("num_stages", [8, 16])
def test_all_storage_as_long_as_all_computing_hides_behind_it(num_stages: int) -> None:
    """State and stores count too: forward 1, backward 2; a rank alone loads twice, and loads and stores state once."""
    costs = Costs(forward=1.0, backward=1.0, load=0.5, state=0.5, store=1.5)
    computing = num_stages * 3 - 1
    load_then_compute = computing + num_stages * (0.5 + 0.5 + 0.5 + 1.5)
    assert step_seconds(num_stages, costs) <= 0.6 * load_then_compute


def test_a_slow_disk_is_two_slow_disks() -> None:
    """Where storage takes longer than computing, both ranks load at once, in each other's turns and in their own."""
    one_disk = 2 * 8 * 2.0
    assert step_seconds(8, Costs(forward=1.0, backward=0.0, load=2.0)) <= 0.6 * one_disk
