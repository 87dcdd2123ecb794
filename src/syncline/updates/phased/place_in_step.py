"""Where a rank of a pair was when another was lost: the step and the stage, as its error tells them."""

from __future__ import annotations

from syncline.errors import PeerLostError
from syncline.updates.phased.instructions import Pass
from syncline.updates.phased.phase_work import CurrentPass
from syncline.updates.phased.phases import Phases


def with_place(error: PeerLostError, rank: int, current: CurrentPass | None, phases: Phases) -> PeerLostError:
    """Return the same error, which says besides where ``rank`` was in training.

    ``current``: the pass that is under way there, if any is. Steps are counted as the trainer counts them, those before
    a restart included.
    """
    place = f"after step {phases.step}"
    if current is not None:
        call = f"step {current.step}" if current.kind is Pass.TRAIN else f"evaluate() after step {phases.step}"
        phase = phases.current_phase
        place = f"in {call}, at the {phase}" if phase is not None else f"at the end of {call}"
    return PeerLostError(f"{error}; rank {rank} was {place}", rank=error.rank, host=error.host)
