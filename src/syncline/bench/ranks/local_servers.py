"""A peer: servers of sites and a global one, where nobody waits for another site.

After Kim et al., "HALoS: Hierarchical Asynchronous Local SGD over Slow Networks for Geo-Distributed Large Language
Model Training" (ICML 2025). A worker takes its site's parameters, makes some steps, and brings the site's server how
far it has come. A server adds each difference at once, and its momentum after several ("delayed Nesterov"; Liu et al.,
"Asynchronous Local-SGD training for language modeling", 2024). When enough differences have come, the site sends how
far it has come since the last answer to the global server, which is at the first site; when its parameters come back,
they are merged into the site's. What is judged are the global ones.

Who comes when follows from the workers' speeds and the transfers between sites, in steps of the fastest worker.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from syncline.bench.convergence import Learning, Method, sites_of
from syncline.bench.ranks.tasks import LearningTask
from syncline.topology import Topology

MERGED = 0.25
"""The weight of the global parameters in a site's."""


class Server:
    """Adds differences to its parameters, ``rate`` of each; after ``every`` of them its momentum, if it has one."""

    def __init__(self, parameters: Tensor, *, rate: float, momentum: float, every: int) -> None:
        self.parameters = parameters.clone()
        self._rate, self._momentum, self._every = rate, momentum, every
        self._gathered, self._velocity = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self._num_added = 0

    def add(self, difference: Tensor) -> None:
        """Take how far someone has come."""
        self.parameters.add_(difference, alpha=self._rate)
        self._gathered.add_(difference)
        self._num_added += 1
        if self._num_added % self._every == 0:
            self._velocity.mul_(self._momentum).add_(self._gathered, alpha=1 / self._every)
            self.parameters.add_(self._velocity, alpha=self._rate * self._every * self._momentum)
            self._gathered.zero_()


@dataclass(slots=True, kw_only=True)
class _Site:
    """``home``: the rank at whose place its server is; ``start``: its parameters when they were merged last."""

    home: int
    ranks: Sequence[int]
    server: Server
    start: Tensor
    away: float
    """How many steps a transfer to the global server takes."""
    num_added: int = 0
    """Differences since then."""


class _Simulation:
    def __init__(self, tasks: Sequence[LearningTask], method: Method, topology: Topology, every: int) -> None:
        self._tasks, self._every, self._topology = tasks, every, topology
        self._optimizers: list[Any] = [task.make_optimizer(task.model.parameters()) for task in tasks]
        self._num_made = [0] * len(tasks)
        settings: Mapping[str, Any] = method.arguments
        self._local_steps, self._rounds = int(settings["local_steps"]), int(settings["rounds"])
        self._speeds = [method.speed_of(topology.host_of(rank).name) for rank in range(len(tasks))]
        begun = _flat(tasks[0])
        members = sites_of(topology)
        rates, momenta = settings["rates"], settings["momenta"]
        self._global = Server(begun, rate=rates[1] / len(members), momentum=momenta[1], every=max(1, len(members) // 2))
        self._sites = [
            _Site(
                home=ranks[0],
                ranks=ranks,
                server=Server(begun, rate=rates[0] / len(ranks), momentum=momenta[0], every=4 * len(ranks)),
                start=begun.clone(),
                away=settings["away"].get(name, 0.0),
            )
            for name, ranks in members.items()
        ]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now = 0.0
        self.carried: Counter[str] = Counter()
        self.curve: list[tuple[int, float]] = []

    def run(self, num_steps: int, target: float | None) -> None:
        for site in self._sites:
            for rank in site.ranks:
                self._begin(site, rank)
        while not self.curve or (self.curve[-1][0] < num_steps and (target is None or self.curve[-1][1] > target)):
            due = self._every * (len(self.curve) + 1)
            while self._events[0][0] <= due:
                self._now, _, event = heapq.heappop(self._events)
                event()
            self.curve.append((due, self._judge()))

    def _after(self, num_steps: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + num_steps, next(self._order), event))

    def _begin(self, site: _Site, rank: int) -> None:
        vector_to_parameters(site.server.parameters.clone(), self._tasks[rank].model.parameters())
        self._after(self._local_steps / self._speeds[rank], partial(self._bring, site, rank))

    def _bring(self, site: _Site, rank: int) -> None:
        task, optimizer, begun = self._tasks[rank], self._optimizers[rank], _flat(self._tasks[rank])
        for _ in range(self._local_steps):
            self._num_made[rank] += 1
            loss: Any = task.loss(task.model, *task.draw(self._num_made[rank]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        site.server.add(_flat(task) - begun)
        self._carry(rank, site.home)
        site.num_added += 1
        if site.num_added == self._rounds * len(site.ranks):
            self._after(site.away, partial(self._send, site, site.server.parameters - site.start))
        self._begin(site, rank)

    def _send(self, site: _Site, difference: Tensor) -> None:
        self._global.add(difference)
        self._carry(site.home, self._sites[0].home)
        self._after(site.away, partial(self._merge, site, self._global.parameters.clone()))

    def _merge(self, site: _Site, parameters: Tensor) -> None:
        site.server.parameters.lerp_(parameters, MERGED)
        site.start.copy_(site.server.parameters)
        site.num_added = 0

    def _carry(self, source: int, destination: int) -> None:
        """Count the parameters on the way there and back."""
        for link in (*self._topology.route(source, destination), *self._topology.route(destination, source)):
            self.carried[str(link)] += self._global.parameters.nbytes

    @torch.no_grad()
    def _judge(self) -> float:
        """Return the loss of the global parameters; between two events no model is in use."""
        first, kept = self._tasks[0], _flat(self._tasks[0])
        vector_to_parameters(self._global.parameters.clone(), first.model.parameters())
        loss = float(first.loss(first.model, *first.held_out))
        vector_to_parameters(kept, first.model.parameters())
        return loss


def learn_with_servers(
    tasks: Sequence[LearningTask],
    method: Method,
    topology: Topology,
    *,
    num_steps: int,
    every: int,
    target: float | None,
) -> Learning:
    """Train until the loss is ``target``, for ``num_steps`` of the fastest worker at most."""
    simulation = _Simulation(tasks, method, topology, every)
    simulation.run(num_steps, target)
    last_step, _ = simulation.curve[-1]
    return Learning(
        num_bytes=_flat(tasks[0]).nbytes,
        curve=tuple(simulation.curve),
        link_bytes={link: round(num / last_step) for link, num in simulation.carried.items()},
    )


def _flat(task: LearningTask) -> Tensor:
    return parameters_to_vector(task.model.parameters()).detach()
