"""The training loops of nanoGPT and minGPT in their structure, in our own words and on a few random tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, RandomSampler

from programs.small import final

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]
VOCABULARY = 11
LENGTH = 6


class Block(nn.Module):
    """Causal attention and a small perceptron, each behind a norm."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.mix, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.perceptron = nn.Sequential(nn.Linear(width, 2 * width, bias=bias), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = [one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.mix(self.first(hidden)).chunk(3, -1)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.perceptron(self.second(hidden))


class Gpt(nn.Module):
    """Returns logits and, given targets, the loss; the head's weight is the embedding's."""

    def __init__(self, width: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, bias) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.2)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[Any, Any]:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        if targets is None:
            return self.head(self.norm(hidden)[:, [-1]]), None
        logits = self.head(self.norm(hidden))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizer(self, rate: float) -> torch.optim.Optimizer:
        """Decay matrices alone."""
        wanted = [one for one in self.parameters() if one.requires_grad]
        groups = [
            {"params": [one for one in wanted if one.dim() >= 2], "weight_decay": 0.1},
            {"params": [one for one in wanted if one.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def rate_of(step: int, *, peak: float = 1e-2, warm_up: int = 2, last: int = 6, least: float = 1e-3) -> float:
    """Linear warm-up, then a cosine down to the least rate."""
    if step < warm_up:
        return peak * (step + 1) / (warm_up + 1)
    if step > last:
        return least
    share = (step - warm_up) / (last - warm_up)
    return least + 0.5 * (1.0 + math.cos(math.pi * share)) * (peak - least)


@torch.no_grad()
def estimate_loss(model: Any, batches: dict[str, list[Any]]) -> dict[str, float]:
    """Mean losses on held-out batches, in eval mode."""
    model.eval()
    means = {}
    for split, held in batches.items():
        means[split] = float(torch.stack([model(*batch)[1] for batch in held]).mean())
    model.train()
    return means


@program(
    "nanoGPT's loop: require_backward_grad_sync, GradScaler, clipping, warm-up and cosine, evaluation on rank 0",
    has_union=False,
)
def port_nanogpt(run: Run) -> Values:
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = run.integers(VOCABULARY, 3, LENGTH + 1)
        return tokens[:, :-1], tokens[:, 1:]

    micro_steps, estimates, norms = 2, [], []
    raw = Gpt(bias=False)
    optimizer = raw.configure_optimizer(1e-2)
    model, optimizer = run.wrap(raw, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    held = {"train": [batch()], "validation": [batch(), batch()]}
    inputs, targets = batch()
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)
        if step % 2 == 0 and run.rank == 0:
            estimates.append(estimate_loss(raw, held))
        for micro_step in range(micro_steps):
            model.require_backward_grad_sync = micro_step == micro_steps - 1
            _, loss = model(inputs, targets)
            loss = loss / micro_steps
            inputs, targets = batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return final(run, model, norms=norms, estimates=estimates)


class Numbers(Dataset[torch.Tensor]):
    """Sequences that differ by rank."""

    def __init__(self, run: Run, number: int) -> None:
        self.tokens = run.integers(VOCABULARY, number, LENGTH + 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Trainer:
    """minGPT's: a loop without end over a loader that samples with replacement, and callbacks."""

    def __init__(self, run: Run, model: Gpt, dataset: Numbers, *, max_steps: int) -> None:
        self.optimizer = model.configure_optimizer(5e-3)
        self.model, self.optimizer = run.wrap(model, self.optimizer)
        self.dataset = dataset
        self.max_steps = max_steps
        self.step = 0
        self.loss: torch.Tensor = torch.zeros(())
        self.callbacks: dict[str, list[Callable[[Trainer], None]]] = defaultdict(list)

    def add_callback(self, event: str, function: Callable[[Trainer], None]) -> None:
        self.callbacks[event].append(function)

    def trigger(self, event: str) -> None:
        for function in self.callbacks[event]:
            function(self)

    def batches(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(3)
        sampler = RandomSampler(self.dataset, replacement=True, num_samples=12, generator=generator)
        loader = DataLoader(self.dataset, sampler=sampler, batch_size=4)
        while True:
            yield from loader

    def run(self) -> None:
        self.model.train()
        for inputs, targets in self.batches():
            _, self.loss = self.model(inputs, targets)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.trigger("on_batch_end")
            self.step += 1
            if self.step >= self.max_steps:
                break


@program("minGPT's Trainer: callbacks at the end of each batch, one of which evaluates and samples", has_union=False)
def port_mingpt(run: Run) -> Values:
    losses, samples = [], []
    trainer = Trainer(run, Gpt(), Numbers(run, 10), max_steps=5)

    def log(trainer: Trainer) -> None:
        losses.append(float(run.mean(trainer.loss)))

    def sample(trainer: Trainer) -> None:
        if trainer.step % 2:
            return
        trainer.model.eval()
        tokens = torch.zeros(1, 1, dtype=torch.long)
        with torch.no_grad():
            for _ in range(4):
                tokens = torch.cat([tokens, trainer.model(tokens)[0][:, -1].argmax(-1, keepdim=True)], 1)
        samples.append(tokens[0].tolist())
        trainer.model.train()

    trainer.add_callback("on_batch_end", log)
    trainer.add_callback("on_batch_end", sample)
    trainer.run()
    return final(run, trainer.model, losses=losses, samples=samples)
