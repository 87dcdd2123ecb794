"""A job that grows, as threads over loopback: members, newcomers that ask them, and one process that replays it all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from mortal_fleets import DiedError
from torch import nn

import syncline
from meeting_stores import DictStore
from syncline.endpoints import parse_endpoint
from syncline.fabric import FabricOptions
from syncline.pytorch.epochs import FleetGrowth
from syncline.pytorch.fleet import Fleet
from syncline.runtime import CommunicationLoop, Communicator, communicators_in_memory
from syncline.runtime.joining import Entry, Growth
from syncline.testing import run_threads
from syncline.topology import Topology

OPTIONS = FabricOptions(job_id="growing", secret=b"s" * 32, shares_memory=False, connect_s=60.0)
MACHINE = "box"
PATIENCE_S = 90.0
_drawing = threading.Lock()


class Net(nn.Module):
    """With what may be forgotten: a parameter under two names, one that is frozen, one that is used now and then."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encode = nn.Linear(6, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width)
        self.decode = nn.Linear(6, width, bias=False)
        self.decode.weight = self.encode.weight
        self.rare = nn.Parameter(torch.randn(width))
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.register_buffer("offset", torch.randn(width))

    def forward(self, x: torch.Tensor, *, is_rare: bool) -> torch.Tensor:
        hidden = torch.tanh(self.middle(self.norm(self.encode(x)) * self.frozen + self.offset))
        return (hidden * self.rare if is_rare else hidden) @ self.decode.weight


def make_model(seed: int, width: int) -> Net:
    """Return a model; each rank begins with other values."""
    with _drawing, torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(width).double()


def batch(number: int, step: int) -> torch.Tensor:
    """Members have batches of other sizes, which change."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(3 + (number + step) % 3, 6, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, inputs: torch.Tensor, step: int) -> torch.Tensor:
    """Return a mean over the batch."""
    return (model(inputs, is_rare=step % 3 == 0) - inputs).square().mean()


@dataclass
class Ended:
    """What a rank had at the end."""

    members: tuple[int, ...]
    state: dict[str, torch.Tensor]
    """Parameters and buffers."""
    optimizer_state: dict[int, dict[str, Any]]
    num_state_bytes: int
    changes: list[syncline.MembershipChange]
    sent_bytes: list[int]
    """What it had sent when it was told of each change: of ranks that came, on the larger fabric."""


@dataclass
class GrowingJob:
    """``come``: for each newcomer the members at whose sight it asks to come in; all end ``num_last`` steps after the
    job has ``target`` ranks. ``losses``: at which step a number dies."""

    rule: Any
    members: int
    come: list[tuple[int, ...]]
    target: int
    losses: Mapping[int, int] = field(default_factory=dict)
    elastic: Any = True
    width: int = 12
    num_last: int = 4
    before_step: Callable[[Fleet, Any, nn.Module], None] = lambda *_: None
    """Called by each rank before each step of the job."""
    counted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Whose batches counted in which step."""
    _seen: threading.Condition = field(default_factory=threading.Condition)
    _address: tuple[str, int] = ("", 0)
    _members: set[tuple[int, ...]] = field(default_factory=set)

    def run(self) -> dict[int, Any]:
        """Return what each rank that lived had at the end, by its number."""
        store = DictStore()

        def on_rank(place: int) -> Ended:
            fleet = (
                self._member(place, store) if place < self.members else self._newcomer(self.come[place - self.members])
            )
            with fleet:
                return self._train(fleet, place)

        torch.set_num_threads(1)
        results = run_threads(self.members + len(self.come), on_rank, catch=DiedError)
        return {number: result for number, result in enumerate(results) if not isinstance(result, DiedError)}

    def replay(self) -> tuple[Net, torch.optim.Optimizer]:
        """Train in one process over the union of the batches that counted in each step."""
        model = make_model(0, self.width)
        optimizer = make_optimizer(model)
        for step, numbers in sorted(self.counted.items()):
            optimizer.zero_grad()
            batches = [batch(number, step) for number in numbers]
            total = sum(map(len, batches))
            for one in batches:
                (loss_of(model, one, step) * (len(one) / total)).backward()
            optimizer.step()
        return model, optimizer

    def _member(self, rank: int, store: DictStore) -> Fleet:
        communicator = Communicator.connect(
            rank=rank,
            world_size=self.members,
            topology=Topology.flat(self.members),
            store=store,
            options=OPTIONS,
            timeout_s=PATIENCE_S,
        )
        return _growing(communicator)

    def _newcomer(self, members: tuple[int, ...]) -> Fleet:
        with self._seen:
            assert self._seen.wait_for(lambda: members in self._members, PATIENCE_S), f"{members} were never seen"
        loop, service = CommunicationLoop("newcomer"), _listen()
        loop.start()
        entry = Entry(
            loop=loop,
            options=OPTIONS,
            own_address="127.0.0.1",
            machine=MACHINE,
            join_address=service.join_address,
            addresses=[self._address],
        )
        entry.ask()
        return _growing(*communicators_in_memory(1), service=service, entry=entry)

    def _train(self, fleet: Fleet, seed: int) -> Ended:
        model = make_model(seed, self.width)
        model, optimizer = syncline.distribute(
            model,
            make_optimizer(model),
            self.rule,
            samples="batch",
            elastic=self.elastic,
            check_every=2,
            fleet=fleet,
        )
        changes: list[syncline.MembershipChange] = []
        sent_bytes: list[int] = []
        optimizer.on_membership_change(changes.append)
        optimizer.on_membership_change(lambda _: sent_bytes.append(fleet.statistics().fabric.sent_bytes))
        num_whole = 0
        while num_whole < self.num_last:
            step, number = optimizer.iteration + 1, fleet.members[fleet.rank]
            self.before_step(fleet, optimizer, model)
            if self.losses.get(number) == step:
                fleet.base.abort()
                raise DiedError
            optimizer.zero_grad()
            loss_of(model, batch(number, step), step).backward()
            counted = self.counted[step] = fleet.numbers_of(optimizer.training.collector.report.ranks)
            optimizer.step()
            # all count the same steps so: of one loss a rank may hear at the end of a step, and another in the next
            has_changed = number >= self.members or any(change.iteration <= step for change in changes)
            num_whole += has_changed and len(counted) == self.target
            if fleet.rank == 0:
                self._show(fleet)
        return Ended(
            members=fleet.members,
            state={name: value.detach().clone() for name, value in model.state_dict().items()},
            optimizer_state=optimizer.state_dict()["state"],
            num_state_bytes=optimizer.num_state_bytes,
            changes=changes,
            sent_bytes=sent_bytes,
        )

    def _show(self, fleet: Fleet) -> None:
        with self._seen:
            assert fleet.join_address is not None
            self._address = parse_endpoint(fleet.join_address, default_port=0, what="a member")
            self._members.add(fleet.members)
            self._seen.notify_all()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return one with state for each element, and a count for each parameter."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _listen() -> Growth:
    return Growth(OPTIONS, terms={})


def _growing(communicator: Communicator, **way: Any) -> Fleet:
    fleet = Fleet(communicator)
    fleet.growth = growth = FleetGrowth(fleet, machine=MACHINE, listen=_listen, **way)
    fleet.on_close(lambda _: growth.close())
    return fleet
