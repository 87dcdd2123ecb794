"""The order of phases, without network, disk or time of its own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st
from pair_clock import Costs, PairClock, Side

from syncline.updates.phased.instructions import (
    Commit,
    Compute,
    Drop,
    Forget,
    Kind,
    Load,
    LoadGradients,
    LoadState,
    Pass,
    Phase,
    Reduce,
    Send,
    Store,
    StoreGradients,
    SumNorm,
    Update,
)
from syncline.updates.phased.kept_inputs import NUM_NEXT
from syncline.updates.phased.phases import Phases

TRAIN, EVALUATE = Pass.TRAIN, Pass.EVALUATE


def forward(stage: int, micro: int = 0) -> Phase:
    return Phase(Kind.FORWARD, stage, micro)


def loss_phase(stage: int) -> Phase:
    return Phase(Kind.LOSS, stage)


def backward(stage: int, micro: int = 0) -> Phase:
    return Phase(Kind.BACKWARD, stage, micro)


def whole_pass(kind: Pass, num_stages: int, num_micros: int = 1) -> list[Phase]:
    last = num_stages - 1
    visits = [(Kind.FORWARD, stage) for stage in range(num_stages if kind is EVALUATE else last)]
    if kind is TRAIN:
        visits += [(Kind.LOSS, last), *((Kind.BACKWARD, stage) for stage in reversed(range(last)))]
    return [Phase(what, stage, micro) for what, stage in visits for micro in range(num_micros)]


def check_order(clock: PairClock, passes: list[Pass], side: Side) -> None:
    """Each rank computes its own phases in order, and (the clock saw to it) not before it has what it needs."""
    expected = [phase for kind in passes for phase in whole_pass(kind, side.phases.num_stages, clock.num_micros)]
    assert [one.phase for one in side.done if isinstance(one, Compute)] == [
        phase for phase in expected if phase.stage % 2 == side.phases.side
    ]
    if (
        EVALUATE not in passes and clock.num_micros == 1 and len(clock.sides) == 2
    ):  # nobody waits for the end of a forward pass alone
        assert clock.computed == expected


def test_one_step_of_four_stages_at_the_first_rank() -> None:
    phases = Phases(num_stages=4, side=0)
    assert phases.start() == [Load(0), Load(2)]
    assert phases.begin(TRAIN) == []
    assert phases.done(Load(0)) == [Compute(forward(0))]
    assert phases.computed(forward(0)) == [Send(forward(1))]
    assert phases.done(Load(2)) == []
    assert phases.arrived(forward(2)) == [Compute(forward(2))]
    assert phases.computed(forward(2)) == [Send(loss_phase(3))]
    assert phases.arrived(backward(2)) == [LoadState(2), Compute(backward(2))]
    assert phases.done(LoadState(2)) == []
    assert phases.computed(backward(2)) == [Send(backward(1)), Forget(forward(2)), Forget(backward(2)), Reduce(2)]
    assert phases.done(Reduce(2)) == [Update(2)]
    assert phases.arrived(backward(0)) == [LoadState(0), Compute(backward(0))]
    assert phases.done(Update(2)) == [Store(2)]
    assert phases.computed(backward(0)) == [Forget(backward(0)), Reduce(0)]
    assert phases.is_idle
    assert not phases.is_settled
    assert phases.done(Reduce(0)) == []
    assert phases.done(LoadState(0)) == [Update(0)]
    assert phases.done(Store(2)) == []
    assert phases.begin(TRAIN) == []  # stage 0 is being updated
    assert phases.awaited() == ["update"]
    assert phases.done(Update(0)) == [Store(0), Compute(forward(0))]  # reading what is stored does no harm


def test_room_is_made_once_the_stage_is_stored() -> None:
    phases = Phases(num_stages=6, side=0)
    phases.start()
    phases.begin(TRAIN)
    phases.done(Load(0))
    phases.done(Load(2))
    assert phases.computed(forward(0)) == [Send(forward(1)), Drop(0), Load(4)]
    phases.arrived(forward(2))
    phases.computed(forward(2))
    phases.done(Load(4))
    phases.arrived(forward(4))
    assert phases.computed(forward(4)) == [Send(loss_phase(5))]  # 4 and 2 are what the way back begins with
    phases.arrived(backward(4))
    phases.done(LoadState(4))
    phases.computed(backward(4))
    phases.done(Reduce(4))
    assert phases.done(Update(4)) == [Store(4)]
    assert phases.done(Store(4)) == [Drop(4), Load(0)]


def test_no_update_writes_to_memory_that_is_being_stored() -> None:
    phases = Phases(num_stages=2, side=1)
    phases.start()
    phases.done(Load(1))
    for _ in range(2):
        phases.begin(TRAIN)
        phases.arrived(loss_phase(1))
        phases.done(LoadState(1))
        phases.computed(loss_phase(1))
        done = phases.done(Reduce(1))
        if done:
            assert done == [Update(1)]
            phases.done(Update(1))
    assert done == []
    assert phases.done(Store(1)) == [Update(1)]


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
NAMES = ("forward", "backward", "load", "state", "store", "reduce", "update", "send", "gradients", "spill", "commit")


@given(
    num_stages=st.integers(2, 12),
    max_stages=st.integers(1, 4),
    num_micros=st.integers(1, 6),
    num_pairs=st.integers(1, 3),
    budget=st.one_of(st.none(), st.integers(0, 20)),
    defers=st.booleans(),
    versions=st.booleans(),
    passes=st.lists(st.sampled_from([TRAIN, EVALUATE]), min_size=1, max_size=4),
    costs=st.tuples(*[durations] * len(NAMES)),
)
def test_whatever_takes_how_long_nothing_is_stuck_and_memory_is_kept(
    num_stages: int,
    max_stages: int,
    num_micros: int,
    num_pairs: int,
    budget: int | None,
    defers: bool,
    versions: bool,
    passes: list[Pass],
    costs: tuple[list[float], ...],
) -> None:
    tables = {name: table.__getitem__ for name, table in zip(NAMES, costs, strict=True)}
    clock = PairClock(
        num_stages,
        Costs(**tables),
        passes,
        num_micros=num_micros,
        num_pairs=num_pairs,
        size=lambda stage: 1 + stage % 3,
        max_stages=max_stages,
        input_budget_bytes=budget,
        defers_updates=defers,
        keeps_versions=versions,
    ).run()
    for side in clock.sides:
        check_order(clock, passes, side)
        assert side.most_held <= max_stages
        check_files(side.done)
        check_steps(side.done, side.phases.own_stages, defers=defers, versions=versions)
        if budget is not None:
            largest = 3
            assert side.phases.inputs.peak_bytes <= budget + largest * (2 * NUM_NEXT + 1)


def check_steps(done: list[object], own: tuple[int, ...], *, defers: bool, versions: bool) -> None:
    """Nothing is updated before the norm of its step is known, or stored before the step before it is committed."""
    num_reduced = num_sums = num_stores = 0
    for one in done:
        match one:
            case Reduce():
                num_reduced += 1
            case SumNorm():
                num_sums += 1
                assert num_reduced == num_sums * len(own)
            case Update() if defers:
                assert num_sums * len(own) == num_reduced
            case Store():
                num_stores += 1
            case Commit(step) if versions:
                assert num_stores == step * len(own)
    assert num_sums == (num_reduced // len(own) if defers else 0)
    if versions:
        assert [one.step for one in done if isinstance(one, Commit)] == list(range(1, num_stores // len(own) + 1))


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


def test_all_micro_batches_go_through_a_stage_each_time_it_is_loaded() -> None:
    phases = Phases(num_stages=6, side=0)
    phases.start()
    phases.done(Load(0))
    phases.done(Load(2))
    assert phases.begin(TRAIN, 2) == [Compute(forward(0))]
    assert phases.computed(forward(0)) == [Send(forward(1)), Compute(forward(0, 1))]
    assert phases.arrived(forward(2)) == []
    assert phases.computed(forward(0, 1)) == [Send(forward(1, 1)), Compute(forward(2)), Drop(0), Load(4)]
    phases.arrived(forward(2, 1))
    phases.computed(forward(2))
    phases.computed(forward(2, 1))
    phases.done(Load(4))
    for micro in range(2):
        phases.arrived(forward(4, micro))
        phases.computed(forward(4, micro))
    assert phases.arrived(backward(4)) == [LoadState(4), Compute(backward(4))]
    sent = phases.computed(backward(4))
    assert Reduce(4) not in sent
    assert phases.arrived(backward(4, 1)) == [Compute(backward(4, 1))]
    assert Reduce(4) in phases.computed(backward(4, 1))


def test_a_deferred_update_waits_for_the_norm_and_its_gradients_are_stored() -> None:
    phases = Phases(num_stages=4, side=1, max_stages=1, defers_updates=True)
    assert phases.start() == [Load(1)]
    phases.begin(TRAIN)
    phases.done(Load(1))
    phases.arrived(forward(1))
    assert phases.computed(forward(1)) == [Send(forward(2)), Drop(1), Load(3)]
    phases.done(Load(3))
    assert phases.arrived(loss_phase(3)) == [Compute(loss_phase(3))]
    phases.computed(loss_phase(3))
    assert phases.done(Reduce(3)) == [StoreGradients(3)]
    assert phases.done(StoreGradients(3)) == [Drop(3), Load(1)]
    phases.done(Load(1))
    phases.arrived(backward(1))
    phases.computed(backward(1))
    assert phases.done(Reduce(1)) == [StoreGradients(1), SumNorm()]
    assert phases.done(StoreGradients(1)) == [LoadState(1), LoadGradients(1)]
    phases.done(LoadState(1))
    assert phases.done(LoadGradients(1)) == []
    assert phases.done(SumNorm()) == [Update(1)]
    assert phases.done(Update(1)) == [Store(1)]
    assert phases.done(Store(1)) == [Drop(1), Load(3)]
    assert phases.done(Load(3)) == [LoadState(3), LoadGradients(3)]
    phases.begin(TRAIN)
    assert phases.awaited() == ["input", "parameters"]
    phases.done(LoadState(3))
    assert phases.done(LoadGradients(3)) == [Update(3)]


def test_deferred_updates_are_made_in_forward_order_whichever_gradients_are_stored_first() -> None:
    """In any other order two pairs may fill their places with different stages, and wait for each other."""
    phases = Phases(num_stages=6, side=0, defers_updates=True)
    phases.start()
    phases.begin(TRAIN)
    phases.done(Load(0))
    phases.done(Load(2))
    phases.computed(forward(0))
    phases.arrived(forward(2))
    phases.computed(forward(2))
    phases.done(Load(4))
    phases.arrived(forward(4))
    phases.computed(forward(4))
    for stage in (4, 2):
        phases.arrived(backward(stage))
        phases.computed(backward(stage))
    phases.done(Reduce(4))
    phases.done(Reduce(2))
    assert phases.done(StoreGradients(4)) == []  # though it is wanted after stage 0
    assert phases.done(StoreGradients(2)) == [Drop(4), Load(0)]
    phases.done(Load(0))
    phases.arrived(backward(0))
    phases.computed(backward(0))
    phases.done(Reduce(0))
    begun = phases.done(StoreGradients(0))
    assert begun == [LoadState(0), LoadGradients(0), LoadState(2), LoadGradients(2)]


def test_a_step_is_stored_once_the_one_before_is_stored_on_all_ranks() -> None:
    phases = Phases(num_stages=2, side=1, keeps_versions=True, step=7)
    phases.start()
    phases.done(Load(1))
    done = []
    for _ in range(2):
        phases.begin(TRAIN)
        phases.arrived(loss_phase(1))
        phases.done(LoadState(1))
        phases.computed(loss_phase(1))
        assert phases.done(Reduce(1)) == [Update(1)]
        done.append(phases.done(Update(1)))
        done.append(phases.done(Store(1)) if done[-1] else [])
    assert done == [[Store(1)], [Commit(8)], [], []]
    assert not phases.is_settled
    phases.begin(TRAIN)
    assert phases.arrived(loss_phase(1)) == []
    assert phases.awaited() == ["update"]
    assert phases.done(Commit(8)) == [Store(1), LoadState(1), Compute(loss_phase(1))]
    phases.computed(loss_phase(1))
    assert phases.done(Store(1)) == [Commit(9)]  # not the step that was computed meanwhile
    assert not phases.is_settled
    phases.done(Commit(9))


def step_seconds(num_stages: int, costs: Costs, **options: Any) -> float:
    """Seconds of a step in the long run."""
    short, long = (PairClock(num_stages, costs, [TRAIN] * count, **options).run().time_s for count in (2, 6))
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


@pytest.mark.parametrize("num_stages", [8, 9, 16])
def test_with_four_micro_batches_both_ranks_compute_at_the_same_time(num_stages: int) -> None:
    """All storage of a step takes one disk as long as all its computing takes one rank, which then hides at best all.

    A stage is read twice and written once in a step: with a forward and a backward phase of 1, that is 3 for each
    micro-batch, so a third of it is 4 with four.
    """
    one_rank = 4 * (3 * num_stages - 1)
    several = Costs(forward=1.0, backward=1.0, load=4.0, store=4.0)
    assert one_rank / step_seconds(num_stages, several, num_micros=4) >= 1.8
    whole = Costs(forward=4.0, backward=4.0, load=4.0, store=4.0)
    assert one_rank / step_seconds(num_stages, whole) < 1.05  # with one, they take turns
