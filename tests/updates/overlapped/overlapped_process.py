"""One rank as a process of its own, over loopback TCP: trains, and is killed if it is rank 1."""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
from overlapped_training import one_step

import syncline
from small_regression import make_adam, make_model, parameters_of


def main() -> None:
    deadly_step, period, num_iterations = (int(argument) for argument in sys.argv[1:4])
    torch.set_num_threads(1)
    with syncline.init() as fleet:
        rule = syncline.Overlapped(period=period, quorum=2, bucket_bytes=256, max_staleness=8)
        model = make_model()
        model, optimizer = syncline.distribute(model, make_adam(model.parameters()), rule)
        step = 0
        while optimizer.iteration < num_iterations:
            if fleet.rank == 1 and step == deadly_step:
                os.kill(os.getpid(), signal.SIGKILL)
            one_step(model, optimizer, fleet.rank, step)
            step += 1
        optimizer.end_period()
        digest = hashlib.blake2b(parameters_of(model).numpy().tobytes()).hexdigest()
        counted = optimizer.statistics()
        print(f"hash {digest} lost {counted.lost} periods {counted.num_periods}", flush=True)


if __name__ == "__main__":
    main()
