"""Ranks as threads of one process, each with the collectives of a process group: in memory, and over TCP."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from meeting_stores import DictStore
from syncline.fabric import FabricOptions
from syncline.pytorch.fleet import Fleet
from syncline.runtime import Communicator
from syncline.tensors.collectives import TensorCollectives
from syncline.topology import Topology
from thread_fleets import run_fleets

Body = Callable[[TensorCollectives, Communicator], Any]


def run_in_memory(world: int | Topology, body: Body, **options: Any) -> list[Any]:
    """Run ``body`` on every rank; the options are those of :func:`thread_fleets.run_fleets`."""

    def on_rank(fleet: Fleet) -> Any:
        return body(TensorCollectives(fleet.communicator), fleet.communicator)

    return run_fleets(world, on_rank, **options)


def run_over_tcp(world: int, body: Body) -> list[Any]:
    """Run ``body`` on every rank, on loopback."""
    topology, store = Topology.flat(world), DictStore()

    def on_rank(rank: int) -> Any:
        with Communicator.connect(
            rank=rank, world_size=world, topology=topology, store=store, options=FabricOptions(), timeout_s=60.0
        ) as communicator:
            return body(TensorCollectives(communicator), communicator)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(on_rank, range(world)))


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """Run a function on every rank, in memory."""
    return run_in_memory


@pytest.fixture(params=[run_in_memory, run_over_tcp], ids=["in memory", "over tcp"])
def run_anywhere(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Run a function on every rank, in memory or over TCP on loopback."""
    run: Callable[..., list[Any]] = request.param
    return run
