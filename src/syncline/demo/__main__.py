"""``python -m syncline.demo``: the training script, quiet if Ctrl-C comes while PyTorch is still being imported."""

import signal
import sys


def main() -> None:
    """Import the script, and run it."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))
    from syncline.demo.train_gpt import main as train

    train()


if __name__ == "__main__":
    main()
