"""Optimizer state as vectors: packed, averaged and taken again."""

import copy

import pytest
import torch
from torch import optim

from syncline.pytorch.distribute import distribute
from syncline.updates.clustered.moving import can_move, num_vectors
from syncline.updates.clustered.rule import Clustered
from syncline.updates.flat import combine
from thread_fleets import run_fleets


class Small(torch.nn.Module):
    """One parameter of a single element, one that lies in memory otherwise, and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t().contiguous().t())
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, inputs):
        return self.scale * inputs @ self.weight


MAKERS = {
    "adam": lambda parameters: optim.Adam(parameters, lr=0.001, amsgrad=True),
    "momentum": lambda parameters: optim.SGD(parameters, lr=0.001, momentum=0.9),
    "nadam": lambda parameters: optim.NAdam(parameters, lr=0.001),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.001),
}


def movers(make, steps):
    """Train one rank for each number of steps; return their updaters."""
    found = []

    def body(fleet, num_steps):
        model = Small()
        model, optimizer = distribute(model, make(model.parameters()), Clustered(clusters=1, features=()), fleet=fleet)
        for step in range(num_steps):
            model(torch.full((1, 2), 1.0 + step + num_steps)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(optimizer.training.updater)

    for num_steps in steps:
        run_fleets(1, lambda fleet, num=num_steps: body(fleet, num))
    return found


def states_of(updater):
    return [copy.deepcopy(dict(updater.optimizer.state.get(t, {}))) for b in updater.buckets for t in b.tensors]


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_packed_is_taken_again(name: str) -> None:
    one, other = movers(MAKERS[name], (3, 5))
    names = one._moving_state.names()
    assert can_move(names)
    vectors = one._moving_state.pack(names)
    assert len(vectors) == num_vectors(names)
    other._moving_state.unpack(names, vectors)
    for mine, theirs in zip(states_of(one), states_of(other), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "adagrad"])  # whose state is there from the start
def test_a_mean_is_that_of_those_that_have_state(name: str) -> None:
    one, other, fresh = movers(MAKERS[name], (3, 5, 0))
    names = one._moving_state.names()
    packed = [updater._moving_state.pack(names) for updater in (one, other, fresh)]
    means = [combine(list(vectors), [0.25, 0.25, 0.5]) for vectors in zip(*packed, strict=True)]
    before = [states_of(one), states_of(other)]
    fresh._moving_state.unpack(names, means)
    for mine, theirs, taken in zip(*before, states_of(fresh), strict=True):
        assert mine.keys() == taken.keys()
        for key in mine:
            expected = (torch.as_tensor(mine[key]).double() + torch.as_tensor(theirs[key]).double()) / 2
            torch.testing.assert_close(torch.as_tensor(taken[key]).double(), expected, rtol=1e-6, atol=1e-6)


def test_state_of_another_shape_cannot_move() -> None:
    (updater,) = movers(MAKERS["adam"], (1,))
    tensor = updater.buckets[0].tensors[0]
    updater.optimizer.state[tensor]["factors"] = torch.zeros(7)
    assert not can_move(updater._moving_state.names())


def test_no_state_needs_no_vectors() -> None:
    (updater,) = movers(lambda parameters: optim.SGD(parameters, lr=0.001), (2,))
    assert updater._moving_state.names() == ()
    assert num_vectors(()) == 0
