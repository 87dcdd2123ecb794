"""What the error of a lost rank says of where another was: in a stage of a step, at its end, or between two steps."""

from __future__ import annotations

import pytest

from syncline.errors import PeerLostError
from syncline.updates.phased.driver import with_place
from syncline.updates.phased.instructions import Pass
from syncline.updates.phased.phase_work import CurrentPass
from syncline.updates.phased.phases import Phases


@pytest.mark.parametrize(
    ("kind", "is_begun", "place"),
    [
        (None, False, "after step 7"),
        (Pass.TRAIN, True, "in step 8, at the forward of stage 0"),
        (Pass.TRAIN, False, "at the end of step 7"),
        (Pass.EVALUATE, True, "in evaluate() after step 7, at the forward of stage 0"),
    ],
)
def test_the_error_of_a_lost_rank_says_where_this_one_was(kind: Pass | None, is_begun: bool, place: str) -> None:
    phases = Phases(num_stages=4, side=0, step=7)
    if is_begun and kind is not None:
        phases.begin(kind)
    current = None
    if kind is not None:
        current = CurrentPass(kind=kind, number=1, step=phases.step, micros=(), targets=None, num_samples=1.0)
    told = with_place(PeerLostError("rank 1 (host b) is lost", rank=1, host="b"), 0, current, phases)
    assert str(told) == f"rank 1 (host b) is lost; rank 0 was {place}"
    assert (told.rank, told.host) == (1, "b")
