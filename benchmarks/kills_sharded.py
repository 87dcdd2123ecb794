"""An elastic training with ``Sharded(spares=1)`` for ``benchmarks/kills.py``, which kills its ranks and replays it.

syncline run --ranks 4 --elastic --restarts 1000 benchmarks/kills_sharded.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from kills_task import StepLog, make_model, make_optimizer, slow_loss_of

import syncline


def main(folder: Path) -> None:
    """Train until it is enough."""
    torch.set_num_threads(1)
    log = StepLog(folder)
    with syncline.init() as fleet:
        module = make_model()
        own = make_optimizer(module.parameters())
        model, optimizer = syncline.distribute(module, own, syncline.Sharded(spares=1), elastic=True)
        while not log.is_over(optimizer.iteration):
            step = optimizer.iteration
            optimizer.zero_grad()
            slow_loss_of(model, fleet.members[fleet.rank], step).backward()  # type: ignore[no-untyped-call]
            report = optimizer.training.collector.report
            assert report is not None
            assert report.ranks is not None
            counted = fleet.numbers_of(report.ranks)
            optimizer.step()
            log.write(step, counted, module.parameters(), rank=fleet.rank, epoch=fleet.epoch.number)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
