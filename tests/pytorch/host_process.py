"""A rank that says which host it is on: ``init`` with the names in the arguments, rank by rank, then the topology.

Usage: ``host_process.py TOPOLOGY NAMES``; "-" stands for no topology.
"""

import json
import os
import sys

import torch

import syncline
from syncline.errors import ConfigurationError

topology, names = sys.argv[1], sys.argv[2].split(",")
host = names[int(os.environ["RANK"])]
try:
    with syncline.init(None if topology == "-" else topology, host=host) as fleet:
        total = torch.arange(4.0) + fleet.rank
        fleet.all_reduce(total)
        assert total.tolist() == [fleet.world_size * number + sum(range(fleet.world_size)) for number in range(4)]
        place = fleet.topology.host_of(fleet.rank)
        print(json.dumps({"host": place.name, "ranks": [rank.rank for rank in place.ranks]}))
except ConfigurationError as error:
    print(json.dumps({"error": str(error)}))
