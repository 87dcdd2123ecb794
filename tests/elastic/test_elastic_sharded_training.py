"""Losses at any call of a sharded training on threads: who is left stays equal, in parameters and in state."""

import random

import pytest
import torch
from mortal_fleets import run_mortals
from test_elastic_training import (
    NUM_RANKS,
    NUM_STEPS,
    accumulated_step,
    loss_of,
    make_model,
    plain_step,
    scaled_step,
)

import syncline
from syncline.topology import Topology

HOSTS = Topology.parse('{switch: core, children: [{host: "h[0-1]", ranks: 2, uplink: 1 Gbit/s}]}')


def twice_backward_step(model, optimizer, rank, step):
    """Two passes that all see, of which the second adds to what the first one left divided."""
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.clip_grad_norm_(0.5)
    loss_of(model, rank, step, part=1).backward()
    optimizer.step()


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


ELEMENT = syncline.Sharded(bucket_bytes=128, spares=1)
KINDS = {
    "batch norm": ("batch", plain_step, adam, ELEMENT),
    "synchronised batch norm": ("sync", plain_step, momentum, ELEMENT),
    "accumulation and clipping": ("", accumulated_step, adam, ELEMENT),
    "two passes": ("", twice_backward_step, momentum, ELEMENT),
    "scaled gradients": ("", scaled_step, adam, ELEMENT),
    "whole parameters": ("", plain_step, adam, syncline.Sharded(align="parameter", bucket_bytes=128, spares=1)),
    "replicas": ("", plain_step, adam, syncline.Sharded(bucket_bytes=128, replicate="host")),
}


def train(kind, deaths):
    """Train on threads; return parameters after each step, members and state of each rank that lived."""
    norm, step_of, optimizer_of, rule = KINDS[kind]

    def body(fleet, mortal):
        model = make_model(norm)
        model, optimizer = syncline.distribute(
            model, optimizer_of(model.parameters()), rule, elastic=True, check_every=2, fleet=fleet
        )
        steps, rank = [], fleet.rank
        with mortal():
            for step in range(NUM_STEPS):
                step_of(model, optimizer, rank, step)
                steps.append([parameter.detach().clone() for parameter in model.parameters()])
        state = optimizer.state_dict()["state"]
        return steps, fleet.members, [value for values in state.values() for value in values.values()]

    return run_mortals(HOSTS if kind == "replicas" else NUM_RANKS, deaths, body)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_left_stays_equal_wherever_ranks_die(kind):
    draw = random.Random(kind)
    pairs = [(0,), (3,), (1, 2)] if kind != "replicas" else [(0,), (3,)]  # no owner with its spare
    whole = train(kind, {})
    for dead in pairs:
        deaths = {rank: draw.randrange(2, 36) for rank in dead}
        lived = train(kind, deaths)
        (first, members, state), *others = lived.values()
        assert members == tuple(lived), deaths
        for steps, other_members, other_state in others:
            assert other_members == members
            for ours, theirs in zip(steps, first, strict=True):
                assert all(map(torch.equal, ours, theirs)), f"{kind} differs after {deaths}"
            assert all(map(torch.equal, map(torch.as_tensor, other_state), map(torch.as_tensor, state)))
        for ours, theirs in zip(first[0], whole[0][0][0], strict=True):
            assert torch.equal(ours, theirs) or min(deaths.values()) < 20, "the first step was made by all"
