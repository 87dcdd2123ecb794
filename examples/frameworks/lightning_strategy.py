"""Lightning with `Trainer(strategy="syncline")`: `distribute()` trains the module, here with the sharded update.

syncline run --ranks 2 examples/frameworks/lightning_strategy.py
python examples/frameworks/lightning_strategy.py 2     # Lightning starts two ranks itself
"""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from regression import NUM_STEPS, Speed, make_batch, make_model, make_optimizer, report, train_alone
from torch import nn
from torch.utils.data import DataLoader, Dataset

import syncline.lightning  # noqa: F401 - makes the strategy known


class Batches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The batches of all ranks, so that Lightning's sampler gives each rank those that are its own."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def __len__(self) -> int:
        return NUM_STEPS * self._world_size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return make_batch(index % self._world_size, index // self._world_size)


class Regression(pl.LightningModule):
    """Learns the regression of all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.speed = Speed()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return the loss of one batch."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Count the step."""
        self.speed.count_step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer, which the strategy distributes."""
        return make_optimizer(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's batches, in order."""
        dataset = Batches(self.trainer.world_size)
        sampler = torch.utils.data.DistributedSampler(
            dataset, num_replicas=self.trainer.world_size, rank=self.trainer.global_rank, shuffle=False
        )
        return DataLoader(dataset, batch_size=None, sampler=sampler)


def main(devices: str = "auto") -> None:
    """Train, and compare with one process."""
    trainer = pl.Trainer(
        strategy="syncline",  # or strategy=SynclineStrategy(update=syncline.AllReduce())
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    module = Regression()
    trainer.fit(module)
    module.speed.show()
    report("lightning", trainer.global_rank, module.model, train_alone(trainer.world_size))


if __name__ == "__main__":
    main(*sys.argv[1:])
