"""Sums of process groups in codes: against the replay in one process; what is coded and what is not; DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_groups import run_groups

import syncline
from coded_replay import TWO_AND_THREE, Replay, gradient_of
from rank_scripts import run_script
from syncline.backend import coded_reductions
from syncline.backend.creation import SynclineProcessGroup
from syncline.errors import CheckpointError, ConfigurationError
from syncline.topology import Topology

COUNT = 17_000
OTHER_SITES = """
switch: core
children: [{host: a, ranks: 1, uplink: 20 Mbit/s}, {host: b, ranks: 4, uplink: 20 Mbit/s}]
"""
OPTIONS = syncline.BackendOptions(topology=TWO_AND_THREE)


def end_step(group: SynclineProcessGroup) -> None:
    """As if this rank's optimizer had stepped; those of other ranks are in the same process."""
    group.state.communicator.progress.end_step(is_next_begun=True)


def all_reduce(group: SynclineProcessGroup, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([values], options).wait()
    return values


@pytest.mark.parametrize("compress", ["int4", "int8", "bf16"])
def test_sums_are_those_of_the_replay_and_so_are_the_errors_of_each_place_in_a_step(compress: str) -> None:
    bits, num_ranks = {"int4": 4, "int8": 8, "bf16": 16}[compress], TWO_AND_THREE.num_ranks

    def brought(rank: int, step: int, place: int) -> torch.Tensor:
        return gradient_of(rank, 10 * step + place, num_ranks, COUNT)

    def body(group: SynclineProcessGroup) -> list[torch.Tensor]:
        syncline.compress_group(compress, group)
        found = []
        for step in range(3):
            # one more place than there are crossings of a size
            values = [brought(group.rank(), step, place) for place in range(3)]
            for work in [group.allreduce([value]) for value in values]:
                work.wait()
            found += values
            end_step(group)
        return found

    replays = [Replay(TWO_AND_THREE, bits, COUNT) for _ in range(3)]
    expected = [
        replays[place].sums([brought(rank, step, place) for rank in range(num_ranks)])
        for step in range(3)
        for place in range(3)
    ]
    for found in run_groups(num_ranks, body, options=OPTIONS):
        assert all(map(torch.equal, found, expected))


def test_reduce_scatters_are_coded_once_and_leave_what_was_brought() -> None:
    num_ranks = TWO_AND_THREE.num_ranks

    def body(group: SynclineProcessGroup) -> list[torch.Tensor]:
        syncline.compress_group("int4", group)
        found = []
        for step in range(2):
            brought = gradient_of(group.rank(), step, num_ranks, COUNT)
            kept, part = brought.clone(), torch.empty(COUNT // num_ranks)
            options = dist.ReduceScatterOptions()
            options.reduceOp = dist.ReduceOp.AVG
            group.reduce_scatter_single(part, brought, options).wait()
            assert torch.equal(kept, brought)
            found.append(part)
            end_step(group)
        return found

    replay = Replay(TWO_AND_THREE, 4, COUNT)
    expected = [
        replay.sums([gradient_of(rank, step, num_ranks, COUNT) for rank in range(num_ranks)], is_whole=False)
        for step in range(2)
    ]
    for rank, found in enumerate(run_groups(num_ranks, body, options=OPTIONS)):
        for part, whole in zip(found, expected, strict=True):
            assert torch.equal(part, whole.view(num_ranks, -1)[rank] / num_ranks)


@pytest.mark.parametrize(
    ("what", "op"),
    [
        (torch.arange(1000.0), dist.ReduceOp.SUM),
        (torch.arange(COUNT, dtype=torch.float64), dist.ReduceOp.SUM),
        (torch.arange(COUNT, dtype=torch.float32), dist.ReduceOp.MAX),
    ],
    ids=["small", "float64", "max"],
)
def test_what_is_no_large_sum_of_float32_is_exact(what: torch.Tensor, op: Any) -> None:
    def body(group: SynclineProcessGroup) -> torch.Tensor:
        syncline.compress_group("int4", group)
        return all_reduce(group, what * (1 + group.rank()), op)

    expected = what * (5 if op == dist.ReduceOp.MAX else 15)
    assert all(torch.equal(found, expected) for found in run_groups(5, body, options=OPTIONS))


def test_a_resumed_group_goes_on_with_what_codes_lacked() -> None:
    """With two calls of a size in a step, of both collectives; without the state, and on other sites, it does not."""
    num_ranks = TWO_AND_THREE.num_ranks
    saved: dict[int, dict[str, Any]] = {}

    def steps(group: SynclineProcessGroup, numbers: range) -> list[torch.Tensor]:
        found = []
        for step in numbers:
            for place in range(2):
                brought = gradient_of(group.rank(), 10 * step + place, num_ranks, COUNT)
                found.append(all_reduce(group, brought.clone()))
                found.append(torch.empty(COUNT // num_ranks))
                group.reduce_scatter_single(found[-1], brought, dist.ReduceScatterOptions()).wait()
            end_step(group)
        return found

    def train(group: SynclineProcessGroup) -> list[torch.Tensor]:
        codec = syncline.compress_group("int4", group)
        first = steps(group, range(2))
        saved[group.rank()] = codec.state_dict()
        return first + steps(group, range(2, 4))

    def resume(group: SynclineProcessGroup, state: dict[str, Any] | None = None) -> list[torch.Tensor]:
        codec = syncline.compress_group("int4", group)
        codec.load_state_dict(saved[group.rank()] if state is None else state)
        return steps(group, range(2, 4))

    whole = [found[8:] for found in run_groups(num_ranks, train, options=OPTIONS)]
    resumed = run_groups(num_ranks, resume, options=OPTIONS)
    assert all(all(map(torch.equal, *pair)) for pair in zip(whole, resumed, strict=True))
    anew = run_groups(num_ranks, lambda group: resume(group, {}), options=OPTIONS)
    assert not any(map(torch.equal, whole[0][:4], anew[0][:4]))
    other_sites = syncline.BackendOptions(topology=Topology.parse(OTHER_SITES))
    moved = run_groups(num_ranks, resume, options=other_sites)
    unsaved = run_groups(num_ranks, lambda group: resume(group, {}), options=other_sites)
    assert all(map(torch.equal, moved[0], unsaved[0]))


def test_what_is_no_state_of_codes_is_refused() -> None:
    def refuse(group: SynclineProcessGroup) -> None:
        codec = syncline.compress_group("int8", group)
        key = f"rank{group.rank()}"
        for wrong in (3, b"", b"none", b"junk", b"\x80", codec.state_dict()[key][:40]):
            with pytest.raises(CheckpointError, match="no state of a group's codes"):
                codec.load_state_dict({key: wrong})
        syncline.compress_group("off", group)
        codec.load_state_dict(codec.state_dict())
        assert float(all_reduce(group, torch.ones(COUNT))[0]) == 5.0

    run_groups(5, refuse, options=OPTIONS)


def test_codes_end_and_programs_of_ever_new_sizes_and_places_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_reductions, "MOST_SIZES", 2)
    monkeypatch.setattr(coded_reductions, "MOST_PLACES", 2)
    sizes = [COUNT, COUNT + 1, COUNT + 2]

    def body(group: SynclineProcessGroup) -> list[bool]:
        def is_exact(size: int) -> bool:
            noise = torch.rand(size, generator=torch.Generator().manual_seed(group.rank()))
            expected = sum(torch.rand(size, generator=torch.Generator().manual_seed(rank)) for rank in range(5))
            assert isinstance(expected, torch.Tensor)
            found = all_reduce(group, noise)
            assert torch.allclose(found, expected, atol=0.1)
            return torch.allclose(found, expected, atol=1e-5)

        syncline.compress_group("int8", group)
        told = [is_exact(size) for size in sizes] + [is_exact(COUNT) for _ in range(4)]
        syncline.compress_group("off", group)
        return [*told, is_exact(COUNT)]

    assert run_groups(5, body, options=OPTIONS) == [[False, False, True, *[False] * 4, True]] * 5


def test_auto_codes_slow_links_alone() -> None:
    def body(group: SynclineProcessGroup) -> bool:
        syncline.compress_group("auto", group)
        return group.state.collectives.other_way is not None

    assert run_groups(5, body, options=OPTIONS) == [True] * 5
    assert run_groups(2, body) == [False] * 2
    fast = TWO_AND_THREE.to_yaml().replace("20 Mbit/s", "10 Gbit/s").replace("30 Mbit/s", "10 Gbit/s")
    options = syncline.BackendOptions(topology=Topology.parse(fast.replace("1 Gbit/s", "10 Gbit/s")))
    assert run_groups(5, body, options=options) == [False] * 5


def test_what_cannot_be_coded_is_refused() -> None:
    def differs(group: SynclineProcessGroup) -> None:
        with pytest.raises(ConfigurationError, match=r"was told int8, int4 by ranks 0 to 1.*give all ranks the same"):
            syncline.compress_group("int4" if group.rank() else "int8", group)
        assert float(all_reduce(group, torch.ones(COUNT))[0]) == 2.0

    run_groups(2, differs)
    gated = Topology.parse(
        "topology: gated\nswitch: s\nchildren:\n"
        "  - {host: a, ranks: 2, gateway: one, uplink: 1 Gbit/s}\n  - {host: b, uplink: 1 Gbit/s}\n"
    )

    def refuse(group: SynclineProcessGroup) -> None:
        with pytest.raises(ConfigurationError, match=r"does not go with gateways.*leave gateway out"):
            syncline.compress_group("int8", group)

    run_groups(3, refuse, options=syncline.BackendOptions(topology=gated))
    with pytest.raises(ConfigurationError, match="wants a process group of Syncline's, not None"):
        syncline.compress_group("int8")


def test_data_parallel_and_fully_sharded_models_train_with_codes_and_are_resumed(tmp_path: Path) -> None:
    """Near the parameters of exact gradients, the same on both ranks, and with a quarter of the bytes."""
    script = Path(__file__).with_name("coded_group_process.py")
    for status, output in run_script(script, 2, folder=tmp_path, finalizes=True):
        assert status == 0, output
        assert output.splitlines()[-1] == "ended"
