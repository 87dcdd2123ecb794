"""One rank: ``python -m syncline.bench.ranks TASK ROWS``; Ctrl-C is quiet while PyTorch is still being imported."""

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Import what measures, and run the task of the first file; rank 0 writes the rows to the second."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: all ranks may share one machine
    from syncline.bench.ranks.rank import run_task
    from syncline.bench.task import Task

    run_task(Task.load(Path(sys.argv[1])), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
