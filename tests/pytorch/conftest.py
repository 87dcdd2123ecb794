"""Ranks as threads of one process, on the in-memory fabric."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.pytorch.fleet import Fleet
from syncline.runtime import communicators_in_memory
from syncline.topology import Topology

JOIN_S = 60.0


def run_fleets(world: int | Topology, body: Callable[[Fleet], Any], **options: Any) -> list[Any]:
    """Run ``body`` on every rank of a fleet in memory; return what each returned. The first error is raised."""
    topology = Topology.flat(world) if isinstance(world, int) else world
    options.setdefault("timeout_s", 20.0)
    fleets = [Fleet(communicator) for communicator in communicators_in_memory(topology.num_ranks, topology, **options)]
    results: list[Any] = [None] * len(fleets)
    errors: list[tuple[int, BaseException]] = []

    def main(fleet: Fleet) -> None:
        try:
            with fleet:
                results[fleet.rank] = body(fleet)
        except BaseException as error:
            errors.append((fleet.rank, error))

    threads = [threading.Thread(target=main, args=(fleet,), daemon=True) for fleet in fleets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert not any(thread.is_alive() for thread in threads), f"ranks hang; errors so far: {errors}"
    if errors:
        raise errors[0][1]
    return results


@pytest.fixture(name="run_fleets")
def _run_fleets() -> Callable[..., list[Any]]:
    torch.set_num_threads(1)
    return run_fleets
