"""Losses by samples: every rule trains the same model on the same batches, the ranks being threads of this process.

Rules, schedules and the order of sums are those of a job, and so are the bytes that are counted; only the network takes
no time. What a rule does depends on it in one case alone, :class:`Overlapped`, whose gradients are as stale as threads
make them here. Judged is the mean of all ranks' parameters, on data that nobody trains on.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch

import syncline
from syncline.bench.convergence import Learning, Method
from syncline.bench.ranks.local_servers import learn_with_servers
from syncline.bench.ranks.tasks import TASKS, LearningTask
from syncline.pytorch.fleet import Fleet
from syncline.testing import run_ranks
from syncline.topology import Topology

LIMIT_S = 3600.0
"""For a whole training, and each call in it: a busy machine is no error."""


def learn(
    task: str, method: Method, topology: Topology, seed: int, *, num_steps: int, every: int, target: float | None
) -> Learning:
    """Train until the loss is ``target``, ``num_steps`` at most, and judge after ``every`` steps."""
    num_ranks = topology.num_ranks
    tasks = [TASKS[task](rank, num_ranks, seed) for rank in range(num_ranks)]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if method.timing == "apart":
            return learn_with_servers(tasks, method, topology, num_steps=num_steps, every=every, target=target)
        judge = _Judge(tasks, num_steps=num_steps, every=every, target=target)
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
