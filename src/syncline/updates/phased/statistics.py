"""What a rank of a phased model counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasedStatistics:
    """Counters of one rank since its model was set up; times in seconds."""

    side: int
    """Which stages it computes: 0 those of even number, 1 the others."""
    partner: int
    num_steps: int
    computing_s: float
    waiting_s: Mapping[str, float]
    """Time that the training thread waited, by what came last: ``"input"`` from the partner, ``"parameters"`` or a
    ``"spilled input"`` from storage, the ``"update"`` of the step before, or ``"sending"``: the partner had no room."""
    measurement_s: float
    writing_s: float
    read_bytes: int
    written_bytes: int
    sent_bytes: int
    """Activations and their gradients, to the partner."""
    spilled_bytes: int
    """Inputs of stages that were written to storage, because memory was to have no more than their budget."""
    num_loads: int
    gradient_norm: float | None
    """Of the last step whose norm is known, before it was clipped; None without clipping."""
    largest_stage_bytes: int
    peak_parameter_bytes: int
    """Most bytes of parameters that had memory at once."""
    peak_gradient_bytes: int
    peak_input_bytes: int
    """Most bytes of inputs that waited in memory for their phase."""
    peak_state_bytes: int
    """Most bytes of optimizer state in memory at once."""
