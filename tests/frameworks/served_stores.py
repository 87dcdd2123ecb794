"""Stores that a test serves to the ranks that it starts, as torchrun's agent does: one for each group of theirs."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""What tells ranks that they need not serve one."""
WARM = (
    "torch.distributed.fsdp",
    "torch.distributed.nn",
    "torch.distributed.tensor",
    "lightning.pytorch",
    "sklearn.datasets",
    "transformers",
)
"""What several programs import, each for seconds."""


def serve_stores(number: int) -> list[dist.TCPStore]:
    """Return stores on loopback, each on a port of its own, that live as long as the list does."""
    limit = timedelta(seconds=60)
    return [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit) for _ in range(number)]


def ports_of(stores: list[dist.TCPStore]) -> str:
    """Return the ports, in order, as one argument."""
    return ",".join(str(store.port) for store in stores)
