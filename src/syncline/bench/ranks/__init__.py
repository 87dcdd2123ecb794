"""What runs on each rank of a benchmark: ``python -m syncline.bench.ranks TASK ROWS``. It imports torch."""
