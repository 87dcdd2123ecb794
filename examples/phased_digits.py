"""A model of stages learns scikit-learn's digits on pairs of ranks that hold two stages at a time.

    syncline run --ranks 2 examples/phased_digits.py     # one pair
    syncline run --ranks 4 examples/phased_digits.py     # two pairs, which divide the batch and the optimizer's state

While one rank of a pair computes a stage, the other stores the one before and loads the one after it. Stages are built
one at a time, each by a function of its own, so no process ever holds the whole model.
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import syncline

NUM_EPOCHS = 5
BATCH_SIZE = 128
NUM_TEST_IMAGES = 360
WIDTHS = (64, 256, 256, 256, 256, 256, 256, 10)


def make_stage(number: int) -> nn.Module:
    """Build one stage, the same in every process."""
    torch.manual_seed(number)
    first, second = WIDTHS[number : number + 2]
    is_last = second == WIDTHS[-1]
    return nn.Sequential(nn.Linear(first, second), nn.Identity() if is_last else nn.ReLU())


def main() -> None:
    """Train, and print the share of the test images that are read correctly, and the most memory in use."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    dataset = TensorDataset(images[:-NUM_TEST_IMAGES], labels[:-NUM_TEST_IMAGES])
    stages = [lambda number=number: make_stage(number) for number in range(len(WIDTHS) - 1)]

    with syncline.init() as fleet:
        trainer = syncline.phase(
            stages,
            lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
            loss=nn.functional.cross_entropy,
        )
        num_pairs = fleet.world_size // 2
        pair = min(fleet.rank, trainer.partner) // 2  # without a topology file, ranks 0 and 1 are a pair, 2 and 3 ...
        sampler = DistributedSampler(dataset, num_replicas=num_pairs, rank=pair)  # the same samples for both of a pair
        loader = DataLoader(dataset, batch_size=max(1, BATCH_SIZE // num_pairs), sampler=sampler)
        began_s = time.monotonic()
        for epoch in range(NUM_EPOCHS):
            sampler.set_epoch(epoch)
            for batch_images, batch_labels in loader:
                trainer.step(batch_images, batch_labels)
        speed = NUM_EPOCHS * len(dataset) / (time.monotonic() - began_s)
        output = trainer.evaluate(images[-NUM_TEST_IMAGES:])
        statistics = trainer.statistics()
        if output is not None:  # on the rank of each pair that computes the last stage
            read = (output.argmax(dim=1) == labels[-NUM_TEST_IMAGES:]).float().mean().item()
            print(f"rank {fleet.rank}: {read:.1%} of the test images read; {speed:,.0f} samples/s on all pairs")
        peak_kib, num_stages = statistics.peak_parameter_bytes / 1024, len(stages)
        print(f"rank {fleet.rank}: at most {peak_kib:.0f} KiB of {num_stages} stages' parameters in memory at once")


if __name__ == "__main__":
    main()
