"""Going on after a start, whatever was there before: nothing, a checkpoint, or a damaged one and the one before."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.arguments import checked
from syncline.errors import CheckpointError
from syncline.pytorch import checkpoint_history as history
from syncline.pytorch.checkpoint_group import CheckpointGroup, checkpoint_group_of
from syncline.pytorch.checkpoint_parts import Stateful, encode_parts, load_part
from syncline.pytorch.checkpoint_together import Together
from syncline.pytorch.optimizer import DistributedOptimizer, Growing

_log = logging.getLogger(__name__)
_CALL = "resume()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where training goes on, as :func:`syncline.resume` found it.

    >>> syncline.resume("run1", model, optimizer)
    Resumption(iteration=0, extra={}, path=None)
    """

    iteration: int = 0
    """Steps that were made."""
    extra: Any = field(default_factory=dict)
    """What was saved as ``extra``; an empty dictionary if nothing was."""
    path: Path | None = None
    """The checkpoint that was loaded; None at the first start, and where this rank came into a running job."""


@checked
def resume(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    **parts: Stateful,
) -> Resumption:
    """Load the newest whole checkpoint at ``path``, if there is one, and say where training goes on.

    Every rank calls it, once, after :func:`syncline.distribute`, also those that only serve; on any number of ranks,
    whatever number has saved. ``path`` is what ``save_checkpoint`` was given, with or without ``keep=``. ``parts`` are
    the schedulers, samplers and the like that were saved by the same names. All ranks take the same checkpoint: where
    the newest is damaged, the one before, and one rank logs a warning. Nothing is changed at the first start.

    A rank that has come into a running job (``init(join=)``) is where the members are already: for it alone, nothing is
    loaded but ``parts``, which it is given as they were within the ``step()`` at whose end it came in.

    Raises :class:`CheckpointError` on every rank if there are checkpoints and all are damaged, or if the one that is
    loaded is of another model.

    >>> model, optimizer = syncline.distribute(model, optimizer)
    >>> begin = syncline.resume("run1", model, optimizer)
    >>> for iteration in range(begin.iteration, 3):
    ...     model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    ...     syncline.save_checkpoint("run1", model, optimizer, extra={"seed": 1}, keep=2)
    >>> syncline.resume("run1", model, optimizer).iteration
    3
    """
    if isinstance(optimizer, DistributedOptimizer):
        keep = 2 if history.has_several(Path(path)) else None
        optimizer.last_save = optimizer.last_save or {"path": path, "keep": keep, **parts}
    growing = optimizer.growing if isinstance(optimizer, DistributedOptimizer) else None
    if growing is not None:
        growing.offer_parts = partial(encode_parts, parts)
        growing.offer_parts()  # what cannot be given is told now
        if growing.has_just_come:
            return take_parts(growing, parts)
    return resume_together(path, model, optimizer, strict=strict, **parts)


def resume_together(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    **parts: Stateful,
) -> Resumption:
    """Load the newest whole checkpoint, as :func:`resume`, on every rank, whenever it came."""
    target = Path(path).absolute()
    group = checkpoint_group_of(model, optimizer)
    group.synchronize()
    together = Together(group.agree, target, _CALL)
    names = together.run("cannot look for checkpoints", partial(_relative_candidates, target))[0]
    if not names:
        return Resumption()
    from syncline.pytorch.checkpoint_loading import check  # torch's part of it takes a second

    problems: list[str] = []
    for name in names:
        folder = target.parent / name
        try:
            together.run("cannot read the checkpoint", partial(check, folder, group))
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if problems and (group.fleet is None or group.fleet.rank == 0):
            _log.warning("training goes on from %s, since newer ones are damaged: %s", folder, "; ".join(problems))
        return _load(folder, model, group, parts, together, strict=strict)
    raise CheckpointError(f"No checkpoint at {target} is whole: {'; '.join(problems)}")


def take_parts(growing: Growing, parts: Mapping[str, Stateful]) -> Resumption:
    """Go on where the members are: of what ``resume()`` was given on them, take the state.

    Raises :class:`CheckpointError` for what they did not give.
    """
    for name, part in parts.items():
        if name not in growing.parts:
            raise CheckpointError(
                f"{name}= was not given to resume() by the members of the job that this rank has come into, which gave "
                f"{', '.join(sorted(growing.parts)) or 'nothing'}; run the same script"
            )
        load_part(name, part, growing.parts[name])
    return Resumption(iteration=growing.iteration)


def _load(
    folder: Path,
    model: nn.Module,
    group: CheckpointGroup,
    parts: dict[str, Stateful],
    together: Together,
    *,
    strict: bool,
) -> Resumption:
    from syncline.pytorch.checkpoint_loading import load

    found: list[Resumption] = []

    def action() -> None:
        contents = load(folder, model, group, parts, strict=strict)
        extra = {} if contents.extra is None else contents.extra
        found.append(Resumption(iteration=contents.iteration, extra=extra, path=folder))

    together.run("cannot load the checkpoint", action)
    return found[0]


def _relative_candidates(target: Path) -> list[str]:
    """Return what may be loaded as seen from beside ``target``, which ranks may have mounted in different places."""
    return [os.path.relpath(folder, target.parent) for folder in history.candidates(target)]
