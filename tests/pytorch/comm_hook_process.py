"""One rank of two: DistributedDataParallel on gloo, whose gradients `syncline.comm_hook` averages."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed.nn
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.errors import ConfigurationError, MismatchError, PeerLostError

SMALL_BUCKETS_MB = 0.002
OPTIONS = ({}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True})


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def make_ddp(state: object = None, *, is_hooked: bool = True, **options: bool) -> DistributedDataParallel:
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=SMALL_BUCKETS_MB, **options)
    if is_hooked:
        ddp.register_comm_hook(state, syncline.comm_hook)
    return ddp


def train(ddp: nn.Module, num_steps: int = 4) -> list[torch.Tensor]:
    """Make steps on this rank's own batches; return the parameters."""
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in ddp.parameters()]


def is_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=0, atol=1e-6) for one, other in zip(found, expected, strict=True))


def num_calls(fleet: syncline.Fleet) -> int:
    return fleet.statistics().calls.get("all_reduce", 0)


def trains() -> None:
    """All settings of DDP end with the parameters of DDP on gloo alone, with a fleet and with a group."""
    expected = train(make_ddp(is_hooked=False))
    with syncline.init() as fleet:
        for options in OPTIONS:
            before = num_calls(fleet)
            assert is_close(train(make_ddp(fleet, **options)), expected), options
            assert num_calls(fleet) > before + 4, "several buckets a step go through the fleet"
        assert is_close(train(make_ddp()), expected), "None is the current fleet"
        before = num_calls(fleet)
        assert is_close(train(make_ddp(dist.group.WORLD)), expected)
        assert num_calls(fleet) == before, "these go through the group"
        joins(fleet)


def joins(fleet: syncline.Fleet) -> None:
    """DDP's join calls hooks outside of a backward pass."""
    ddp = make_ddp(fleet)
    with ddp.join(divide_by_initial_world_size=False):
        parameters = train(ddp, 2 + 2 * fleet.rank)
    everyone = fleet.all_gather_object([value.tolist() for value in parameters])
    assert len(everyone) == 2


def fails() -> None:
    """Errors come out of ``backward()`` as themselves, and the model can be trained on."""
    ddp = make_ddp()
    refused(ddp, ConfigurationError, "There is no fleet")
    fleet = syncline.init()
    if fleet.rank == 1:
        fleet.all_gather(torch.empty(2), torch.ones(1), async_op=True)
    refused(ddp, MismatchError, "all_gather")
    fleet.close(is_failing=True)
    refused(make_ddp("fleet"), ConfigurationError, "must be a fleet, a process group or None, not 'fleet'")
    dist.barrier()
    with syncline.init():
        ddp.load_state_dict(make_ddp(is_hooked=False).state_dict())
        assert is_close(train(ddp), train(make_ddp(is_hooked=False)))


def refused(ddp: nn.Module, kind: type[Exception], text: str) -> None:
    for parameter in ddp.parameters():
        parameter.grad = None
    with pytest.raises(kind, match=text):
        ddp(torch.ones(2, 16)).sum().backward()


def dies() -> None:
    """Rank 1 ends while rank 0 waits for its gradients."""
    with syncline.init() as fleet:
        ddp = make_ddp(fleet)
        if fleet.rank == 1:
            os._exit(7)
        refused(ddp, PeerLostError, "rank 1")
        print("told of rank 1", flush=True)
        os._exit(0)  # gloo's group would wait for the dead


def dies_in_its_group() -> None:
    """Rank 1 ends in a group of Syncline's: torch words the error of a call, the hook raises it."""
    plain, hooked = make_ddp(is_hooked=False), make_ddp(dist.group.WORLD)
    if dist.get_rank() == 1:
        os._exit(7)
    lost = r"PeerLostError: rank 1 \(host .*\) is lost: .*during all_reduce; rank 0 waits for it"
    refused(plain, RuntimeError, lost)
    with pytest.raises(PeerLostError, match="rank 1") as caught:
        hooked(torch.ones(2, 16)).sum().backward()
    assert caught.value.rank == 1


if __name__ == "__main__":
    dist.init_process_group("syncline" if sys.argv[1] == "dies_in_its_group" else "gloo")
    {"trains": trains, "fails": fails, "dies": dies, "dies_in_its_group": dies_in_its_group}[sys.argv[1]]()
    dist.destroy_process_group()
    print("ended", flush=True)
