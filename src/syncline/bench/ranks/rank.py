"""One rank: join gloo and Syncline's fleet once, measure what the task says, and let rank 0 write rows as they come."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import syncline
from syncline.bench.ranks.collectives import measure_collectives
from syncline.bench.ranks.training import measure_training
from syncline.bench.rows import Row, save_rows
from syncline.bench.task import Task

PATIENCE = timedelta(minutes=5)


def run_task(task: Task, rows_file: Path) -> None:
    """Run it with all other ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    with syncline.init() as fleet:  # it meets at the store that gloo has opened
        measure = measure_collectives if task.experiment == "collectives" else measure_training
        rows: list[Row] = []
        for measured in measure(task, fleet):
            rows += measured
            if fleet.rank == 0:
                save_rows(rows_file, rows)  # whatever becomes of the rest
        dist.barrier()
    dist.destroy_process_group()
