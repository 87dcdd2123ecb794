"""Keyword names of a group's methods are those of torch's own bindings, whichever torch is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_groups import run_groups
from torch.distributed import distributed_c10d as c10d

from syncline.backend.calls import GroupCalls
from syncline.backend.creation import SynclineProcessGroup as Group
from syncline.backend.signatures import overloads_of

OWN = [name for name in vars(GroupCalls) if overloads_of(name) and callable(getattr(GroupCalls, name))]
TIMEOUT = timedelta(seconds=60)


def test_the_bindings_tell_their_overloads() -> None:
    assert overloads_of("broadcast") == (("tensors", "opts"), ("tensor", "root", "timeout"))
    assert overloads_of("no such method") == ()
    assert len(OWN) > 25


@pytest.mark.parametrize("name", OWN)
def test_a_method_takes_every_name_that_torchs_takes(name: str) -> None:
    taken = inspect.signature(getattr(Group, name)).parameters
    for names in overloads_of(name):
        assert set(names) <= set(taken) or all(one.startswith("arg") for one in names)


def root_of_one() -> dist.BroadcastOptions:
    options = c10d.BroadcastOptions()
    options.rootRank = 1
    return options


def row(group: Group) -> torch.Tensor:
    return torch.full((2,), group.rank() + 1.0)


def forms(group: Group) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Return calls in forms of each overload; the tensor becomes what both ranks know."""
    rank, most = group.rank(), dist.ReduceOp.MAX
    return {
        "max by op": lambda t: group.allreduce(tensors=[t], op=most, timeout=TIMEOUT),
        "max by place": lambda t: group.allreduce(t, most, TIMEOUT),
        "broadcast by name": lambda t: group.broadcast(tensor=t, root=1),
        "broadcast by place": lambda t: group.broadcast(t, 1, TIMEOUT),
        "broadcast by options": lambda t: group.broadcast(tensors=[t], opts=root_of_one()),
        "gathered": lambda t: group.allgather(
            output_tensors=[torch.empty(2), t], input_tensor=t.clone(), timeout=TIMEOUT
        ),
        "gathered at once": lambda t: group.all_gather_single(output=torch.empty(4), input=t.fill_(2)),
        "scattered": lambda t: group.scatter(
            output_tensor=t, input_tensors=[torch.full((2,), 2.0)] * 2 if rank == 1 else [], root=1
        ),
        "reduced": lambda t: group.reduce_scatter(output=t, input=[t.fill_(1), t.clone()], op=dist.ReduceOp.SUM),
        "exchanged": lambda t: group.all_to_all_single(
            output=t, input=torch.full((2,), 2.0), output_split_sizes=[], input_split_sizes=[], timeout=TIMEOUT
        ),
        "sent": lambda t: (
            group.send(tensors=[t], dstRank=0, tag=3) if rank else group.recv(tensors=[t], srcRank=1, tag=3)
        ),
        "barrier": lambda t: (t.fill_(2), group.barrier(timeout=TIMEOUT))[1],
    }


def test_calls_by_every_form_do_the_same() -> None:
    def body(group: Group) -> None:
        for name, call in forms(group).items():
            tensor = row(group)
            call(tensor).wait()
            assert tensor.tolist() == [2.0, 2.0], name
        with pytest.raises(TypeError, match="unexpected keyword"):
            group.allreduce(tensors=[torch.ones(1)], root=0)

    run_groups(2, body)
