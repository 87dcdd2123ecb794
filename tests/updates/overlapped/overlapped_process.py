"""A user's script with the overlapped update: trains a small model, saves when periods end, and can be killed.

Prints the ``hash`` of the parameters, who is ``lost``, and how many ``periods`` have ended.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal

import torch
from overlapped_training import one_step

import syncline
from small_regression import make_adam, make_model, parameters_of


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", type=json.loads, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--victims", type=int, nargs="*", default=[], help="ranks that kill themselves")
    parser.add_argument("--deadly-step", type=int, default=-1, help="an iteration of the fleet")
    parser.add_argument("--save", help="write a checkpoint each time a period has ended")
    parser.add_argument("--save-on-failure", help="where a checkpoint goes when too few are left")
    parser.add_argument("--resume", help="begin with this checkpoint")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    with syncline.init(timeout_s=30.0) as fleet:
        model = make_model()
        rule = syncline.Overlapped(bucket_bytes=256, **options.rule)
        model, optimizer = syncline.distribute(
            model, make_adam(model.parameters()), rule, samples="batch", save_on_failure=options.save_on_failure
        )
        done = syncline.load_checkpoint(options.resume, model, optimizer)["iteration"] if options.resume else 0
        if optimizer.is_server:
            optimizer.serve()
            return
        first = done
        step = 0
        while done < options.iterations:
            if fleet.rank in options.victims and done >= options.deadly_step:
                os.kill(os.getpid(), signal.SIGKILL)
            one_step(model, optimizer, fleet.rank, first + step)
            step += 1
            done = optimizer.iteration
            if options.save and optimizer.training.updater.is_at_period_start:
                syncline.save_checkpoint(options.save, model, optimizer, extra={"iteration": done})
        optimizer.end_period()
        digest = hashlib.blake2b(parameters_of(model).numpy().tobytes()).hexdigest()
        (counted,) = fleet.statistics().updates
        print(f"hash {digest} lost {counted.lost} periods {counted.num_periods}", flush=True)


if __name__ == "__main__":
    main()
