"""Losses by samples: every rule trains the same model on the same batches, the ranks being threads of this process.

Rules, schedules and the order of sums are those of a job, and so are the bytes that are counted; only the network takes
no time. What a rule does depends on it in one case alone, :class:`Overlapped`, whose gradients are as stale as threads
make them here. Judged is the mean of all ranks' parameters, on data that nobody trains on.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as PyTorch's users have it

import syncline
from syncline.bench.convergence import Learning, Method
from syncline.bench.ranks.local_servers import learn_with_servers
from syncline.demo import gpt
from syncline.errors import ConfigurationError
from syncline.pytorch.fleet import Fleet
from syncline.testing import run_ranks
from syncline.topology import Topology

Batch = tuple[Tensor, Tensor]
LIMIT_S = 3600.0
"""For a whole training, and each call in it: a busy machine is no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningTask:
    """What one rank learns: all ranks have the same model, and data of their own."""

    model: nn.Module
    make_optimizer: Callable[..., torch.optim.Optimizer]
    draw: Callable[[int], Batch]
    """The batch of a step."""
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    held_out: Batch


def _drawn(seed: int, step: int, rank: int, num_choices: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1009 + rank)
    return torch.randint(num_choices, (count,), generator=generator)


_corpus = functools.cache(gpt.load_corpus)


def gpt_task(rank: int, num_ranks: int, seed: int) -> LearningTask:
    """Predict the next byte of Python's library, of which each rank reads a part: 0.36 M parameters, Adam."""
    shape = gpt.GPTShape(width=96, num_layers=3, num_heads=4, context_length=48)
    text = _corpus()
    own = text.training.tensor_split(num_ranks)[rank]
    torch.manual_seed(seed)

    def draw(step: int) -> Batch:
        starts = _drawn(seed, step, rank, len(own) - shape.context_length - 1, 2)
        windows = own[starts[:, None] + torch.arange(shape.context_length + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    return LearningTask(
        model=gpt.GPT(shape),
        make_optimizer=partial(torch.optim.Adam, lr=2e-3),
        draw=draw,
        loss=gpt.nats_per_byte,
        held_out=text.validation_batch(num_sequences=32, context_length=shape.context_length),
    )


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def _convolutions() -> nn.Module:
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))


