"""One rank: join, measure what the task says in turns, and let rank 0 write the rows."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: all ranks may share one machine

import torch
import torch.distributed as dist

import syncline
from syncline.bench.ranks.collectives import measure_collectives
from syncline.bench.ranks.training import measure_training
from syncline.bench.rows import save_rows
from syncline.bench.task import Task

PATIENCE = timedelta(minutes=5)


def main() -> None:
    """Run the task of the file that is named first, and write the rows to the one that is named second."""
    task, rows_file = Task.load(Path(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    with syncline.init() as fleet:  # it meets at the store that gloo has opened
        measure = measure_collectives if task.experiment == "collectives" else measure_training
        rows = measure(task, fleet)
        if fleet.rank == 0:
            save_rows(rows_file, rows)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
