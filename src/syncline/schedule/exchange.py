"""Direct exchange among siblings: the reduce-scatter transfers of a tree division, in columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from syncline.schedule.ownership import Exchange
from syncline.schedule.transfers import Transfers


def draw_exchanges(exchanges: Iterable[Exchange], cuts: Sequence[int]) -> Transfers:
    """Return the reduce-scatter that they make; the exchange of height h takes place in step h - 1.

    Siblings send in rotation: child k first to child k + 1, so that no receiver is hit by all at once.
    """
    index = dict(zip(cuts, range(len(cuts)), strict=True))
    return Transfers.concatenate([_draw(exchange, index) for exchange in exchanges]).in_order()


def _draw(exchange: Exchange, index: Mapping[int, int]) -> Transfers:
    num_intervals, degree = exchange.holders.shape
    bounds = np.array([index[bound] for bound in exchange.bounds], dtype=np.int32).reshape(num_intervals, degree + 1)
    src_child = np.arange(degree)
    dst_child = (src_child + np.arange(1, degree)[:, None]) % degree  # [offset, source child]
    shape = (degree - 1, num_intervals, degree)
    src = np.broadcast_to(exchange.holders[None], shape).reshape(-1)
    dst = exchange.holders[:, dst_child].swapaxes(0, 1).reshape(-1)
    first = bounds[:, dst_child].swapaxes(0, 1).reshape(-1)
    last = bounds[:, dst_child + 1].swapaxes(0, 1).reshape(-1)
    rows = Transfers(
        step=np.full(len(src), exchange.height - 1),
        src=src,
        dst=dst,
        first=first,
        last=last,
        add=np.ones(len(src), dtype=np.bool_),
    )
    return rows if bool((first < last).all()) else rows.take(first < last)
