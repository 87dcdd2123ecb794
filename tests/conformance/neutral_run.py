"""The interface that programs are written against, and what stands behind it: DDP, Syncline, one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import syncline

Drawn = torch.Tensor


class Run(ABC):
    """One rank's view of a job. Batches come from generators that differ by rank and by draw."""

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank = rank
        self.world = world
        self._folder = folder
        self._num_drawn = 0

    @abstractmethod
    def wrap(self, model: nn.Module, optimizer: Any, **ddp_options: Any) -> tuple[Any, Any]:
        """Make the training distributed; ``optimizer`` may be a list of those that train ``model``."""

    @abstractmethod
    def wrap_together(self, models: list[nn.Module], optimizer: Any) -> tuple[list[Any], Any]:
        """Make the training of several models by one optimizer distributed."""

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Leave the gradients of the backward passes within on this rank."""

    @abstractmethod
    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over all ranks."""

    @abstractmethod
    def join(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Let ranks train on loaders of different length."""

    def module(self, model: nn.Module) -> nn.Module:
        """Return the user's module inside what ``wrap`` returned."""
        return model

    def shared_folder(self) -> Path:
        """Return an empty folder that all ranks of this run see."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    def normal(self, *shape: int) -> Drawn:
        """Draw from the normal distribution; the first dimension is this rank's batch."""
        return self._draw(lambda generator: torch.randn(*shape, generator=generator, dtype=torch.float64))

    def integers(self, high: int, *shape: int) -> Drawn:
        """Draw whole numbers below ``high``; the first dimension is this rank's batch."""
        return self._draw(lambda generator: torch.randint(high, shape, generator=generator))

    def pairs(self, number: int, size: int = 4, features: int = 6, outputs: int = 3) -> list[tuple[Drawn, Drawn]]:
        """Draw ``number`` batches of inputs and targets."""
        return [(self.normal(size, features), self.normal(size, outputs)) for _ in range(number)]

    def labelled(self, number: int, *shape: int, classes: int = 3) -> list[tuple[Drawn, Drawn]]:
        """Draw ``number`` batches of inputs and classes."""
        return [(self.normal(*shape), self.integers(classes, shape[0])) for _ in range(number)]

    def _draw(self, make: Any) -> Drawn:
        self._num_drawn += 1
        return self._of_ranks([make(torch.Generator().manual_seed(1000 * self._num_drawn + r)) for r in self._ranks()])

    def _ranks(self) -> Iterable[int]:
        return (self.rank,)

    @staticmethod
    def _of_ranks(drawn: list[Drawn]) -> Drawn:
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


class DdpRun(Run):
    """``DistributedDataParallel`` over gloo: the reference."""

    def wrap(self, model: nn.Module, optimizer: Any, **ddp_options: Any) -> tuple[Any, Any]:
        """Wrap the model; the optimizer stays the user's."""
        return DistributedDataParallel(model, **ddp_options), optimizer

    def wrap_together(self, models: list[nn.Module], optimizer: Any) -> tuple[list[Any], Any]:
        """Wrap each."""
        return [DistributedDataParallel(model) for model in models], optimizer

    def module(self, model: nn.Module) -> nn.Module:
        """Unwrap."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """DDP's own."""
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync()

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Sum with gloo, and divide."""
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.world

    def join(self, model: nn.Module) -> AbstractContextManager[Any]:
        """PyTorch's Join; the mean is over the ranks that still have data."""
        assert isinstance(model, DistributedDataParallel)
        return Join([model], divide_by_initial_world_size=False)


class SynclineRun(Run):
    """``syncline.distribute`` with one update rule."""

    def __init__(self, fleet: syncline.Fleet, rule: Any, folder: Path) -> None:
        super().__init__(fleet.rank, fleet.world_size, folder)
        self.fleet = fleet
        self.rule = rule

    def wrap(self, model: nn.Module, optimizer: Any, **ddp_options: Any) -> tuple[Any, Any]:
        """Distribute the model in place, once with each of its optimizers; DDP's options are not needed."""
        del ddp_options
        if isinstance(optimizer, list):
            return model, [syncline.distribute(model, one, self.rule)[1] for one in optimizer]
        return syncline.distribute(model, optimizer, self.rule)

    def wrap_together(self, models: list[nn.Module], optimizer: Any) -> tuple[list[Any], Any]:
        """Distribute a module that holds all of them."""
        return models, syncline.distribute(nn.ModuleList(models), optimizer, self.rule)[1]

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """The function."""
        return syncline.no_sync(model)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over the fleet, and divide."""
        total = value.detach().clone()
        self.fleet.all_reduce(total)
        return total / self.world

    def join(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Syncline's."""
        return syncline.join(model)


class AloneRun(Run):
    """One process that draws the union of all ranks' batches."""

    def wrap(self, model: nn.Module, optimizer: Any, **ddp_options: Any) -> tuple[Any, Any]:
        """Leave both as they are."""
        return model, optimizer

    def wrap_together(self, models: list[nn.Module], optimizer: Any) -> tuple[list[Any], Any]:
        """Leave them as they are."""
        return models, optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing to leave out."""
        return nullcontext()

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the union is the mean already."""
        return value.detach().clone()

    def join(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Nobody to wait for."""
        return nullcontext()

    def _ranks(self) -> Iterable[int]:
        return range(self.world)
