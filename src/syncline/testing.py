"""All ranks of a job in one process, for tests of training code: threads that exchange their data in memory.

The schedules, the update rules and the checks are those of any job; only what lies below, processes and sockets, is
not there. So a test sees what its model computes, which calls do not match and who is named when a rank fails, in
milliseconds and without a launcher. Not imported by ``import syncline``: write ``import syncline.testing``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from syncline.arguments import Count, Seconds, checked
from syncline.errors import DeadlineError, name_ranks
from syncline.pytorch.fleet import Fleet
from syncline.runtime import communicators_in_memory
from syncline.runtime.whereabouts import training_place
from syncline.topology import Topology

Result = TypeVar("Result")
Caught = type[BaseException] | tuple[type[BaseException], ...]

__all__ = ["run_ranks"]


@checked
def run_ranks(
    ranks: Count | str | Topology,
    body: Callable[[Fleet], Result],
    *,
    catch: Caught = (),
    seed: int | None = None,
    timeout_s: Seconds = 60.0,
    deadline_s: Seconds = 180.0,
) -> list[Any]:
    """Run ``body(fleet)`` on every rank, each a thread of this process; return what each returned, by rank.

    ``ranks``: how many, on one switch, or a topology: the name of one that is shipped, the path of a file, or a
    :class:`~syncline.Topology`. ``body`` gives its fleet to what it calls: ``syncline.distribute(..., fleet=fleet)``,
    ``syncline.data.sampler(..., fleet=fleet)``. A rank whose ``body`` raises is lost to the others, as one that was
    killed is. Errors of the classes in ``catch`` are returned in the place of that rank's result. With a ``seed``
    messages arrive in a random order that the seed replays. ``timeout_s`` is the deadline of each collective.

    Threads share what a process has: torch's random generator, its number of threads, the working folder. Draw random
    numbers from a ``torch.Generator`` of the rank's own.

    Raises the first error, in time, that is not in ``catch``; :class:`~syncline.DeadlineError` if ranks still run after
    ``deadline_s``, with where each of them is.

    >>> import syncline.testing
    >>> def body(fleet):
    ...     total = torch.tensor([float(fleet.rank)])
    ...     fleet.all_reduce(total)
    ...     return total.item()
    >>> syncline.testing.run_ranks(3, body)
    [3.0, 3.0, 3.0]
    >>> def fail(fleet):
    ...     if fleet.rank == 1:
    ...         raise ValueError("no data")
    ...     fleet.barrier()
    >>> _, error, lost = syncline.testing.run_ranks(3, fail, catch=(ValueError, syncline.PeerLostError))
    >>> error, lost.rank
    (ValueError('no data'), 1)
    """
    topology = _topology_of(ranks)
    communicators = communicators_in_memory(topology.num_ranks, topology, seed=seed, timeout_s=timeout_s)
    fleets = [Fleet(communicator) for communicator in communicators]

    def on_rank(rank: int) -> Result:
        with fleets[rank] as fleet:
            return body(fleet)

    return run_threads(len(fleets), on_rank, catch=catch, deadline_s=deadline_s)


def run_threads(
    num_threads: int, on_rank: Callable[[int], Any], *, catch: Caught = (), deadline_s: float = 180.0
) -> list[Any]:
    """Run ``on_rank(rank)`` on a thread for each rank, and end as :func:`run_ranks` does."""
    results: list[Any] = [None] * num_threads
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = on_rank(rank)
        except BaseException as error:
            results[rank] = error
            if not isinstance(error, catch):
                errors.append(error)

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(num_threads)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    still = {rank: thread for rank, thread in enumerate(threads) if thread.is_alive()}
    if still:
        raise DeadlineError(_where(still, deadline_s)) from (errors[0] if errors else None)
    if errors:
        raise errors[0]
    return results


def _topology_of(ranks: int | str | Topology) -> Topology:
    if isinstance(ranks, str):
        return Topology.load(ranks)
    return ranks if isinstance(ranks, Topology) else Topology.flat(ranks)


def _where(threads: dict[int, threading.Thread], deadline_s: float) -> str:
    """Say of each rank that still runs in which line of the program, and what that calls."""
    places = {rank: training_place(thread.ident)[1] for rank, thread in threads.items()}
    told = [f"rank {rank} is {place}" for rank, place in places.items() if place]
    return "; ".join([f"{name_ranks(threads)} had not ended after {deadline_s:g} s", *told])
