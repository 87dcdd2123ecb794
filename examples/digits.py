"""A perceptron learns to read scikit-learn's handwritten digits, by all-reduce or with a sharded update.

    syncline run --ranks 4 examples/digits.py                    # each rank updates its own shard
    syncline run --ranks 4 examples/digits.py --update allreduce # every rank updates everything

Both take the same steps, but for rounding; the sharded one keeps a quarter of Adam's state on each of 4 ranks.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import syncline

UPDATES = {"sharded": syncline.Sharded, "allreduce": syncline.AllReduce}
NUM_EPOCHS = 8
BATCH_SIZE = 128
NUM_TEST_IMAGES = 360


def main() -> None:
    """Train, and print the share of the test images that are read correctly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", choices=UPDATES, default="sharded")
    update = UPDATES[parser.parse_args().update]()

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with syncline.init() as fleet:
        model, optimizer = syncline.distribute(model, optimizer, update=update, samples="batch")
        for _ in range(NUM_EPOCHS):
            for batch in torch.randperm(len(images) - NUM_TEST_IMAGES).split(BATCH_SIZE):
                own = batch.tensor_split(fleet.world_size)[fleet.rank]  # parts may differ in size: means are weighted
                loss = nn.functional.cross_entropy(model(images[own]), labels[own])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            read = model(images[-NUM_TEST_IMAGES:]).argmax(dim=1)
        correct = (read == labels[-NUM_TEST_IMAGES:]).float().mean().item()
        state_kib = optimizer.num_state_bytes / 1024
        print(f"rank {fleet.rank}: {correct:.1%} of the test images read; optimizer state {state_kib:.0f} KiB")


if __name__ == "__main__":
    main()
