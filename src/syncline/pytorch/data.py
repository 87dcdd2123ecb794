"""Data sets for a fleet: which samples each rank takes. Public as ``syncline.data``."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler

from syncline.arguments import checked
from syncline.errors import ConfigurationError
from syncline.pytorch.elastic_sampler import DataSet, ElasticSampler, checked_size
from syncline.pytorch.fleet import Fleet, current_fleet

__all__ = ["ElasticSampler", "sampler"]


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
    size = checked_size(dataset)
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
