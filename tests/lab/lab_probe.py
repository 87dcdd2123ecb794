"""One rank that is told nothing of its network, and measures it: prints what came of it."""

import json
import os

import torch

import syncline


def main() -> None:
    rule = syncline.Clustered(features=("latency_s", "uplink_bytes_per_s"))
    untold = syncline.Topology.flat(int(os.environ["WORLD_SIZE"]))
    with syncline.init(untold, insecure=True, timeout_s=60) as fleet:
        model = torch.nn.Linear(4, 4)
        _, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), rule)
        updater = optimizer.training.updater
        network = [measurement.as_pairs() for measurement in updater.inventory.network]
        uplinks = [measurement.uplink_bytes_per_s for measurement in updater.inventory.network]
        fleet.barrier()
    print(json.dumps({"clusters": updater.clusters, "network": network, "uplinks": uplinks}))


if __name__ == "__main__":
    main()
