"""Groups of ``torch.distributed`` whose ranks are threads of one process, which meet in a HashStore, over loopback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from syncline.backend.creation import SynclineProcessGroup, create_state
from syncline.pytorch.environment import BackendOptions
from syncline.testing import run_threads


def description(
    store: Any, rank: int, size: int, *, timeout_s: float = 60.0, ranks: Sequence[int] = (), name: str = "0"
) -> SimpleNamespace:
    """Describe a new group as ``torch.distributed`` does to a backend."""
    return SimpleNamespace(
        store=store,
        group_rank=rank,
        group_size=size,
        timeout=timedelta(seconds=timeout_s),
        group_id=name,
        global_ranks_in_group=list(ranks),
    )


def run_groups(
    world: int,
    body: Callable[[SynclineProcessGroup], Any],
    *,
    options: BackendOptions | None = None,
    timeout_s: float = 60.0,
    stores: Sequence[Any] | None = None,
) -> list[Any]:
    """Run ``body`` on every rank of one world; return what each returned. The first error is raised.

    ``stores`` are the ranks' views of the store that they meet in.
    """
    stores = stores or [dist.HashStore()] * world

    def on_rank(rank: int) -> Any:
        described = description(stores[rank], rank, world, timeout_s=timeout_s)
        group = SynclineProcessGroup(create_state(described, options or BackendOptions()))
        try:
            return body(group)
        finally:
            group.shutdown()

    return run_threads(world, on_rank)
