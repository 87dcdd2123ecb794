"""One rank of a job over TCP in a process of its own; what becomes of it is printed as one line of JSON."""

import json
import os
import signal
import sys
import time

import numpy as np

from meeting_stores import DirectoryStore
from syncline.errors import SynclineError
from syncline.fabric import FabricOptions
from syncline.runtime import Communicator, numpy_reduction
from syncline.topology import Topology


def main():
    folder, rank, world_size, victim, signal_name = sys.argv[1:]
    rank, world_size, victim = int(rank), int(world_size), int(victim)
    # a killed rank is known by the kernel: long before its silence would tell
    options = FabricOptions(heartbeat_s=0.2, suspect_s=0.5, dead_s=3.0 if signal_name == "SIGSTOP" else 600.0)
    settings = {"rank": rank, "world_size": world_size, "topology": Topology.flat(world_size), "options": options}
    communicator = Communicator.connect(store=DirectoryStore(folder), **settings)
    numbers = np.full(4_000_000, rank + 1, np.float32)
    step, error = 0, None
    try:
        while step < 200:
            if rank == victim and step == 5:
                _die(signal_name, communicator, numbers)
            numbers[:] = rank + 1
            _sum(communicator, numbers, step).wait()
            assert (numbers == world_size * (world_size + 1) / 2).all()
            step += 1
            if victim < 0 and step == 5:
                break
    except SynclineError as caught:
        error = caught
    at_s = time.time()
    communicator.close()
    line = {"rank": rank, "step": step, "error": type(error).__name__, "text": str(error), "at_s": at_s}
    print(json.dumps(line), flush=True)


def _sum(communicator, numbers, step):
    return communicator.all_reduce(
        memoryview(numbers).cast("B"), numpy_reduction("float32"), label="all_reduce of bucket 0", step=step
    )


def _die(signal_name, communicator, numbers):
    """Be struck in the middle: the call is under way and has many slices."""
    _sum(communicator, numbers, 5)
    print(json.dumps({"struck_s": time.time()}), flush=True)
    os.kill(os.getpid(), signal.Signals[signal_name])


if __name__ == "__main__":
    main()
