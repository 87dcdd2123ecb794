"""One rank that is told nothing of its network, and measures it: prints what came of it."""

import json
import time

import torch

import syncline


def main() -> None:
    rule = syncline.Clustered(features=("latency_s", "uplink_bytes_per_s"))
    with syncline.init(syncline.Topology.flat(8), insecure=True, timeout=60) as fleet:
        model = torch.nn.Linear(4, 4)
        start_s = time.monotonic()
        _, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), rule)
        taken_s = time.monotonic() - start_s
        updater = optimizer.training.updater
        uplinks = [reading.uplink_bytes_per_s for reading in updater.survey.network]
        echoes = [sorted(reading.echoes_s) for reading in updater.survey.network]
        fleet.barrier()
    print(json.dumps({"clusters": updater.clusters, "uplinks": uplinks, "echoes": echoes, "taken_s": taken_s}))


if __name__ == "__main__":
    main()
