"""A rank of a job that loses a whole cluster and then a temporary server: `syncline run --keep-going ... this file`.

A survivor prints as JSON what it knows at the end, and how long it went without a step at most.
"""

import hashlib
import json
import os
import signal
import time

import torch

import syncline

WHOLE_CLUSTER = (2, 3)
NUM_STEPS = 24
CLUSTER_DIES_AT, SERVER_DIES_AT = 5, 14


def main() -> None:
    with syncline.init(
        timeout_s=600, silence_s=600
    ) as fleet:  # the kernel tells of the dead, and their silence does not
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
        rule = syncline.Clustered(period=4, features=("kind",), within=syncline.updates.TemporaryServer(quorum=0.3))
        model, optimizer = syncline.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.05), rule, samples="batch"
        )
        generator = torch.Generator().manual_seed(fleet.rank)
        gaps, last, doomed = [], time.monotonic(), -1
        for step in range(NUM_STEPS):
            inputs = torch.randn(8, 32, generator=generator)
            (model(inputs) - inputs.flip(1)).square().mean().backward()
            is_doomed = step == SERVER_DIES_AT and doomed == fleet.rank
            if is_doomed or (step == CLUSTER_DIES_AT and fleet.rank in WHOLE_CLUSTER):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            if step == SERVER_DIES_AT - 2:
                # One step later a slow member may know of the death already, and be the server itself.
                doomed = optimizer.statistics().servers[0]
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        statistics = optimizer.statistics()
        parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    found = {
        "rank": fleet.rank,
        "clusters": statistics.clusters,
        "servers": statistics.servers,
        "weights": statistics.weights,
        "dead": statistics.dead,
        "num_replaced": statistics.num_replaced_servers,
        "longest_gap_s": max(gaps),
        "digest": hashlib.sha256(parameters).hexdigest()[:16],
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
