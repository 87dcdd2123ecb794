"""What stays in memory: the next things that are needed, up to the budget, and what two phases need beside it."""

from __future__ import annotations

from syncline.updates.phased.instructions import Fetch, Forget, Kind, Phase, Remove, Spill
from syncline.updates.phased.kept_inputs import KeptInputs, needs


def forward(micro: int, stage: int = 1) -> Phase:
    return Phase(Kind.FORWARD, stage, micro)


def backward(micro: int, stage: int = 1) -> Phase:
    return Phase(Kind.BACKWARD, stage, micro)


def test_what_phases_need() -> None:
    assert needs(forward(2)) == (forward(2),)
    assert needs(forward(2, stage=0)) == ()
    assert needs(Phase(Kind.LOSS, 3)) == (Phase(Kind.LOSS, 3),)
    assert needs(backward(1)) == (forward(1), backward(1))
    assert needs(backward(1, stage=0)) == (backward(1, stage=0),)


def test_without_a_budget_all_stays() -> None:
    inputs = KeptInputs(None)
    for micro in range(9):
        inputs.arrived(forward(micro), 1000)
    assert inputs.go_on([forward(micro) for micro in range(9)]) == []
    assert inputs.has_room
    assert inputs.peak_bytes == 9000
    assert inputs.used(forward(0), keeps_input=False) == [Forget(forward(0))]
    assert not inputs.is_empty


def test_the_last_that_is_needed_is_spilled_and_the_next_is_fetched_before_its_phase() -> None:
    inputs = KeptInputs(10)
    order = [forward(micro) for micro in range(5)]
    for micro in range(4):
        inputs.arrived(forward(micro), 10)
    assert inputs.go_on(order) == [Spill(forward(3))]  # 0 and 1 are not counted, 2 fills the budget
    assert not inputs.has_room
    assert inputs.spilled(forward(3)) == []
    assert inputs.go_on(order) == [Forget(forward(3))]
    assert inputs.has_room
    assert not inputs.is_ready(forward(3))
    assert inputs.has_arrived(forward(3))
    assert inputs.used(forward(0), keeps_input=False) == [Forget(forward(0))]
    assert inputs.go_on(order[1:]) == [Fetch(forward(3))]
    inputs.fetched(forward(3))
    assert inputs.is_ready(forward(3))
    for micro in range(1, 4):
        released = inputs.used(forward(micro), keeps_input=False)
    assert released == [Forget(forward(3)), Remove(forward(3))]
    assert inputs.is_empty


def test_what_comes_back_is_not_written_again() -> None:
    inputs = KeptInputs(0)
    inputs.arrived(forward(0), 10)
    later = [backward(micro) for micro in (3, 2, 1, 0)]
    assert inputs.go_on(later) == [Spill(forward(0))]
    inputs.spilled(forward(0))
    assert inputs.go_on(later) == [Forget(forward(0))]
    assert inputs.go_on(later[2:]) == [Fetch(forward(0))]
    inputs.fetched(forward(0))
    assert inputs.go_on(later) == [Forget(forward(0))]


def test_what_was_used_while_it_is_written_is_removed_afterwards() -> None:
    inputs = KeptInputs(0)
    inputs.arrived(forward(0), 10)
    assert inputs.go_on([forward(2), forward(1), forward(0)]) == [Spill(forward(0))]
    assert inputs.is_ready(forward(0))
    assert inputs.used(forward(0), keeps_input=False) == []
    assert inputs.go_on([forward(2)]) == []
    assert not inputs.is_empty
    assert inputs.spilled(forward(0)) == [Forget(forward(0)), Remove(forward(0))]
    assert inputs.is_empty
