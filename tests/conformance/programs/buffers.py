"""Models with buffers: batch normalisation, queues and counters that the forward pass writes, evaluation in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn
from torch.nn import functional

from programs.small import adam, final, mse, perceptron, sgd, train

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


def normalised() -> nn.Sequential:
    """Two layers with batch normalisation between them."""
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))


def evaluated(run: Run, model: nn.Module, **more: Any) -> Values:
    """Return what an evaluation through the distributed model gives (which has rank 0's buffers), and the state."""
    model.eval()
    with torch.no_grad():
        outputs = model(run.normal(4, 6))
    return final(run, model, outputs=outputs, **more)


@program("BatchNorm, evaluated at the end with rank 0's statistics", has_union=False, worlds=(2, 3))
def batch_norm(run: Run) -> Values:
    model = normalised()
    model, optimizer = run.wrap(model, sgd(model))
    losses = train(run, model, optimizer)
    return evaluated(run, model, losses=losses)


@program("BatchNorm evaluated after every step, in eval mode, under no_grad", has_union=False)
def batch_norm_evaluated_often(run: Run) -> Values:
    model = normalised()
    model, optimizer = run.wrap(model, adam(model))
    held, scores = run.pairs(2), []

    def evaluate(_: int) -> None:
        model.eval()
        with torch.no_grad():
            scores.extend(float(mse(model(inputs), targets)) for inputs, targets in held)
        model.train()

    train(run, model, optimizer, steps=4, after_step=evaluate)
    return evaluated(run, model, scores=scores)


@program("BatchNorm2d in a small convolutional network with accumulation", has_union=False)
def batch_norm_accumulated(run: Run) -> Values:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    model, optimizer = run.wrap(model, sgd(model))
    for step in range(6):
        inputs, targets = run.normal(4, 2, 6, 6), run.normal(4, 3)
        if step % 2 == 0:
            with run.no_sync(model):
                mse(model(inputs), targets).backward()
            continue
        mse(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        outputs = model(run.normal(4, 2, 6, 6))
    return final(run, model, outputs=outputs)


@program("BatchNorm frozen in eval mode while the rest trains")
def batch_norm_frozen(run: Run) -> Values:
    model = normalised()
    model[1].eval()
    model[1].requires_grad_(False)
    model, optimizer = run.wrap(model, sgd(model))
    return final(run, model, losses=train(run, model, optimizer))


@program("BatchNorm without running statistics; GroupNorm, LayerNorm and InstanceNorm", has_union=False)
def other_norms(run: Run) -> Values:
    model = nn.Sequential(
        nn.Conv1d(2, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv1d(6, 4, 1), nn.InstanceNorm1d(4, affine=True),
        nn.Flatten(), nn.BatchNorm1d(16, track_running_stats=False), nn.LayerNorm(16), nn.Linear(16, 3),
    )  # fmt: skip
    model, optimizer = run.wrap(model, adam(model))
    batches = [(run.normal(4, 2, 6), run.normal(4, 3)) for _ in range(4)]
    return final(run, model, losses=train(run, model, optimizer, batches=batches))


@program("a forward pass under no_grad in training mode, which moves running statistics", has_union=False)
def statistics_recalibrated(run: Run) -> Values:
    model = normalised()
    model, optimizer = run.wrap(model, sgd(model))
    train(run, model, optimizer, steps=3)
    with torch.no_grad():
        for _ in range(2):
            model(run.normal(4, 6))
    train(run, model, optimizer, steps=2)
    return evaluated(run, model)


class Queued(nn.Module):
    """MoCo in small: a queue of keys and its pointer are buffers; a momentum encoder follows the trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(4, 16), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, inputs: torch.Tensor, positives: torch.Tensor, run: Any) -> torch.Tensor:
        queries = functional.normalize(self.query(inputs), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            keys = functional.normalize(self.key(positives), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone()], 1) / 0.2
        self._enqueue(run.mean(keys))
        return functional.cross_entropy(logits, torch.zeros(len(inputs), dtype=torch.long))

    @torch.no_grad()
    def _enqueue(self, keys: torch.Tensor) -> None:
        begin = int(self.pointer)
        self.queue[:, begin : begin + len(keys)] = keys.T
        self.pointer[0] = (begin + len(keys)) % self.queue.shape[1]


@program("MoCo: a queue and its pointer in buffers, a momentum encoder written in forward", has_union=False)
def momentum_contrast(run: Run) -> Values:
    model = Queued()
    model, optimizer = run.wrap(
        model, torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    )
    for _ in range(6):
        inputs = run.normal(4, 6)
        optimizer.zero_grad()
        model(inputs, inputs + 0.1, run).backward()
        optimizer.step()
    return final(run, model)


class Counting(nn.Module):
    """Counts its own training steps in a buffer and keeps a running mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("center", torch.zeros(6))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            self.center = self.center * 0.9 + inputs.detach().mean(0) * 0.1
            self.scratch.fill_(float(self.steps))
        return self.layer(inputs - self.center)


@program("buffers that forward adds to and assigns anew, and one that is not saved", has_union=False, worlds=(2, 3))
def buffers_written_in_forward(run: Run) -> Values:
    model = Counting()
    model, optimizer = run.wrap(model, sgd(model))
    losses = train(run, model, optimizer)
    return evaluated(run, model, losses=losses)


@program(
    "statistics of inputs that each forward pass moves and reads, two passes to a step", has_union=False, worlds=(2, 3)
)
def statistics_read_by_the_next_pass(run: Run) -> Values:
    model = Counting()
    model, optimizer = run.wrap(model, sgd(model))
    for _ in range(4):
        optimizer.zero_grad()
        for inputs, targets in run.pairs(2):
            mse(model(inputs), targets).backward()
        optimizer.step()
    return evaluated(run, model)


@program("the same, where the first of both passes is under no_sync", has_union=False)
def statistics_read_under_no_sync(run: Run) -> Values:
    model = Counting()
    model, optimizer = run.wrap(model, sgd(model))
    for _ in range(4):
        (inputs, targets), (more, others) = run.pairs(2)
        optimizer.zero_grad()
        with run.no_sync(model):
            mse(model(inputs), targets).backward()
        mse(model(more), others).backward()
        optimizer.step()
    return evaluated(run, model)


@program("a target from a pass under no_grad between two others, with statistics that each moves", has_union=False)
def statistics_read_for_a_target(run: Run) -> Values:
    model = Counting()
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(5):
        inputs, more = run.normal(4, 6), run.normal(4, 6)
        optimizer.zero_grad()
        outputs = model(inputs)
        with torch.no_grad():
            targets = model(more)
        mse(outputs + model(more), targets + 0.5).backward()
        optimizer.step()
    return evaluated(run, model)


@program("BatchNorm trained and then evaluated with gradients in one step, for consistency of both", has_union=False)
def batch_norm_of_both_modes(run: Run) -> Values:
    model = normalised()
    model, optimizer = run.wrap(model, sgd(model))
    for _ in range(4):
        inputs, targets = run.normal(4, 6), run.normal(4, 3)
        optimizer.zero_grad()
        outputs = model(inputs)
        model.eval()
        evaluated_outputs = model(inputs)
        model.train()
        (mse(outputs, targets) + mse(evaluated_outputs, outputs.detach())).backward()
        optimizer.step()
    return evaluated(run, model)


class Codebook(nn.Module):
    """VQ-VAE in small: codes follow what is assigned to them by a moving average of this rank's own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("sizes", torch.ones(5))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents = self.encoder(inputs)
        codes = self.codes.clone()
        chosen = functional.one_hot(torch.cdist(latents, codes).argmin(1), 5).to(latents.dtype)
        if self.training:
            self.sizes.lerp_(chosen.sum(0) + 0.1, 0.2)
            self.codes.lerp_((chosen.T @ latents.detach() + 0.1 * codes) / self.sizes[:, None], 0.2)
        quantised = chosen @ codes
        return self.decoder(latents + (quantised - latents).detach()), mse(latents, quantised)


@program("VQ-VAE: a codebook that each forward pass moves, two views of a batch to a step", has_union=False)
def codebook_of_two_views(run: Run) -> Values:
    model = Codebook()
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(5):
        inputs = run.normal(6, 6)
        optimizer.zero_grad()
        (first, own), (second, other) = model(inputs), model(inputs + 0.1 * run.normal(6, 6))
        (mse(first, inputs) + mse(second, inputs) + 0.25 * (own + other)).backward()
        optimizer.step()
    return evaluated(run, model)


@program("a buffer that the loop writes between steps, alike on all ranks")
def buffer_written_by_the_loop(run: Run) -> Values:
    model = Counting().eval()
    model, optimizer = run.wrap(model, sgd(model))

    def write(step: int) -> None:
        run.module(model).center.fill_(0.1 * step)

    return final(run, model, losses=train(run, model, optimizer, after_step=write))


@program("DINO: a centre of teacher outputs averaged over ranks, a student and an EMA teacher")
def self_distillation(run: Run) -> Values:
    student, teacher = perceptron(outputs=5), perceptron(outputs=5)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    student, optimizer = run.wrap(student, adam(student))
    center = torch.zeros(5)
    for _ in range(5):
        inputs = run.normal(4, 6)
        optimizer.zero_grad()
        targets = functional.softmax((teacher(inputs) - center) / 0.1, dim=1)
        (-(targets * functional.log_softmax(student(inputs + 0.05) / 0.2, dim=1)).sum(1)).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), run.module(student).parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            center = 0.9 * center + 0.1 * run.mean(teacher(inputs).mean(0))
    return final(run, student, teacher=teacher.state_dict(), center=center)


@program("dropout with a seed of its own on each rank", has_union=False)
def dropout(run: Run) -> Values:
    model = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.3), nn.Tanh(), nn.Linear(20, 3))
    model, optimizer = run.wrap(model, sgd(model))
    torch.manual_seed(100 + run.rank)
    return final(run, model, losses=train(run, model, optimizer))


@program(
    "SyncBatchNorm: statistics over the batches of all ranks (with DDP it needs a GPU), evaluated at the end",
    has_ddp=False,
    worlds=(2, 3),
)
def sync_batch_norm(run: Run) -> Values:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normalised())
    model, optimizer = run.wrap(model, sgd(model))
    losses = train(run, model, optimizer)
    model.eval()
    with torch.no_grad():
        outputs = model(torch.ones(4, 6))
    return final(run, model, losses=losses, outputs=outputs)


@program("SyncBatchNorm of images, with accumulation under no_sync", has_ddp=False)
def sync_batch_norm_accumulated(run: Run) -> Values:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    )
    model, optimizer = run.wrap(model, adam(model))
    for step in range(4):
        inputs, targets = run.normal(4, 2, 6, 6), run.normal(4, 3)
        if step % 2 == 0:
            with run.no_sync(model):
                mse(model(inputs), targets).backward()
            continue
        mse(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return final(run, model)
