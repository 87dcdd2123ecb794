"""An epoch that is divided over whoever is there: each sample once, but for less than a batch."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from syncline.errors import ConfigurationError
from syncline.pytorch.control import join
from syncline.pytorch.data import ElasticSampler
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.pytorch.sample_division import SampleDivision, apportion
from syncline.updates import AllReduce

NUM_EPOCHS = 3


class FakeOptimizer:
    """Counts steps as the real one does."""

    __class__ = DistributedOptimizer  # type: ignore[assignment]  # what the sampler takes it for

    def __init__(self, iteration: int = 0) -> None:
        self.iteration = iteration
        self.hooks: list[Callable[..., None]] = []
        self.listeners: list[Callable[[Any], None]] = []
        self.changes: list[Any] = []
        """What listeners are told at the end of the next step, before its hooks are called."""

    def register_step_post_hook(self, hook: Callable[..., None]) -> None:
        self.hooks.append(hook)

    def on_membership_change(self, listener: Callable[[Any], None]) -> None:
        self.listeners.append(listener)

    def step(self) -> None:
        self.begin_step()
        self.end_step()

    def begin_step(self) -> None:
        self.iteration += 1
        for change in self.changes:
            for listener in self.listeners:
                listener(change)
        self.changes.clear()

    def end_step(self) -> None:
        for hook in self.hooks:
            hook(self, (), {})


class Loader:
    """Asks a batch sampler as torch's loader does: some batches ahead, and one more with each that it delivers."""

    __class__ = DataLoader  # type: ignore[assignment]  # as above

    def __init__(self, sampler: ElasticSampler, num_workers: int) -> None:
        self.batch_sampler, self.num_workers, self.in_order = sampler, num_workers, True
        self.prefetch_factor = 2 if num_workers else None

    def __iter__(self) -> Iterator[list[int]]:
        asked = iter(self.batch_sampler)
        loaded = [batch for batch in (next(asked, None) for _ in range(2 * self.num_workers)) if batch is not None]
        while True:
            if self.num_workers and not loaded:
                return
            batch = next(asked, None)
            loaded += [] if batch is None else [batch]
            if not loaded:
                return
            yield loaded.pop(0)


class Rank:
    """One rank of a simulated job, which is the fleet as the sampler sees it."""

    __class__ = Fleet  # type: ignore[assignment]  # what the sampler takes it for
    topology = SimpleNamespace(helpers=())
    recovery = "is there"

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.held: tuple[int, list[int]] | None = None
        """The epoch and samples of the batch that the loader has delivered."""
        self.has_ended = False

    def begin(self, iteration: int, state: dict[str, Any] | None) -> None:
        job = self.job
        settings = {"seed": 3, "paces": job.paces, "fleet": cast("Fleet", self)}
        self.sampler = ElasticSampler(range(job.size), job.batch_size, **settings)
        self.optimizer = FakeOptimizer(iteration)
        if state is not None:
            self.sampler.load_state_dict(json.loads(json.dumps(state)))
        loader = Loader(self.sampler, job.num_workers)
        self.sampler.follow(cast("Any", self.optimizer), cast("Any", loader))
        self._batches = self._loop(loader)

    def _loop(self, loader: Loader) -> Iterator[tuple[int, list[int]]]:
        for epoch in range(self.sampler.epoch, NUM_EPOCHS):
            self.sampler.set_epoch(epoch)
            for batch in loader:
                yield epoch, batch

    def take(self) -> None:
        if self.held is None and not self.has_ended:
            self.held = next(self._batches, None)
            self.has_ended = self.held is None

    @property
    def members(self) -> list[int]:
        return [rank.number for rank in self.job.ranks]

    @property
    def rank(self) -> int:
        return self.members.index(self.number)

    @property
    def epoch(self) -> Any:
        return SimpleNamespace(number=self.job.fleet_epoch)


