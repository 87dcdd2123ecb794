"""A perceptron learns to read scikit-learn's handwritten digits, by all-reduce or with a sharded update.

    syncline run --ranks 4 examples/digits.py                    # each rank updates its own shard
    syncline run --ranks 4 examples/digits.py --update allreduce # every rank updates everything

Both take the same steps, but for rounding; the sharded one keeps a quarter of Adam's state on each of 4 ranks.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
    dataset = TensorDataset(images[:-NUM_TEST_IMAGES], labels[:-NUM_TEST_IMAGES])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with syncline.init() as fleet:
        model, optimizer = syncline.distribute(model, optimizer, update=update)
        sampler = syncline.data.sampler(dataset)  # as many samples on each rank, so all batches count alike
        loader = DataLoader(dataset, batch_size=max(1, BATCH_SIZE // fleet.world_size), sampler=sampler)
        began_s = time.monotonic()
        for epoch in range(NUM_EPOCHS):
            sampler.set_epoch(epoch)
            for batch_images, batch_labels in loader:
                loss = nn.functional.cross_entropy(model(batch_images), batch_labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        speed = NUM_EPOCHS * len(dataset) / (time.monotonic() - began_s)
        with torch.no_grad():
            read = model(images[-NUM_TEST_IMAGES:]).argmax(dim=1)
        correct = (read == labels[-NUM_TEST_IMAGES:]).float().mean().item()
        state_kib = optimizer.num_state_bytes / 1024
        print(f"rank {fleet.rank}: {correct:.1%} of the test images read; optimizer state {state_kib:.0f} KiB")
        if fleet.rank == 0:
            print(f"{speed:,.0f} samples/s on {fleet.world_size} ranks")


if __name__ == "__main__":
    main()
