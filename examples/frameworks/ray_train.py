"""Ray Train starts the workers, Syncline trains: a perceptron learns scikit-learn's handwritten digits.

    pip install "syncline[ray]" scikit-learn
    python examples/frameworks/ray_train.py --workers 2 --topology cluster.yaml

Without a Ray cluster, the workers are processes of this machine.
"""

import argparse

import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline
from syncline.ray import TopologyConfig

NUM_EPOCHS = 8
BATCH_SIZE = 128
NUM_TEST_IMAGES = 360


def train() -> None:
    """Train in one worker, and print the share of the test images that are read correctly."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    dataset = TensorDataset(images[:-NUM_TEST_IMAGES], labels[:-NUM_TEST_IMAGES])
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with syncline.init() as fleet:  # Ray has told it everything
        model, optimizer = syncline.distribute(model, optimizer, update=syncline.Sharded())
        sampler = syncline.data.sampler(dataset)
        loader = DataLoader(dataset, batch_size=max(1, BATCH_SIZE // fleet.world_size), sampler=sampler)
        for epoch in range(NUM_EPOCHS):
            sampler.set_epoch(epoch)
            for batch_images, batch_labels in loader:
                nn.functional.cross_entropy(model(batch_images), batch_labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            read = model(images[-NUM_TEST_IMAGES:]).argmax(dim=1)
        correct = (read == labels[-NUM_TEST_IMAGES:]).float().mean().item()
        where = f"rank {fleet.rank} of {fleet.world_size} on {fleet.topology.host_of(fleet.rank).name}"
        print(f"{where}: {correct:.1%} of the test images read")


def main() -> None:
    """Run the training; what workers print is seen here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--topology", help="a file, or the name of a shipped topology (default: one switch for all)")
    parser.add_argument("--storage", help="where Ray keeps its results (default: ~/ray_results)")
    arguments = parser.parse_args()
    trainer = TorchTrainer(
        train,
        torch_config=TopologyConfig(topology=arguments.topology),
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        run_config=RunConfig(storage_path=arguments.storage),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
