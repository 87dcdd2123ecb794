"""What a user may say of a group, and where it listens."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch.distributed as dist
from thread_groups import description, run_groups

import syncline
from syncline.backend import creation
from syncline.backend.creation import choose_options, read_options
from syncline.errors import ConfigurationError, RendezvousError
from syncline.pytorch import connecting
from syncline.pytorch.environment import BackendOptions
from syncline.topology import Topology

OF_TORCH = {"rank", "world_size", "master", "timeout_s"}
"""What torch.distributed is told, and a group is not asked again."""
OF_GROWING_JOBS = {"join", "join_port", "on_preemption", "replan"}
"""A process group has the ranks and the plans that it was made with, and steps are not its own."""


def test_options_are_the_arguments_of_init() -> None:
    arguments = inspect.signature(syncline.init).parameters
    fields = {field.name: field.default for field in dataclasses.fields(BackendOptions)}
    assert fields == {name: one.default for name, one in arguments.items() if name not in OF_TORCH | OF_GROWING_JOBS}


def test_pg_options_are_options_or_a_topology() -> None:
    options = BackendOptions(silence_s=3.0)
    assert choose_options(options) is options
    assert choose_options(None) == BackendOptions()
    for topology in ("pair.yaml", Path("pair.yaml"), Topology.flat(2)):
        assert choose_options(topology) == BackendOptions(topology=topology)
    with pytest.raises(ConfigurationError, match=r"pg_options must be syncline.BackendOptions.*not \{'a': 1\}"):
        choose_options({"a": 1})


def test_an_option_goes_before_its_variable_which_goes_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_SILENCE", "5")
    monkeypatch.setenv("RANK", "7")  # of the launcher; torch.distributed was told something else
    environment = read_options(BackendOptions(), rank=1, world_size=2, timeout_s=9.0)
    assert (environment.rank, environment.world_size) == (1, 2)
    assert (environment.fabric.dead_s, environment.timeout_s, environment.fabric.stall_s) == (5.0, 9.0, 9.0)
    given = read_options(BackendOptions(silence_s=6.0, insecure=True), rank=1, world_size=2, timeout_s=9.0)
    assert given.fabric.dead_s == 6.0
    assert given.fabric.insecure


def test_a_group_runs_on_the_topology_that_it_is_given() -> None:
    text = "{topology: pair, switch: s, children: [{host: a, uplink: 1 Gbit/s}, {host: b, uplink: 1 Gbit/s}]}"
    names = run_groups(
        2,
        lambda group: group.state.communicator.topology.host_of(group.rank()).name,
        options=BackendOptions(topology=Topology.parse(text)),
    )
    assert names == ["a", "b"]


def test_a_topology_of_the_whole_job_serves_a_group_of_some_ranks_beside_another_backend() -> None:
    whole = Topology.flat(4)
    environment = read_options(BackendOptions(topology=whole), rank=0, world_size=2, timeout_s=9.0)
    part = creation._restrict(environment, [1, 3]).topology
    assert isinstance(part, Topology)
    assert [host.name for host in part.hosts] == ["h1", "h3"]
    assert creation._restrict(environment, []).topology is whole


def test_a_group_of_one_rank_needs_no_one() -> None:
    state = creation.create_state(description(dist.HashStore(), 0, 1), BackendOptions())
    assert state.communicator.world_size == 1
    state.close()


def test_without_a_secret_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "share_a_machine", lambda *_, **__: False)
    monkeypatch.setattr(connecting, "reachable_address", lambda _: "10.0.0.2")
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.2 can be reached .* no shared secret"):
        creation.create_state(description(dist.HashStore(), 0, 2), BackendOptions())


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RendezvousError, match="rank 1 did not come"):
        creation.create_state(description(dist.HashStore(), 0, 2), BackendOptions(connect_timeout_s=0.2))
