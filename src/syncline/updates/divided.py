"""Combined gradients of which each rank holds its own part alone: sums over passes, norms, scaling, checks.

They live from the first reduce-scatter of a backward pass until they are dropped. A further pass before that adds to
them, as ``p.grad`` adds up: the own parts of the passes before are set aside until the new ones have come. Norms and
checks cost one small sum over all ranks; the gradients themselves stay where they are. Scaling is only noted here, and
applied when the shards are stepped.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from syncline.errors import UpdateError
from syncline.runtime.work import Work
from syncline.tensors.memory import wide
from syncline.updates.bucket import Bucket
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.control import every_rank
from syncline.updates.peer_state import BESIDE, PeerState
from syncline.updates.report import PendingReport
from syncline.updates.shard import Segment, Shard

GRADIENT, SET_ASIDE = f"{BESIDE}gradient", f"{BESIDE}set aside"
"""What moves with optimizer state when other ranks come to own it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsOfStep:
    """What a step needs of the combined gradients, as they were when it was asked for."""

    report: PendingReport
    reductions: tuple[Work, ...]
    """By bucket."""
    scales: tuple[float, ...] | None
    """Factors by position, if something has looked at the gradients before; else the report's correction alone."""
    carried: tuple[bool, ...] | None
    """For each position, whether an earlier pass brought a gradient; None if there was no such pass."""
    dropped: frozenset[int]
    """Positions whose gradient the user dropped: they are not stepped."""

    def present(self) -> Sequence[bool]:
        """Return for each position whether it is stepped; waits for the report."""
        present: Sequence[bool] = self.report.present
        if self.carried is not None:
            present = [new or old for new, old in zip(present, self.carried, strict=True)]
        if self.dropped:
            present = [there and position not in self.dropped for position, there in enumerate(present)]
        return present

    def factors(self) -> Sequence[float]:
        """Return the factor of each position; waits for the report."""
        return self.scales or [self.report.correction] * len(self.report.present)


