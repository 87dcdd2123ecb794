"""One rank of two under Lightning: what the tests of the strategy start."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.nn
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed as dist, nn
from torch.utils.data import DataLoader, TensorDataset

import syncline
from syncline.errors import ConfigurationError, PeerLostError
from syncline.lightning import LaunchedEnvironment, SynclineStrategy

PORTS = sys.argv[3].split(",")


class Module(pl.LightningModule):
    """A perceptron with running statistics, trained with a schedule, and validated."""

    def __init__(self, *, breaks_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.breaks_at = breaks_at
        self.losses: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if number == self.breaks_at and self.global_rank == 1:
            raise ArithmeticError("of the user's")
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(made_of(32, seed=1), batch_size=4)  # Lightning divides it between the ranks

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(made_of(8, seed=2), batch_size=4)


class Alternating(Module):
    """Steps two optimizers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        optimizer = self.optimizers()[number % 2]
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()
        for other in self.optimizers():
            other.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.layers[0], self.layers[3])]


def made_of(number: int, *, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :2].cos())


def make_trainer(strategy: Any, *, max_epochs: int = 2, **options: Any) -> pl.Trainer:
    silent = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    devices = 2 if type(strategy) is DDPStrategy else "auto"  # ours takes the launcher's word
    options |= {"accelerator": "cpu", "devices": devices, "logger": False}
    return pl.Trainer(strategy=strategy, max_epochs=max_epochs, **silent, **options)


def fit(strategy: Any, module: Module | None = None, *, path: str | None = None, **options: Any) -> Module:
    module = module or Module()
    make_trainer(strategy, **options).fit(module, ckpt_path=path)
    return module


def check_same(found: nn.Module, expected: nn.Module, *, tolerance: float) -> None:
    """Compare parameters, and running statistics on rank 0; those of other ranks DDP replaces one pass later."""
    buffers = {name for name, _ in found.named_buffers()} if dist.get_rank() else set()
    for (name, value), other in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        is_close = torch.allclose(value, other, rtol=0, atol=tolerance)
        assert name in buffers or is_close, (name, (value - other).abs().max())


def trains(_: str) -> None:
    """Clipping, accumulation, schedules, validation and manual optimization are as with DDP on gloo."""
    with pytest.raises(ConfigurationError, match="does not take find_unused_parameters"):
        SynclineStrategy(find_unused_parameters=True)
    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    by_value = options | {"gradient_clip_algorithm": "value"}
    expected = [fit(make_ddp("gloo"), **given) for given in (options, by_value, {"module": Alternating()})]
    assert expected[0].losses[-1] < expected[0].losses[0]
    end_group()
    os.environ["MASTER_PORT"] = PORTS[1]  # the other group's store
    for update in (None, syncline.AllReduce()):
        strategy = "syncline" if update is None else SynclineStrategy(update)
        found = fit(strategy, **options)
        check_same(found, expected[0], tolerance=1e-6)
        assert torch.allclose(torch.tensor(found.losses), torch.tensor(expected[0].losses), atol=1e-6), found.losses
    check_same(fit("syncline", **by_value), expected[1], tolerance=1e-6)
    for by_turns in ("syncline", SynclineStrategy(syncline.AllReduce())):
        check_same(fit(by_turns, Alternating()), expected[2], tolerance=1e-6)
    check_same(fit(make_ddp("syncline"), **options), expected[0], tolerance=1e-6)


def make_ddp(backend: str) -> DDPStrategy:
    return DDPStrategy(process_group_backend=backend, cluster_environment=LaunchedEnvironment())


def end_group() -> None:
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def resumes(folder: str) -> None:
    """A training that goes on from a checkpoint ends where one without a break does, also with other rules."""
    path = str(Path(folder) / "half.ckpt")
    whole = fit("syncline", max_epochs=3)
    trainer = make_trainer("syncline", max_epochs=1)
    trainer.fit(Module())
    trainer.save_checkpoint(path)  # after the run, by all ranks
    states = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
    assert [tuple(states[number]["exp_avg"].shape) for number in range(2)] == [(8, 6), (8,)], "states are whole"
    check_same(fit("syncline", path=path, max_epochs=3), whole, tolerance=0)
    check_same(fit(SynclineStrategy(syncline.AllReduce()), path=path, max_epochs=3), whole, tolerance=1e-6)
    check_same(fit(make_ddp("syncline"), path=path, max_epochs=3), whole, tolerance=1e-6)
    later = make_trainer("syncline")
    (metrics,) = later.validate(whole, verbose=False)
    assert abs(metrics["loss"] - whole.losses[-1]) < 1e-6
    for _ in range(2):  # the same module in another trainer
        fit(SynclineStrategy(syncline.Overlapped(period=3)), whole, max_epochs=1)
        check_all_alike(whole)


def check_all_alike(module: nn.Module) -> None:
    for parameter in module.parameters():
        total = parameter.detach().clone()
        dist.all_reduce(total)
        assert torch.allclose(total, dist.get_world_size() * parameter)


def breaks(_: str) -> None:
    """What one rank raises ends the other, which says whom it lost."""
    kind, text = (
        (ArithmeticError, "of the user's")
        if os.environ["RANK"] == "1"
        else (PeerLostError, "rank 1 .*ArithmeticError: of the")
    )
    with pytest.raises(kind, match=text):
        fit("syncline", Module(breaks_at=1))
    print("told", flush=True)
    os._exit(0)  # the process group would wait for ranks that are gone


if __name__ == "__main__":
    os.environ["MASTER_PORT"] = PORTS[0]
    warnings.simplefilter("ignore")
    {"trains": trains, "resumes": resumes, "breaks": breaks}[sys.argv[1]](sys.argv[2])
    end_group()
    print("ended", flush=True)
