"""The training of ``examples/ddp_survives.py`` for ``benchmarks/kills.py``, which kills its ranks and replays it.

syncline run --ranks 4 --elastic --restarts 1000 benchmarks/kills_ddp.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from kills_task import StepLog, load_example, make_model, make_optimizer, slow_loss_of


def main(folder: Path) -> None:
    """Train until it is enough."""
    torch.set_num_threads(1)
    log, model = StepLog(folder), make_model()
    training = load_example("ddp_survives.py").Training(model, make_optimizer(model.parameters()))
    for _ in training.steps(slow_loss_of):
        change = training.change
        log.write(training.step - 1, change.members, model.parameters(), rank=change.rank, epoch=change.epoch)
        if log.is_over(training.step):
            break
    training.parallel = None  # before the group that it uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
