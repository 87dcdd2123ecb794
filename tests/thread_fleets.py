"""Ranks as threads of one process, on the in-memory fabric.

What all ranks plan alike is planned once in a process: planning is most of what a small job does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from meeting_stores import DictStore
from syncline.fabric import FabricOptions
from syncline.pytorch.fleet import Fleet
from syncline.runtime import Communicator, communicators_in_memory
from syncline.testing import Caught, run_threads
from syncline.topology import Topology
from syncline.updates import bucket_schedule


def remembered(plan: Callable[..., Any]) -> Callable[..., Any]:
    """Return a planner that plans the same only once."""
    plan_once = functools.lru_cache(256)(plan)

    def planner(*args: Any, **options: Any) -> Any:
        frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        return plan_once(*args, **frozen)

    return planner


bucket_schedule.plan_sharded_step = remembered(bucket_schedule.plan_sharded_step)


def run_fleets(
    world: int | Topology, body: Callable[[Fleet], Any], *, accept: Caught = (), **options: Any
) -> list[Any]:
    """Run ``body`` on every rank of a fleet; return what each returned, or the error it ended with if it is accepted.

    The first error that is not is raised.
    """
    torch.set_num_threads(1)
    options.setdefault("timeout_s", 60.0)
    topology = Topology.flat(world) if isinstance(world, int) else world
    fleets = [Fleet(communicator) for communicator in communicators_in_memory(topology.num_ranks, topology, **options)]

    def on_rank(rank: int) -> Any:
        with fleets[rank] as fleet:
            return body(fleet)

    return run_threads(len(fleets), on_rank, catch=accept)


def run_over_tcp(topology: Topology, body: Callable[[Fleet], Any], *, accept: Caught = ()) -> list[Any]:
    """Run ``body`` on every rank, each a thread with sockets of its own; return as :func:`run_fleets` does."""
    store, world_size = DictStore(), topology.num_ranks

    def main(rank: int) -> Any:
        options = FabricOptions(shares_memory=False)
        communicator = Communicator.connect(
            rank=rank, world_size=world_size, topology=topology, store=store, options=options, timeout_s=60.0
        )
        with Fleet(communicator) as fleet:
            return body(fleet)

    return run_threads(world_size, main, catch=accept)
