"""Exchange among siblings, direct or in a ring: the reduce-scatter transfers of a tree division, in columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from syncline.schedule.ownership import Exchange
from syncline.schedule.transfers import Transfers


def draw_exchanges(exchanges: Iterable[Exchange], cuts: Sequence[int], *, ring_at: str | None = None) -> Transfers:
    """Return the reduce-scatter that they make; the exchange of height h takes place in step h - 1.

    Siblings send in rotation: child k first to child k + 1, so that no receiver is hit by all at once. Those of
    ``ring_at``, above which nothing is exchanged, send to the next alone, in as many steps as there are others.
    """
    index = dict(zip(cuts, range(len(cuts)), strict=True))
    drawn = [_draw(exchange, index, in_ring=exchange.parent == ring_at) for exchange in exchanges]
    return Transfers.concatenate(drawn).in_order()


def _draw(exchange: Exchange, index: Mapping[int, int], *, in_ring: bool) -> Transfers:
    num_intervals, degree = exchange.holders.shape
    bounds = np.array([index[bound] for bound in exchange.bounds], dtype=np.int32).reshape(num_intervals, degree + 1)
    src_child = np.arange(degree)
    offset = np.arange(1, degree)[:, None]
    dst_child = (src_child + (offset * 0 + 1 if in_ring else offset)) % degree  # [offset, source child]
    part = (src_child - offset) % degree if in_ring else dst_child  # in a ring the part of child k begins behind it
    shape = (degree - 1, num_intervals, degree)
    src = np.broadcast_to(exchange.holders[None], shape).reshape(-1)
    dst = exchange.holders[:, dst_child].swapaxes(0, 1).reshape(-1)
    first = bounds[:, part].swapaxes(0, 1).reshape(-1)
    last = bounds[:, part + 1].swapaxes(0, 1).reshape(-1)
    step = np.broadcast_to((offset - 1)[:, :, None] * in_ring + exchange.height - 1, shape).reshape(-1)
    rows = Transfers(
        step=step.astype(np.int32),
        src=src,
        dst=dst,
        first=first,
        last=last,
        add=np.ones(len(src), dtype=np.bool_),
    )
    return rows if bool((first < last).all()) else rows.take(first < last)
