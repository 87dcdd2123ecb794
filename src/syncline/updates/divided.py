"""Combined gradients of which each rank holds its own part alone: norms, scaling, and a check for infinities.

Each of them costs one small sum over all ranks; the gradients themselves stay where they are. Scaling is only noted
here, and applied when the shards are stepped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from syncline.errors import UpdateError
from syncline.updates.control import ControlStream
from syncline.updates.shard import Shard


class DividedGradients:
    """The combined gradients of one step, after :meth:`begin_step` and until the step.

    ``num_parameters`` counts the parameters in buckets; positions run below it.
    """

    def __init__(self, shards: Sequence[Shard], control: ControlStream, *, num_parameters: int) -> None:
        self._shards = tuple(shards)
        self._control = control
        self._norms: dict[float, torch.Tensor] = {}
        self.scales = [1.0] * num_parameters

    def begin_step(self, correction: float) -> None:
        """Begin with combined gradients that ``correction`` turns into the mean over samples."""
        self.scales = [correction] * len(self.scales)
        self._norms.clear()

    def scale(self, factor: float, positions: Iterable[int] | None = None) -> None:
        """Multiply the gradients of some parameters, or of all; every rank calls this alike."""
        for position in range(len(self.scales)) if positions is None else positions:
            self.scales[position] *= factor
        self._norms.clear()

    def norms(self, norm_type: float) -> torch.Tensor:
        """Return the norm of each parameter's gradient (float64, by position): one sum over all ranks for all."""
        if norm_type not in self._norms:
            powers = self._own_powers(norm_type)
            if math.isinf(norm_type):
                table = torch.zeros(self._control.world_size, len(powers), dtype=torch.float64)
                table[self._control.rank] = powers
                self._norms[norm_type] = self._control.sum(table, "largest gradients").amax(0)
            else:
                self._norms[norm_type] = self._control.sum(powers, "norms of gradients") ** (1.0 / norm_type)
        return self._norms[norm_type]

    def total_norm(self, norm_type: float) -> float:
        """Return the norm of all gradients as one vector, from one number of each rank."""
        powers = self._own_powers(norm_type)
        if math.isinf(norm_type):
            own = float(powers.amax()) if len(powers) else 0.0
            largest = self._control.gather_numbers(own, "largest gradient")
            return float(torch.tensor(largest, dtype=torch.float64).amax())  # unlike max(), it lets NaN through
        total = self._control.sum(powers.sum().reshape(1), "norm of gradients")
        return float(total[0] ** (1.0 / norm_type))

    def has_nonfinite(self, positions: Iterable[int]) -> bool:
        """Whether any of these parameters has an infinity or a NaN in its gradient; the same answer on all ranks."""
        wanted = frozenset(positions)
        own = any(
            segment.slot.position in wanted and not bool(torch.isfinite(gradient).all())
            for shard in self._shards
            for segment, gradient in shard.gradients()
        )
        return any(self._control.gather_numbers(float(own), "check for infinite gradients"))

    def _own_powers(self, norm_type: float) -> torch.Tensor:
        """Sum the absolute values of the owned elements to the power ``norm_type``; their largest for infinity."""
        if not norm_type > 0:
            raise UpdateError(f"norm_type must be positive, or infinity, not {norm_type}; 2.0 is the usual one")
        powers = torch.zeros(len(self.scales), dtype=torch.float64)
        for shard in self._shards:
            for segment, gradient in shard.gradients():
                position = segment.slot.position
                part = torch.linalg.vector_norm(gradient, norm_type, dtype=_wide(gradient.dtype)).cpu()
                part = part * abs(self.scales[position])
                if math.isinf(norm_type):
                    powers[position] = torch.maximum(powers[position], part)
                else:
                    powers[position] += part**norm_type
        return powers


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64
