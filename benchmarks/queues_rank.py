"""One rank of an all-reduce on switches of some kind: started by ``queues.py`` with a JSON object as its argument.

It prints, as JSON, what each call took it. Ranks begin a call together: a small all-reduce stands before each. What the
lab counts is read between the calls, so rank 0 says when they begin and end, and waits to be told that it was read.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
from incast_rank import DirectoryStore

from syncline.fabric import FabricOptions
from syncline.runtime import Communicator, numpy_reduction
from syncline.topology import Topology

MEETING_BYTES = 64


def main() -> None:
    """Run the calls that are asked for; the first one is not counted."""
    order = json.loads(sys.argv[1])
    topology = Topology.load(os.environ["SYNCLINE_TOPOLOGY"])
    options = FabricOptions(address=order["address"], insecure=True, **order["options"])
    place = {"rank": order["rank"], "world_size": topology.num_ranks, "topology": topology, "options": options}
    with Communicator.connect(store=DirectoryStore(order["store"]), **place) as communicator:
        numbers = np.full(order["num_bytes"] // 4, 1.0, np.float32)
        times_s = [call(communicator, numbers)]
        wait_for_reading(communicator, order["rank"], "warm")
        times_s += [call(communicator, numbers) for _ in range(order["num_calls"])]
        wait_for_reading(communicator, order["rank"], "over")
    print(json.dumps(times_s[1:]))


def call(communicator: Communicator, numbers: np.ndarray) -> float:
    """All-reduce the numbers, which stay as they are; return the seconds that it took."""
    reduce(communicator, np.ones(MEETING_BYTES // 4, np.float32))
    numbers.fill(1.0 / communicator.world_size)
    start = time.perf_counter()
    reduce(communicator, numbers)
    elapsed_s = time.perf_counter() - start
    assert (numbers == 1.0).all(), f"the sum is wrong: {numbers}"
    return elapsed_s


def reduce(communicator: Communicator, numbers: np.ndarray) -> None:
    """Sum over all ranks."""
    communicator.all_reduce(numbers.data.cast("B"), numpy_reduction("float32")).wait()


def wait_for_reading(communicator: Communicator, rank: int, word: str) -> None:
    """Let what the lab counts be read while nothing is under way."""
    if rank == 0:
        print(word, flush=True)
        sys.stdin.readline()
    reduce(communicator, np.ones(MEETING_BYTES // 4, np.float32))


if __name__ == "__main__":
    main()
