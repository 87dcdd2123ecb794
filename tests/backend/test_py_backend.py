"""The shell for groups of several backends: what C++ calls there, by name.

The class that it inherits from is PyTorch's where that has one, from 2.14 on, and a stand-in elsewhere. Calls through
C++ are made by ``test_a_backend_among_others_serves_its_device``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_groups import description
from torch.distributed import distributed_c10d as c10d

from syncline.backend import creation
from syncline.backend.calls import GroupCalls
from syncline.backend.creation import SynclineProcessGroup
from syncline.testing import run_threads
from syncline.updates import private_torch

MODULE = "syncline.backend.py_backend"
CALLED = """
broadcast allreduce allreduce_sparse allreduce_coalesced reduce allgather all_gather_single allgather_coalesced
all_gather_single_coalesced gather scatter reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced
all_to_all_single alltoall send recv recv_anysource barrier monitored_barrier start_coalescing end_coalescing
set_timeout abort shutdown _set_sequence_number_for_group _get_sequence_number_for_group getBackendName
supports_splitting supports_coalescing options split eager_connect_single_device
"""
"""What it is to answer; the rest (shrinking, windows, memory, times) stays with PyTorch's own class."""


class Backend:
    """What is known of ``torch._C._distributed_c10d.Backend`` from 2.14 on: it is made of a rank and a size."""

    Options = torch._C._distributed_c10d.Backend.Options

    def __init__(self, rank: int, size: int) -> None:
        self._place = rank, size

    def rank(self) -> int:
        return self._place[0]

    def size(self) -> int:
        return self._place[1]


AMONG_OTHERS = SimpleNamespace(name=lambda: "gloo", _device_types=[])
ALONE = SimpleNamespace(name=lambda: "custom", _device_types=[])
AFTER_ANOTHER = SimpleNamespace(name=lambda: "custom", _device_types=[torch.device("cpu")])


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the shell, imported as where there is such a class."""
    base = private_torch.backend_class() or Backend
    monkeypatch.setattr(private_torch, "backend_class", lambda: base)
    before = sys.modules.pop(MODULE, None)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE)
    if before is not None:
        sys.modules[MODULE] = before


def test_it_answers_to_every_name_that_is_called_from_c_plus_plus(shell: Any) -> None:
    own = vars(shell.SynclineBackend).keys() | vars(GroupCalls).keys()
    assert [name for name in CALLED.split() if name not in own] == []


@pytest.mark.parametrize(("group", "is_among_others"), [(ALONE, False), (AMONG_OTHERS, True), (AFTER_ANOTHER, True)])
def test_a_group_that_is_ours_alone_is_no_backend_of_another(shell: Any, group: Any, is_among_others: bool) -> None:
    described = description(dist.HashStore(), 0, 1)
    described.process_group = group
    made = creation.create_group(described)
    assert isinstance(made, shell.SynclineBackend if is_among_others else SynclineProcessGroup)
    made.shutdown()


def test_a_group_is_made_of_it_and_calls_come_as_from_c_plus_plus(shell: Any) -> None:
    store = dist.HashStore()

    def on_rank(rank: int) -> None:
        described = description(store, rank, 2)
        described.process_group = AMONG_OTHERS
        group = creation.create_group(described)
        try:
            assert isinstance(group, shell.SynclineBackend)
            assert (group.rank(), group.size(), group.getBackendName()) == (rank, 2, "syncline")
            check_calls(group, rank)
            check_parts(group, rank)
        finally:
            group.shutdown()

    run_threads(2, on_rank)


def check_calls(group: Any, rank: int) -> None:
    tensor = torch.full((3,), float(rank))
    group.start_coalescing()
    group.allreduce([tensor], c10d.AllreduceOptions())
    assert group.end_coalescing().get_future().wait() == []
    assert tensor.tolist() == [1.0] * 3
    sparse = torch.tensor([0.0, rank]).to_sparse()
    group.allreduce_sparse([sparse], c10d.AllreduceOptions()).wait()
    assert sparse.to_dense().tolist() == [0.0, 1.0]
    output = torch.empty(2)
    group.all_to_all_single(output, torch.arange(2.0) + 10 * rank, [], [], c10d.AllToAllOptions()).wait()
    assert output.tolist() == [rank, 10.0 + rank]
    if rank == 0:
        group.send([torch.ones(1)], 1, 5).wait()
    else:
        assert group.recv_anysource([torch.zeros(1)], 5).wait(timedelta(0))
    group.set_timeout(timedelta(seconds=50))
    group.monitored_barrier(c10d.BarrierOptions(), False)
    assert group._get_sequence_number_for_group() == 3


def check_parts(group: Any, rank: int) -> None:
    """As a mesh splits its group: into parts of one rank, and of both."""
    assert (group.supports_splitting, group.supports_coalescing) == (True, False)
    group.eager_connect_single_device(torch.device("cuda", 0))
    part = group.split(dist.HashStore(), [rank], group.options)
    whole = group.split(dist.HashStore(), [0, 1], group.options)
    for each, total in ((part, 1.0), (whole, 2.0)):
        tensor = torch.ones(2)
        each.allreduce([tensor]).wait()
        assert tensor.tolist() == [total] * 2
    assert group.split(dist.HashStore(), [1 - rank], group.options) is None
    assert whole.split(dist.HashStore(), [rank], group.options).size() == 1


def test_the_world_is_found_behind_a_group_of_several_backends(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2.14 on such a default group is PyTorch's own, with a backend for each device."""
    described = description(dist.HashStore(), 0, 1)
    described.process_group = AMONG_OTHERS
    backend = creation.create_group(described)
    backends = {"cuda": object(), "cpu": backend}
    default = SimpleNamespace(_device_types=["cuda", "cpu"], _get_backend=lambda device: backends[device.type])
    known = SimpleNamespace(is_initialized=lambda: True, group=SimpleNamespace(WORLD=default))
    monkeypatch.setattr(creation, "dist", known)
    assert creation.find_world() is backend.state
    backends["cpu"] = object()
    assert creation.find_world() is None
    backend.shutdown()
