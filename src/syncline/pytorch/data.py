"""Data sets for a fleet: which samples each rank takes. Public as ``syncline.data``.

:class:`ElasticSampler` divides an epoch over whoever is there, and counts what steps have used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sized
from typing import Annotated, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from syncline.arguments import Bounds, Count, Whole, checked
from syncline.errors import ConfigurationError
from syncline.members import MembershipChange
from syncline.pytorch.fleet import Fleet, current_fleet
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.pytorch.sample_division import Places, SampleDivision, apportion

__all__ = ["ElasticSampler", "sampler"]
DataSet = Annotated[
    Sized,
    "a data set with a length (of a stream let each rank read its own part: every fleet.world_size-th sample, from the "
    "fleet.rank-th on)",
]


@checked
def sampler(
    dataset: DataSet, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False, fleet: Fleet | None = None
) -> DistributedSampler[Any]:
    """Return a sampler that gives each rank its own part of ``dataset``, for ``DataLoader(dataset, sampler=...)``.

    Every rank takes as many samples, so all loaders have as many batches: where the samples do not divide evenly, some
    are taken twice, or with ``drop_last`` the last ones not at all. ``shuffle`` draws the order from ``seed``, which
    must be the same on all ranks, and from the epoch: call ``sampler.set_epoch(epoch)`` before each, or all epochs have
    the same order. ``fleet``: default, the one that ``syncline.init()`` made. Helpers of the topology take no samples:
    their loaders are empty.

    Raises :class:`ConfigurationError` for a data set without a length or without samples, or if there is no fleet.

    >>> dataset = torch.utils.data.TensorDataset(torch.arange(10))
    >>> loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=syncline.data.sampler(dataset))
    >>> [len(numbers) for (numbers,) in loader]
    [4, 4, 2]
    """
    size = _checked_size(dataset)
    fleet = fleet if fleet is not None else current_fleet()
    helpers = fleet.topology.helpers
    readers = [rank for rank in range(fleet.world_size) if rank not in helpers]
    if drop_last and size < len(readers):
        raise ConfigurationError(
            f"{size} samples are too few for {len(readers)} ranks with drop_last=True: nothing would be "
            "left; give more samples, or leave drop_last out"
        )
    has_data = fleet.rank in readers
    return DistributedSampler(
        dataset if has_data else range(0),  # type: ignore[arg-type]  # it asks for the length alone
        num_replicas=len(readers),
        rank=readers.index(fleet.rank) if has_data else 0,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


class ElasticSampler(Sampler[list[int]]):
    """Divides each epoch over whoever is there, for ``DataLoader(dataset, batch_sampler=...)``; every rank has one.

    ``batch_size``: samples of each rank in a batch. ``shuffle`` draws an epoch's order from ``seed``, alike on all
    ranks. All ranks have as many batches, and each sample is taken once: the last batch may be smaller, or a little
    larger, and not the same on all ranks: let samples count alike, with ``samples="batch"`` in ``distribute()``. Of
    fewer samples than ranks, those that cannot be divided are left out, or with ``uneven=True`` given to some, which
    have one batch more: train within :func:`syncline.join` then. ``paces``: parts in proportion to samples per second,
    by the ranks' numbers at the start (who is not named has the mean). Helpers of the topology take no samples.
    ``fleet``: default, the current one.

    :meth:`follow` tells it the optimizer, whose steps count: a batch that workers have only loaded is not done. Where
    ranks are lost or come (``elastic=True``), what is not loaded yet is divided anew, and what a lost rank had under
    way is given out again: each sample is taken once, but for less than a batch. With :class:`LocalSteps` a lost rank
    may be behind the others, and its batches in between are left out of the epoch. :meth:`state_dict` is the same on
    all ranks, and any number of them can go on from it in mid-epoch.

    Raises :class:`ConfigurationError` for what cannot be divided, and if an epoch that is over is asked for again.

    >>> dataset = torch.utils.data.TensorDataset(torch.randn(10, 4))
    >>> sampler = syncline.data.ElasticSampler(dataset, batch_size=4)
    >>> loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
    >>> model, optimizer = syncline.distribute(model, optimizer, samples="batch")
    >>> sampler.follow(optimizer, loader)
    >>> for epoch in range(sampler.epoch, 1):
    ...     sampler.set_epoch(epoch)
    ...     for (x,) in loader:
    ...         model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()
    >>> len(loader), sampler.state_dict()["left"]
    (3, [])
    """

    @checked
    def __init__(
        self,
        dataset: DataSet,
        batch_size: Count,
        *,
        shuffle: bool = True,
        seed: int = 0,
        uneven: bool = False,
        paces: Mapping[int, Annotated[float, Bounds(above=0, below=math.inf)]] | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        self.epoch = 0
        """The epoch that is under way, or comes next."""
        self._num_samples = _checked_size(dataset)
        self._batch_size = batch_size
        self._shuffle, self._seed = shuffle, seed
        self._is_uneven = uneven
        self._paces = dict(paces or {})
        self._fleet = fleet if fleet is not None else current_fleet()
        self._present = self._read_present()
        self._left: Places = [(0, self._num_samples)]
        """What the steps until the pass under way have left."""
        self._division: SampleDivision | None = None
        self._plan: Mapping[str, Any] | None = None
        """Of a loaded state, what was given out when it was taken."""
        self._has_taken_over = False
        self._pass: _Pass | None = None
        self._optimizer: DistributedOptimizer | None = None
        self._num_prefetched = 0
        self._iteration = -1
        """The newest step whose batches are counted."""
        self._fleet_epoch = 0
        """That of the members among whom batches are divided."""

    @checked
    def follow(self, optimizer: DistributedOptimizer, loader: DataLoader[Any]) -> None:
        """Count the steps of ``optimizer``, as ``distribute()`` returned it, for the batches that ``loader`` loads.

        A step has used all that the loader has delivered since the last one, also with gradient accumulation, and where
        ``GradScaler`` left a step out. ``num_workers`` and ``prefetch_factor`` are the same on all ranks.
        """
        if loader.batch_sampler is not self:
            raise ConfigurationError(
                "the loader must take its batches from this sampler; make it with DataLoader(dataset, "
                "batch_sampler=sampler)"
            )
        if not loader.in_order:
            raise ConfigurationError(
                "a loader with in_order=False does not tell which batches are done; leave in_order out"
            )
        self._optimizer, self._present = optimizer, self._read_present()
        self._fleet_epoch = self._fleet.epoch.number
        self._num_prefetched = loader.num_workers * (loader.prefetch_factor or 0)
        optimizer.register_step_post_hook(lambda *_: self._note_step())
        if self._fleet.recovery is not None:  # else members never change, or the rule tells nobody
            optimizer.on_membership_change(self._note_change)
        self._take_over()

    @checked
    def set_epoch(self, epoch: Whole) -> None:
        """Begin another epoch, in another order; one that is under way, or was loaded, goes on where it is."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._left = [(0, self._num_samples)]
            self._division, self._plan, self._has_taken_over = None, None, False

    def __iter__(self) -> Iterator[list[int]]:
        self._pass = _Pass(self)
        return self._pass

    def __len__(self) -> int:
        """Return how many batches the pass under way has on this rank, or the next, as far as is known."""
        division = self._division
        if division is None:
            division = SampleDivision(left=self._left, shares=self._shares(self._present), is_uneven=self._is_uneven)
        return division.count_batches() if self.number in division.shares else 0

    @property
    def number(self) -> int:
        """This rank's number at the start of the job."""
        return self._fleet.members[self._fleet.rank]

    def state_dict(self) -> dict[str, Any]:
        """Return what the steps have left of the epoch, and for ranks that join, what is given out: JSON can say it."""
        if self._optimizer is not None and self._optimizer.iteration > self._iteration >= 0:
            self._note_step()  # a member tells newcomers within the step, before its hooks
        state: dict[str, Any] = {
            "order": [self._num_samples, self._shuffle, self._seed],
            "epoch": self.epoch,
            "left": [list(place) for place in self._remaining()],
        }
        if self._division is not None:
            state["plan"] = {
                "iteration": self._iteration,
                "fleet_epoch": self._fleet_epoch,
                "paces": [[*one] for one in self._paces.items()],
                "division": self._division.state(),
            }
        return state

    @checked
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, with any number of ranks; :class:`ConfigurationError` for another order.

        A rank that has joined a running job takes over what the others have loaded as well. An epoch that is over is
        followed by the next: begin with ``range(sampler.epoch, ...)``.
        """
        order = [self._num_samples, self._shuffle, self._seed]
        if not {"order", "epoch", "left"} <= state.keys():
            raise ConfigurationError(
                f"state must be what state_dict() of an ElasticSampler returned, not {dict(state)}"
            )
        if list(state["order"]) != order:
            raise ConfigurationError(
                f"the sampler's state is of {state['order']} (samples, shuffle, seed), but this one has {order}; give "
                "ElasticSampler() the data set, shuffle and seed with which it was saved"
            )
        left = [(start, stop) for start, stop in state["left"]]
        self.epoch = state["epoch"] if left else state["epoch"] + 1
        self._left = left or [(0, self._num_samples)]
        self._division, self._pass, self._plan = None, None, state.get("plan")
        self._take_over()

    def order(self) -> torch.Tensor:
        """Return the samples of the epoch in its order: int64, one for each sample."""
        if not self._shuffle:
            return torch.arange(self._num_samples)
        generator = torch.Generator()
        generator.manual_seed(self._seed + self.epoch)
        return torch.randperm(self._num_samples, generator=generator)

    def begin_pass(self) -> SampleDivision:
        """Divide what is left, for the pass whose first batch is drawn now."""
        if self._optimizer is None:
            raise ConfigurationError("an ElasticSampler counts steps; call sampler.follow(optimizer, loader) first")
        if self._has_taken_over:
            assert self._division is not None, "it was taken over"
            self._has_taken_over = False
            return self._division
        shares = self._shares(self._present)
        division = SampleDivision(left=self._remaining(), shares=shares, is_uneven=self._is_uneven)
        if self._division is not None and not division.count_batches():
            raise ConfigurationError(
                f"the samples of epoch {self.epoch} are all taken; call sampler.set_epoch() before each epoch"
            )
        self._division, self._iteration = division, self._optimizer.iteration
        return division

    def _remaining(self) -> Places:
        return self._left if self._division is None else self._division.remaining()

    def _read_present(self) -> list[int]:
        helpers = self._fleet.topology.helpers
        return [number for rank, number in enumerate(self._fleet.members) if rank not in helpers]

    def _shares(self, present: list[int]) -> dict[int, int]:
        known = [self._paces[number] for number in present if number in self._paces]
        mean = sum(known) / len(known) if known else 1.0
        return apportion(self._batch_size * len(present), {number: self._paces.get(number, mean) for number in present})

    def _take_over(self) -> None:
        """Go on with a loaded plan, if it is of the running job that this rank has joined, and not of an ended one."""
        optimizer, plan, epoch = self._optimizer, self._plan, self._fleet.epoch.number
        if optimizer is None or plan is None:
            return
        self._plan = None
        if not epoch or epoch - plan["fleet_epoch"] not in (0, 1) or plan["iteration"] != optimizer.iteration:
            return
        division = SampleDivision.from_state(plan["division"])
        came_later = plan["fleet_epoch"] != epoch  # than the plan was made
        numbers = dict(zip(division.shares, self._present if came_later else division.shares, strict=False))
        self._paces = dict(plan["paces"])
        self._number_paces(numbers)
        if division.remaining():  # else the next epoch begins with all members
            self._division, self._iteration, self._has_taken_over = division, optimizer.iteration, True
            if came_later:
                self._divide_again(division, numbers)

    def _note_step(self) -> None:
        """Count what the loader has delivered by now: a step has used it."""
        assert self._optimizer is not None, "it calls this"
        if self._optimizer.iteration == self._iteration:
            return  # its change of membership came before its hook
        self._iteration = self._optimizer.iteration
        if self._division is not None and self._pass is not None:
            self._division.note_made(max(self._pass.num_delivered(self._num_prefetched), self._division.num_made))

    def _note_change(self, change: MembershipChange) -> None:
        """Divide anew at a step's end, when all members have drawn as much: lost ranks had no part in this step.

        How many steps before it they made, where ranks do not step together (LocalSteps), nobody is told: all count.
        """
        self._note_step()
        stay = [number for number in self._present if number not in change.lost]
        numbers = dict(zip(stay, (number for number in change.members if number not in change.joined), strict=True))
        self._present, self._fleet_epoch = list(change.members), change.epoch
        self._number_paces(numbers)
        if self._division is not None:
            self._divide_again(self._division, numbers)

    def _number_paces(self, numbers: Mapping[int, int]) -> None:
        self._paces = {numbers[number]: pace for number, pace in self._paces.items() if number in numbers}

    def _divide_again(self, division: SampleDivision, numbers: dict[int, int]) -> None:
        """Divide among the present; ``numbers`` are the new ones of those who stay."""
        is_loaded_ahead = self._num_prefetched > 0
        division.change_members(
            self._shares(self._present), numbers=numbers, num_drawn=self._num_prefetched, has_ended=is_loaded_ahead
        )


class _Pass:
    """What the loader draws of one epoch; not a generator, as batches may come after the last one was given out."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._division: SampleDivision | None = None
        self._order = torch.empty(0)
        self._first = self._num_asked = 0
        self.num_drawn = 0
        """The number of the batch that is drawn next."""

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> list[int]:
        if self._division is None:
            self._division = self._sampler.begin_pass()
            self._order = self._sampler.order()
            self._first = self.num_drawn = self._division.num_made
        self._num_asked += 1
        part = self._division.part(self._sampler.number, self.num_drawn)
        if part is None:
            raise StopIteration
        self.num_drawn += 1
        return [sample for start, stop in part for sample in self._order[start:stop].tolist()]

    def num_delivered(self, num_prefetched: int) -> int:
        """Return the number of the batch that the loader delivers next: it asks for one more with each that it does."""
        return min(self._first + max(self._num_asked - num_prefetched, 0), self.num_drawn)


def _checked_size(dataset: Sized) -> int:
    """Return the number of samples; :class:`ConfigurationError` if there are none."""
    if not len(dataset):
        raise ConfigurationError(
            f"A sampler divides the samples of a dataset, but this {type(dataset).__name__} has none; give one that has"
        )
    return len(dataset)
