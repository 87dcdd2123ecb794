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
    interval, part = np.nonzero(bounds[:, :-1] < bounds[:, 1:])
    offset = np.arange(1, degree)[:, None]
    src_child = (part + (offset if in_ring else -offset)) % degree  # in a ring the part of child k begins behind it
    dst_child = (src_child + 1) % degree if in_ring else np.broadcast_to(part, src_child.shape)
    step = np.broadcast_to((offset - 1) * in_ring + exchange.height - 1, src_child.shape)
    return Transfers(
        step=step.reshape(-1).astype(np.int32),
        src=exchange.holders[interval, src_child].reshape(-1),
        dst=exchange.holders[interval, dst_child].reshape(-1),
        first=np.broadcast_to(bounds[interval, part], src_child.shape).reshape(-1),
        last=np.broadcast_to(bounds[interval, part + 1], src_child.shape).reshape(-1),
        add=np.ones(src_child.size, dtype=np.bool_),
    )