class DividedGradients:
    """The combined gradients of one model; ``num_parameters`` counts those in buckets, and positions run below it.

    ``is_counted``: whether this rank's elements count in sums over ranks; of several replicas, those of one do. What a
    rank is the spare of never counts.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        shards: Sequence[Shard],
        collectives: BucketCollectives,
        *,
        num_parameters: int,
        is_counted: bool = True,
    ) -> None:
        self._buckets = tuple(buckets)
        self._shards = tuple(shards)
        self._is_counted = is_counted
        self._control = collectives.control
        self._parts: dict[int, list[torch.Tensor]] = defaultdict(list)
        for shard in self._shards:
            for segment, gradient in shard.gradients():
                self._parts[segment.slot.position].append(gradient)
        self._reductions: dict[int, Work] = {}
        self._report: PendingReport | None = None
        self._scales = [1.0] * num_parameters
        self._is_inspected = False
        self._set_aside: dict[int, list[torch.Tensor]] | None = None
        self._carried: tuple[bool, ...] | None = None
        self._dropped: frozenset[int] = frozenset()
        self._is_handed_over = False
        self._norms: dict[float, torch.Tensor] = {}

    def begin_pass(self) -> None:
        """Make ready for the reduce-scatters of a pass."""
        if self._report is None and self._reductions:
            raise UpdateError("The last backward pass did not come to its end, so this rank cannot go on; restart it")
        assert self._report is None, "gradients of an earlier pass were carried or discarded"

    def add(self, bucket: Bucket, reduction: Work) -> None:
        """Take the reduce-scatter of a bucket."""
        self._reductions[bucket.index] = reduction

    def end_pass(self, report: PendingReport) -> None:
        """Take the pass's report; if earlier passes were carried, add them, which waits for this pass."""
        self._report = report
        self._is_inspected = self._is_handed_over = False
        if self._set_aside is None:
            return
        aside, self._set_aside = self._set_aside, None
        self.inspect()
        self.apply_scales()
        for position, parts in aside.items():
            for old, new in zip(parts, self._parts.get(position, ()), strict=True):
                new.add_(old)

    def carry(self, kept: Sequence[bool]) -> None:
        """Set the gradients of these positions aside, for the next pass to be added to; drop the others."""
        if self._report is None:
            return
        if not any(kept):
            self.discard()
            return
        self.inspect()
        self.apply_scales()
        carried = tuple(is_kept and is_there for is_kept, is_there in zip(kept, self.present, strict=True))
        aside = {position: [part.clone() for part in self._parts.get(position, ())] for position in _places(kept)}
        self.discard()
        self._set_aside, self._carried = aside, carried

    def discard(self) -> None:
        """Forget the gradients, once their memory is free again: a step that is under way sees to that itself."""
        if self._report is None and self._reductions:
            return  # of a pass that broke: the next one tells
        if self._report is not None and not self._is_handed_over:
            self.wait_reductions()
        self._reductions, self._report, self._is_inspected = {}, None, False
        self._set_aside = self._carried = None
        self._dropped = frozenset()

    def inspect(self) -> None:
        """Wait until the gradients are there."""
        if self._report is None:
            raise UpdateError("There are no combined gradients: norms, clipping and scaling come after backward()")
        if self._is_inspected:
            return
        self.wait_reductions()
        for bucket in self._buckets:
            bucket.unstage_gradients()
        self._scales = [self._report.correction] * len(self._scales)
        self._norms.clear()
        self._is_inspected = True

    def beside(self) -> Iterator[tuple[Segment, dict[str, torch.Tensor]]]:
        """Yield for each segment a copy of its combined gradient and what was set aside, as far as there are any."""
        places = Counter[int]()
        for shard in self._shards:
            for segment, gradient in shard.gradients():
                position, held = segment.slot.position, dict[str, torch.Tensor]()
                if self.is_combined:
                    held[GRADIENT] = gradient.clone()
                if self._set_aside is not None and position in self._set_aside:
                    held[SET_ASIDE] = self._set_aside[position][places[position]]
                places[position] += 1
                yield segment, held

    def move(self, shards: Sequence[Shard], source: PeerState | None) -> None:
        """Go on with other shards, whose gradients ``source`` has as far as there are any; None: they are lost."""
        self._shards, self._parts = tuple(shards), defaultdict(list)
        if source is None:
            self._set_aside = self._carried = None
        aside: dict[int, list[torch.Tensor]] = {position: [] for position in self._set_aside or ()}
        for shard in self._shards:
            for segment, gradient in shard.gradients():
                position = segment.slot.position
                self._parts[position].append(gradient)
                if source is None:
                    continue
                if self.is_combined:
                    source.copy(segment.part, GRADIENT, gradient)
                if position in aside:
                    aside[position].append(torch.empty_like(gradient))
                    source.copy(segment.part, SET_ASIDE, aside[position][-1])
        self._set_aside = None if self._set_aside is None else aside
        self._norms.clear()

    def forget_stepped(self) -> None:
        """Forget gradients that a step was made on: other ranks may have dropped them already."""
        if self._report is not None and self._is_handed_over:
            self.discard()

    @property
    def is_combined(self) -> bool:
        """Whether gradients are there, and were waited for."""
        return self._report is not None and self._is_inspected

    def drop(self, positions: Iterable[int]) -> None:
        """Leave these out of the steps on the gradients that are there."""
        self._dropped = frozenset(positions)

    def hand_over(self) -> GradientsOfStep:
        """Return what a step needs; from now on the scales are what the step has applied."""
        handed = self._of_step()
        self._scales = [1.0] * len(self._scales)
        self._norms.clear()
        self._is_inspected = self._is_handed_over = True
        return handed

    @property
    def present(self) -> Sequence[bool]:
        """For each position, whether a step would be made on it."""
        return self._of_step().present()

    def replace(self, present: Sequence[bool]) -> None:
        """Step on what is in the shards' gradients by now, of the parameters that are ``present`` (by position)."""
        self._carried, self._dropped = tuple(present), frozenset(_places([not there for there in present]))
        self._norms.clear()

    def apply_scales(self) -> None:
        """Multiply the own parts by the scales that were noted."""
        for shard in self._shards:
            shard.scale(self._scales)
        self._scales = [1.0] * len(self._scales)

    def scale(self, factor: float, positions: Iterable[int] | None = None) -> None:
        """Multiply the gradients of some parameters, or of all; every rank calls this alike."""
        for position in range(len(self._scales)) if positions is None else positions:
            self._scales[position] *= factor
        self._norms.clear()

    def change(self, position: int, function: Callable[[torch.Tensor], object]) -> None:
        """Let ``function`` change the gradient of one parameter in place, element by element, on every rank."""
        for part in self._parts.get(position, ()):
            if self._scales[position] != 1.0:
                part.mul_(self._scales[position])
            function(part)
        self._scales[position] = 1.0
        self._norms.clear()

    def norms(self, norm_type: float) -> torch.Tensor:
        """Return the norm of each parameter's gradient (float64, by position): one sum over all ranks for all."""
        if norm_type not in self._norms:
            powers, label = self._own_powers(norm_type), every_rank("the norm of a gradient")
            if math.isinf(norm_type):
                table = torch.zeros(self._control.world_size, len(powers), dtype=torch.float64)
                table[self._control.rank] = powers
                self._norms[norm_type] = self._control.sum(table, label).amax(0)
            else:
                self._norms[norm_type] = self._control.sum(powers, label) ** (1.0 / norm_type)
        return self._norms[norm_type]

    def total_norm(self, norm_type: float) -> float:
        """Return the norm of all gradients as one vector, from one number of each rank."""
        powers = self._own_powers(norm_type)
        if math.isinf(norm_type):
            own = float(powers.amax()) if len(powers) else 0.0
            largest = self._control.gather_numbers(own, every_rank("clip_grad_norm_()"))
            return float(torch.tensor(largest, dtype=torch.float64).amax())  # unlike max(), it lets NaN through
        total = self._control.sum(powers.sum().reshape(1), every_rank("clip_grad_norm_()"))
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

    def wait_reductions(self) -> None:
        """Wait until what has begun of a pass is over."""
        for work in self._reductions.values():
            work.wait()

    def _of_step(self) -> GradientsOfStep:
        assert self._report is not None, "a step follows a backward pass"
        return GradientsOfStep(
            report=self._report,
            reductions=tuple(self._reductions[bucket.index] for bucket in self._buckets),
            scales=tuple(self._scales) if self._is_inspected else None,
            carried=self._carried,
            dropped=self._dropped,
        )

    def _own_powers(self, norm_type: float) -> torch.Tensor:
        """Sum the absolute values of the owned elements to the power ``norm_type``; their largest for infinity."""
        if not norm_type > 0:
            raise UpdateError(f"norm_type must be positive, or infinity, not {norm_type}; 2.0 is the usual one")
        powers = torch.zeros(len(self._scales), dtype=torch.float64)
        for shard in self._shards if self._is_counted else ():
            for segment, gradient in shard.gradients():
                if segment.is_spare:
                    continue
                position = segment.slot.position
                part = torch.linalg.vector_norm(gradient, norm_type, dtype=wide(gradient.dtype)).cpu()
                part = part * abs(self._scales[position])
                if math.isinf(norm_type):
                    powers[position] = torch.maximum(powers[position], part)
                else:
                    powers[position] += part**norm_type
        return powers


def clip_factor(norm: float, max_norm: float) -> float:
    """Return what gradients of that norm are multiplied by, as ``torch.nn.utils.clip_grad_norm_`` does it."""
    return norm if math.isnan(norm) else min(1.0, max_norm / (norm + 1e-6))


def _places(kept: Sequence[bool]) -> Iterator[int]:
    return (position for position, is_kept in enumerate(kept) if is_kept)
