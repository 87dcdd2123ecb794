"""One rank of an all-reduce between a lab's hosts: `python lab_all_reduce.py FOLDER RANK ADDRESS NUM_BYTES CONGESTION`.

The ranks find each other through FOLDER; an empty CONGESTION leaves it to the fabric.
It prints `right` where the sum is.
"""

import os
import sys

import numpy as np

from meeting_stores import DirectoryStore
from syncline.fabric import FabricOptions
from syncline.runtime import Communicator, numpy_reduction
from syncline.topology import Topology


def main():
    folder, rank, address, num_bytes = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    topology = Topology.load(os.environ["SYNCLINE_TOPOLOGY"])
    options = FabricOptions(address=address, insecure=True, congestion=sys.argv[5] or None)
    world_size = topology.num_ranks
    place = {"rank": rank, "world_size": world_size, "topology": topology, "options": options}
    with Communicator.connect(store=DirectoryStore(folder), **place) as communicator:
        numbers = np.full(num_bytes // 4, rank + 1, np.float32)
        communicator.all_reduce(memoryview(numbers).cast("B"), numpy_reduction("float32")).wait()
        print("right" if (numbers == world_size * (world_size + 1) / 2).all() else "wrong")


if __name__ == "__main__":
    main()