class Job:
    """Ranks that step together, and lose, gain or restart some of them as ``dice`` has it."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.num_workers = dice.choice([0, 0, 1, 2])
        self.batch_size = dice.randint(1, 4)
        self.size = dice.randint(1, 150)
        self.paces = dice.choice([None, {number: float(dice.randint(1, 3)) for number in range(4)}])
        self.used: list[Counter[int]] = [Counter() for _ in range(NUM_EPOCHS)]
        self.num_repeatable = self.most = 0
        self.events: Counter[str] = Counter()
        self.start(dice.randint(1, 6), None, 0)

    def start(self, num_ranks: int, state: dict[str, Any] | None, iteration: int) -> None:
        self.fleet_epoch = 0
        self.ranks = [Rank(self, number) for number in range(num_ranks)]
        self.most = max(self.most, num_ranks)
        for rank in self.ranks:
            rank.begin(iteration, state)

    def lose(self) -> None:
        """Lose some in mid-step; the others make the step, and are told at its end."""
        lost = self.dice.sample(self.ranks, self.dice.randint(1, len(self.ranks) - 1))
        for rank in self.dice.sample(self.ranks, self.dice.randint(0, len(self.ranks))):
            rank.take()
        self.ranks = [rank for rank in self.ranks if rank not in lost]
        change = self.new_epoch(lost=tuple(rank.number for rank in lost))
        for rank in self.ranks:
            rank.optimizer.changes.append(change)

    def grow(self) -> None:
        """Let one or two in within a step, with what a member tells of the sampler before, or after it was told."""
        old, joined = [*self.ranks], [Rank(self, 0) for _ in range(self.dice.randint(1, 2))]
        before = self.dice.choice(old).sampler.state_dict()
        self.ranks = old + joined
        self.most = max(self.most, len(self.ranks))
        self.num_repeatable += len(joined) * 3 * self.batch_size * 2 * self.num_workers
        for number, rank in enumerate(self.ranks):
            rank.number = number
        change = self.new_epoch(joined=tuple(range(len(old), len(self.ranks))))
        for rank in old:
            rank.optimizer.listeners[0](change)
        after = self.dice.choice(old).sampler.state_dict()
        for rank in joined:
            rank.begin(old[0].optimizer.iteration, self.dice.choice([before, after]))
            rank.take()  # nothing can be found lost before

    def new_epoch(self, lost: tuple[int, ...] = (), joined: tuple[int, ...] = ()) -> Any:
        self.fleet_epoch += 1
        members = tuple(rank.number for rank in self.ranks)
        return SimpleNamespace(epoch=self.fleet_epoch, members=members, lost=lost, joined=joined)

    def restart(self) -> None:
        """Go on from what a rank saves, with another number of ranks: what was loaded and not used is drawn again."""
        states = [rank.sampler.state_dict() for rank in self.ranks]
        left = {state["epoch"]: state["left"] for state in states}  # at its end, newcomers are in the next already
        assert all(state["left"] == left[state["epoch"]] for state in states)
        self.start(self.dice.randint(1, 6), self.dice.choice(states), self.ranks[0].optimizer.iteration)

    def step(self) -> bool:
        """Make one step; False if all is done."""
        for rank in self.ranks:
            rank.take()
        assert len({rank.held and rank.held[0] for rank in self.ranks}) == 1, "all have as many batches of each epoch"
        for rank in self.ranks:
            if rank.held is None:
                return False
            self.used[rank.held[0]].update(rank.held[1])
            rank.held = None
            rank.optimizer.begin_step()
        old = [*self.ranks]
        if len(old) < 8 and self.dice.random() < 0.1:
            self.events["grow"] += 1
            self.grow()
        for rank in old:
            rank.optimizer.end_step()
        return True

    def run(self) -> None:
        while True:
            if self.dice.random() < 0.1:
                self.events["restart"] += 1
                self.restart()
            while len(self.ranks) > 1 and self.dice.random() < 0.1:
                self.events["lose"] += 1
                self.lose()
            if not self.step():
                return


def test_each_sample_is_taken_once_an_epoch_but_for_less_than_a_batch_whatever_happens() -> None:
    events: Counter[str] = Counter()
    for seed in range(100):
        job = Job(random.Random(seed))
        job.run()
        num_repeated = sum(count - 1 for used in job.used for count in used.values())
        assert num_repeated <= job.num_repeatable, seed
        for used in job.used:
            left_out = job.most - 1  # fewer than ranks
            assert job.size - len(used) < job.most * job.batch_size + max(left_out, 1), seed
        events += job.events
    assert min(events.values()) > 30
    assert len(events) == 3


class Alone:
    """A fleet of one rank."""

    __class__ = Fleet  # type: ignore[assignment]  # as above
    members, rank, recovery = (0,), 0, None
    topology, epoch = SimpleNamespace(helpers=()), SimpleNamespace(number=0)


def one_rank(size: int, **settings: Any) -> tuple[ElasticSampler, FakeOptimizer]:
    return ElasticSampler(range(size), fleet=cast("Fleet", Alone()), **settings), FakeOptimizer()


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")  # on a machine of one core
def test_what_workers_have_loaded_and_no_step_has_used_is_not_done() -> None:
    sampler, optimizer = one_rank(40, batch_size=4, shuffle=False)
    loader = DataLoader(TensorDataset(torch.arange(40)), batch_sampler=sampler, num_workers=2)
    sampler.follow(cast("Any", optimizer), loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
        optimizer.step()
    assert next(batches)[0].tolist() == [12, 13, 14, 15]
    assert sampler.state_dict()["left"] == [[12, 40]]
    optimizer.step()
    assert [batch[0].tolist() for batch in batches] == [[*range(at, at + 4)] for at in range(16, 40, 4)]
    optimizer.step()
    assert sampler.state_dict()["left"] == [], "what no step followed counts with the next one, as in accumulation"


def test_a_sampler_refuses_what_it_cannot_divide_or_count() -> None:
    with pytest.raises(ConfigurationError, match="range has none"):
        one_rank(0, batch_size=1)
    with pytest.raises(ConfigurationError, match="batch_size must be a whole number from 1 up, not 0"):
        one_rank(1, batch_size=0)
    with pytest.raises(ConfigurationError, match=r"paces must be .* a number above 0"):
        one_rank(1, batch_size=1, paces={0: 0.0})
    sampler, optimizer = one_rank(2, batch_size=2)
    with pytest.raises(ConfigurationError, match=r"call sampler\.follow"):
        next(iter(sampler))
    with pytest.raises(ConfigurationError, match="batch_sampler=sampler"):
        sampler.follow(cast("Any", optimizer), DataLoader(TensorDataset(torch.arange(2))))
    sampler.follow(cast("Any", optimizer), DataLoader(TensorDataset(torch.arange(2)), batch_sampler=sampler))
    assert len(list(sampler)) == 1
    optimizer.step()
    with pytest.raises(ConfigurationError, match=r"epoch 0 are all taken; call sampler\.set_epoch"):
        next(iter(sampler))
    other, _ = one_rank(3, batch_size=2)
    with pytest.raises(ConfigurationError, match=r"state is of \[2, True, 0\].*has \[3, True, 0\]"):
        other.load_state_dict(sampler.state_dict())


def test_parts_are_in_proportion_to_paces() -> None:
    division = SampleDivision(left=[(0, 22)], shares=apportion(8, {0: 3.0, 1: 1.0}))
    assert [division.part(member, 0) for member in (0, 1)] == [[(0, 6)], [(6, 8)]]
    assert division.count_batches() == 3
    assert [division.part(member, 2) for member in (0, 1)] == [[(16, 21)], [(21, 22)]]
    assert division.part(0, 3) is None


def test_ranks_without_a_last_batch_join_in(run_fleets: Any) -> None:
    """Eight samples for three ranks of two: with ``uneven`` the last two are taken too, by two of the ranks."""

    def body(fleet: Fleet) -> tuple[list[int], int, list[list[int]]]:
        samples = torch.arange(8.0)
        sampler = ElasticSampler(samples, batch_size=2, shuffle=False, uneven=True, fleet=fleet)  # type: ignore[arg-type]
        loader = DataLoader(TensorDataset(samples), batch_sampler=sampler)
        model = torch.nn.Linear(1, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = distribute(model, optimizer, AllReduce(), fleet=fleet, samples="batch")
        sampler.follow(optimizer, loader)
        taken = []
        with join(model):
            for (batch,) in loader:
                taken += [int(sample) for sample in batch]
                model(batch[:, None]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return taken, optimizer.iteration, sampler.state_dict()["left"]

    taken, iterations, left = zip(*run_fleets(3, body), strict=True)
    assert taken == ([0, 1, 6], [2, 3, 7], [4, 5])
    assert iterations == (2, 2, 2)
    assert left[0] == []
