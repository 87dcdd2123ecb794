"""PyTorch's mnist, imagenet and dcgan examples in their structure, in our own words and on a few random images."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from programs.small import adam, final

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


def images(number: int, size: int = 8) -> TensorDataset:
    """Return images and classes that are the same on every rank; samplers divide them."""
    generator = torch.Generator().manual_seed(17)
    return TensorDataset(
        torch.randn(number, 1, size, size, generator=generator), torch.randint(4, (number,), generator=generator)
    )


def loader(run: Run, dataset: Dataset[Any], batch_size: int) -> tuple[Any, DataLoader[Any]]:
    """Divide a dataset among the ranks."""
    sampler: Any = DistributedSampler(dataset, num_replicas=run.world, rank=run.rank, shuffle=True, seed=5)
    return sampler, DataLoader(dataset, batch_size=batch_size, sampler=sampler)


class Digits(nn.Module):
    """Two convolutions, dropout, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(24, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = self.dropout1(functional.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(functional.relu(self.fc1(x)))
        return functional.log_softmax(self.fc2(x), dim=1)


def train_epoch(model: Any, batches: Any, optimizer: Any, *, log_interval: int = 2) -> list[float]:
    model.train()
    logged = []
    for index, (data, target) in enumerate(batches):
        optimizer.zero_grad()
        loss = functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if index % log_interval == 0:
            logged.append(loss.item())
    return logged


def test_epoch(model: Any, batches: Any) -> tuple[float, int]:
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in batches:
            output = model(data)
            loss += functional.nll_loss(output, target, reduction="sum").item()
            correct += int((output.argmax(1) == target).sum())
    return loss, correct


@program(
    "PyTorch's mnist example: Adadelta, StepLR for each epoch, a test loop, the model saved at the end", has_union=False
)
def port_mnist(run: Run) -> Values:
    model = Digits()
    model, optimizer = run.wrap(model, torch.optim.Adadelta(model.parameters(), lr=1.0))
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    sampler, train_loader = loader(run, images(24), 4)
    test_loader = DataLoader(images(10), batch_size=5)
    torch.manual_seed(20 + run.rank)
    logged, tested = [], []
    for epoch in range(1, 3):
        sampler.set_epoch(epoch)
        logged += train_epoch(model, train_loader, optimizer)
        tested.append(list(test_epoch(model, test_loader)))
        scheduler.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.pt"
        if run.rank == 0:
            torch.save(run.module(model).state_dict(), path)
        names = sorted(torch.load(path)) if run.rank == 0 else []
    return final(run, model, logged=logged, tested=tested, names=names)


class AverageMeter:
    """Keeps a mean, and combines it over ranks."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float, number: int) -> None:
        self.total += value * number
        self.count += number

    def all_reduce(self, run: Run) -> None:
        both = run.mean(torch.tensor([self.total, float(self.count)])) * run.world
        self.total, self.count = float(both[0]), int(both[1])

    @property
    def average(self) -> float:
        return self.total / self.count


def residual() -> nn.Module:
    """A very small network with normalisation and a shortcut."""

    class Shortcut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.relu(self.norm(self.conv(x)) + x)

    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Shortcut(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4),
    )  # fmt: skip


def accuracy(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...] = (1, 2)) -> list[float]:
    hits = output.topk(max(topk), 1).indices == target[:, None]
    return [float(hits[:, :k].any(1).double().mean() * 100) for k in topk]


def imagenet_epoch(run: Run, batches: Any, model: Any, optimizer: Any) -> list[float]:
    losses, top1 = AverageMeter(), AverageMeter()
    model.train()
    for inputs, target in batches:
        output = model(inputs)
        loss = functional.cross_entropy(output, target)
        losses.update(loss.item(), len(inputs))
        top1.update(accuracy(output, target)[0], len(inputs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [losses.average, top1.average]


def imagenet_validate(run: Run, batches: Any, model: Any) -> list[float]:
    losses, top1, top2 = AverageMeter(), AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for inputs, target in batches:
            output = model(inputs)
            losses.update(functional.cross_entropy(output, target).item(), len(inputs))
            first, second = accuracy(output, target)
            top1.update(first, len(inputs))
            top2.update(second, len(inputs))
    for meter in (losses, top1, top2):
        meter.all_reduce(run)
    return [losses.average, top1.average, top2.average]


def checkpoint(run: Run, epoch: int, model: Any, optimizer: Any, scheduler: Any, best: float, path: Path) -> None:
    """Every rank makes the state (with Sharded it is divided between them); rank 0 writes it."""
    state = {
        "epoch": epoch + 1,
        "state_dict": run.module(model).state_dict(),
        "best": best,
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    if run.rank == 0:
        torch.save(state, path)
    run.mean(torch.zeros(1))


def imagenet(run: Run, folder: Path, *, epochs: range, resumes: bool) -> Values:
    torch.manual_seed(1)
    model = residual()
    model, optimizer = run.wrap(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4))
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    best, shown, path = 0.0, [], folder / "checkpoint.pt"
    if resumes:
        saved = torch.load(path)
        assert saved["epoch"] == epochs.start
        best = saved["best"]
        run.module(model).load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    sampler, train_loader = loader(run, images(16), 4)
    _, held = loader(run, images(12), 3)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        shown.append(imagenet_epoch(run, train_loader, model, optimizer))
        shown.append(imagenet_validate(run, held, model))
        scheduler.step()
        best = max(best, shown[-1][1])
        checkpoint(run, epoch, model, optimizer, scheduler, best, path)
    model.eval()
    with torch.no_grad():
        outputs = model(torch.ones(1, 1, 8, 8))
    return final(run, model, shown=shown, best=best, outputs=outputs)


@program(
    "PyTorch's imagenet example: meters, validation of all ranks' parts, a checkpoint each epoch, resumed from it",
    has_union=False,
)
def port_imagenet(run: Run) -> Values:
    folder = run.shared_folder()
    first = imagenet(run, folder, epochs=range(2), resumes=False)
    second = imagenet(run, folder, epochs=range(2, 4), resumes=True)
    return {"first": first, "second": second}


def weights_init(module: nn.Module) -> None:
    name = type(module).__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.1)
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


@program(
    "PyTorch's dcgan example: two models with BatchNorm, three backward passes a step, fixed noise at the end",
    has_union=False,
)
def port_dcgan(run: Run) -> Values:
    generator = nn.Sequential(
        nn.ConvTranspose2d(5, 4, 4, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
        nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(4, 1, 4, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip
    generator.apply(weights_init)
    discriminator.apply(weights_init)
    discriminator, for_d = run.wrap(discriminator, adam(discriminator, 2e-3, betas=(0.5, 0.999)))
    generator, for_g = run.wrap(generator, adam(generator, 2e-3, betas=(0.5, 0.999)))
    criterion, fixed_noise, logged = nn.BCELoss(), torch.ones(2, 5, 1, 1) * 0.3, []
    sampler, batches = loader(run, images(16), 4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for real, _ in batches:
            discriminator.zero_grad()
            label = torch.full((len(real),), 1.0)
            error_real = criterion(discriminator(real), label)
            error_real.backward()
            fake = generator(run.normal(len(real), 5, 1, 1))
            label.fill_(0.0)
            error_fake = criterion(discriminator(fake.detach()), label)
            error_fake.backward()
            for_d.step()
            generator.zero_grad()
            label.fill_(1.0)
            error_g = criterion(discriminator(fake), label)
            error_g.backward()
            for_g.step()
            logged.append([error_real.item() + error_fake.item(), error_g.item()])
    with torch.no_grad():
        drawn = generator(fixed_noise)
    # the discriminator's last pass came after its last step, so statistics of other ranks than 0 are their own
    states = {"generator": final(run, generator), "discriminator": final(run, discriminator)}
    if run.rank:
        states["discriminator"] = {key: one for key, one in states["discriminator"].items() if "running" not in key}
    return states | {"logged": logged, "drawn": drawn}
