"""One rank at a segment in a process of its own, which may be struck in the middle of a call; prints a line of JSON."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from meeting_stores import DirectoryStore
from syncline.errors import SynclineError
from syncline.fabric import FabricOptions
from syncline.runtime import Communicator, numpy_reduction
from syncline.topology import Topology

STRUCK_AT = 5


def main():
    folder, rank, world_size, victim, signal_name, moment = sys.argv[1:]
    rank, world_size, victim = int(rank), int(world_size), int(victim)
    # a killed rank is known by the kernel: long before its silence would tell
    options = FabricOptions(heartbeat_s=0.2, suspect_s=0.5, dead_s=3.0 if signal_name == "SIGSTOP" else 600.0)
    settings = {"rank": rank, "world_size": world_size, "topology": Topology.flat(world_size), "options": options}
    communicator = Communicator.connect(store=DirectoryStore(folder), **settings)
    assert communicator.open_segment()
    numbers = np.empty(20_000, np.float32)
    step, error = 0, None
    try:
        while step < 200:
            if rank == victim and step == STRUCK_AT:
                _plan_to_be_struck(communicator._shared_memory[0]._segment, signal_name, moment)
            numbers[:] = rank + 1
            view = memoryview(numbers).cast("B")
            communicator.all_reduce(view, numpy_reduction("float32"), step=step, is_awaited=True).wait()
            assert (numbers == world_size * (world_size + 1) / 2).all()
            step += 1
    except SynclineError as caught:
        error = caught
    at_s = time.time()
    communicator.close()
    mapped = _mapped_segments() if not communicator._shared_memory else -1
    line = {"step": step, "error": type(error).__name__, "text": str(error), "at_s": at_s, "mapped": mapped}
    print(json.dumps(line), flush=True)


def _plan_to_be_struck(segment, signal_name, moment):
    put_up = segment.put_up

    def strike(*call):
        if moment == "after":
            put_up(*call)
        print(json.dumps({"struck_s": time.time()}), flush=True)
        os.kill(os.getpid(), signal.Signals[signal_name])

    segment.put_up = strike


def _mapped_segments():
    return Path("/proc/self/maps").read_text().count("memfd:syncline")


if __name__ == "__main__":
    main()