def digits_task(
    rank: int,
    num_ranks: int,
    seed: int,
    *,
    by_label: bool,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    make_model: Callable[[], nn.Module] = _perceptron,
) -> LearningTask:
    """Read handwritten digits; with ``by_label`` no rank sees more than a few of them."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError(
            "--task digits-... and convolution learn scikit-learn's digits, and it is not installed; pip install "
            "scikit-learn, or say --task gpt"
        ) from error
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order[:360], order[360:]
    own = (rest[torch.argsort(labels[rest], stable=True)] if by_label else rest).tensor_split(num_ranks)[rank]
    torch.manual_seed(seed)

    def draw(step: int) -> Batch:
        chosen = own[_drawn(seed, step, rank, len(own), 16)]
        return images[chosen], labels[chosen]

    return LearningTask(
        model=make_model(),
        make_optimizer=make_optimizer,
        draw=draw,
        loss=lambda model, inputs, targets: F.cross_entropy(model(inputs), targets),
        held_out=(images[held_out], labels[held_out]),
    )


_MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_ADAM = partial(torch.optim.Adam, lr=3e-3)
TASKS: Mapping[str, Callable[[int, int, int], LearningTask]] = MappingProxyType(
    {
        "gpt": gpt_task,
        "digits-by-label": partial(digits_task, by_label=True, make_optimizer=_MOMENTUM),
        "digits-by-label-adam": partial(digits_task, by_label=True, make_optimizer=_ADAM),
        "digits-mixed": partial(digits_task, by_label=False, make_optimizer=_MOMENTUM),
        "digits-mixed-adam": partial(digits_task, by_label=False, make_optimizer=_ADAM),
        "convolution": partial(digits_task, by_label=False, make_optimizer=_ADAM, make_model=_convolutions),
    }
)


def learn(
    task: str, method: Method, topology: Topology, seed: int, *, num_steps: int, every: int, target: float | None
) -> Learning:
    """Train until the loss is ``target``, ``num_steps`` at most, and judge after ``every`` steps."""
    num_ranks = topology.num_ranks
    tasks = [TASKS[task](rank, num_ranks, seed) for rank in range(num_ranks)]
    judge = _Judge(tasks, num_steps=num_steps, every=every, target=target)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if method.timing == "apart":
            return learn_with_servers(tasks, method, topology, num_steps=num_steps, every=every, target=target)
        with contextlib.redirect_stderr(io.StringIO()):  # what rank 0 would say of links that are not there
            run_ranks(topology, partial(_train, judge, method), timeout_s=LIMIT_S, deadline_s=LIMIT_S)
    finally:
        torch.set_num_threads(num_threads)
    return Learning(
        num_bytes=4 * sum(parameter.numel() for parameter in judge.mean.parameters()),
        curve=tuple(judge.curve),
        link_bytes={str(link): round(num / judge.curve[-1][0]) for link, num in judge.carried.items()},
    )


def _train(judge: _Judge, method: Method, fleet: Fleet) -> None:
    own = judge.tasks[fleet.rank]
    try:
        optimizer: Any = own.make_optimizer(own.model.parameters())
        model, optimizer = syncline.distribute(own.model, optimizer, make_rule(method), samples="batch", fleet=fleet)
        judge.meet(fleet)
        step, every = 0, round(judge.every * method.speed_of(fleet.topology.host_of(fleet.rank).name))
        while not judge.is_over:
            step += 1
            loss: Any = own.loss(model, *own.draw(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % every == 0:
                judge.meet(fleet)
    except BaseException:
        judge.leave()  # nobody waits for this rank
        raise


def make_rule(method: Method) -> Any:
    """Return the update rule with its settings."""
    arguments = dict(method.arguments)
    if "outer" in arguments:
        rate, momentum = arguments["outer"]
        arguments["outer"] = syncline.Nesterov(learning_rate=rate, momentum=momentum)
    return getattr(syncline, method.rule)(**arguments)


class _Judge:
    """Where all ranks meet after some steps of the fastest: the last to come judges the mean of their parameters.

    All wait meanwhile.
    """

    def __init__(self, tasks: Sequence[LearningTask], *, num_steps: int, every: int, target: float | None) -> None:
        self.tasks, self.every = tasks, every
        self.mean = deepcopy(tasks[0].model)
        self.curve: list[tuple[int, float]] = []
        self.carried: Counter[Any] = Counter()
        """Payload on each link, from the first meeting on."""
        self.is_over = False
        self._num_steps, self._target = num_steps, target
        self._fleets: dict[int, Fleet] = {}
        self._num_meetings = 0
        self._barrier = threading.Barrier(len(tasks), action=self._look, timeout=LIMIT_S)

    def meet(self, fleet: Fleet) -> None:
        """Wait for all ranks, and for the verdict."""
        self._fleets[fleet.rank] = fleet
        self._barrier.wait()

    def leave(self) -> None:
        """Let nobody wait."""
        self._barrier.abort()

    @torch.no_grad()
    def _look(self) -> None:
        carried: Counter[Any] = Counter()
        for fleet in self._fleets.values():
            carried.update(fleet.statistics().link_bytes)
        if not self._num_meetings:
            self._before = carried
        self._num_meetings += 1
        self.carried = carried - self._before
        step = (self._num_meetings - 1) * self.every
        if not step:
            return
        all_ranks = zip(*(task.model.parameters() for task in self.tasks), strict=True)
        for mean, values in zip(self.mean.parameters(), all_ranks, strict=True):
            mean.copy_(torch.stack([each.detach() for each in values]).mean(0))
        loss = float(self.tasks[0].loss(self.mean, *self.tasks[0].held_out))
        self.curve.append((step, loss))
        self.is_over = step >= self._num_steps or (self._target is not None and loss <= self._target)
