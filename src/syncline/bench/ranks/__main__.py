"""One rank: ``python -m syncline.bench.ranks TASK ROWS``; Ctrl-C is quiet while PyTorch is still being imported."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

PATIENCE = timedelta(minutes=5)


def main() -> None:
    """Run the task of the first file; rank 0 writes the rows to the second."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: all ranks may share one machine
    run_task(Path(sys.argv[1]), Path(sys.argv[2]))


def run_task(task_file: Path, rows_file: Path) -> None:
    """Join gloo and Syncline's fleet once, measure what the task says, and let rank 0 write rows as they come."""
    import torch
    import torch.distributed as dist

    import syncline
    from syncline.bench.ranks.collectives import measure_collectives
    from syncline.bench.ranks.training import measure_training
    from syncline.bench.rows import Row, save_rows
    from syncline.bench.task import Task

    task = Task.load(task_file)
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


if __name__ == "__main__":
    main()
