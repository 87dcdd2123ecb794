"""One rank of two hosts with a slow link: DDP and FSDP2 on a process group whose large sums are in codes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import syncline

STEPS = 4
TOPOLOGY = """
topology: two-slow-hosts
switch: core
children: [{host: "h[0-1]", uplink: 20 Mbit/s}]
"""
OPTIONS = syncline.BackendOptions(topology=syncline.Topology.parse(TOPOLOGY), host=f"h{os.environ['RANK']}")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(model: nn.Module, steps: range = range(STEPS)) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        (model(batch_of(step)) - batch_of(step)).square().mean().backward()
        optimizer.step()


def bytes_sent() -> int:
    own = f"h{dist.get_rank()}"
    sent = dist.group.WORLD.state.communicator.statistics().link_bytes  # type: ignore[attr-defined]
    return sum(count for link, count in sent.items() if (link.child, link.direction) == (own, "up"))


def parameters_of(kind: str) -> tuple[torch.Tensor, int]:
    """Return all parameters after some steps, and what this rank has sent for these."""
    model = wrap(make_model(), kind)
    before = bytes_sent()
    train(model)
    sent = bytes_sent() - before
    return all_parameters(model), sent


def wrap(model: nn.Module, kind: str) -> nn.Module:
    if kind == "whole":
        return DistributedDataParallel(model, bucket_cap_mb=0.1)
    if kind == "whole, same buckets":
        return DistributedDataParallel(model, bucket_cap_mb=0.1, find_unused_parameters=True)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model


def all_parameters(model: nn.Module) -> torch.Tensor:
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]
    return torch.cat([one.detach().reshape(-1) for one in whole])


def check_resumed(kind: str) -> None:
    """A job that is saved after half of the steps, and resumed by another group, ends as one that goes on."""
    folder = f"step-{kind}"
    codec = start_codes()
    model = wrap(make_model(), kind)
    train(model, range(STEPS // 2))
    checkpoint.save({"model": model.state_dict(), "codec": codec}, checkpoint_id=folder)
    train(model, range(STEPS // 2, STEPS))
    expected = all_parameters(model)
    for is_whole in (True, False):
        dist.destroy_process_group()
        codec = start_codes()
        model = wrap(make_model(), kind)
        state = {"model": model.state_dict()}
        checkpoint.load({**state, "codec": codec} if is_whole else state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        train(model, range(STEPS // 2, STEPS))
        assert torch.equal(all_parameters(model), expected) == is_whole, kind


def start_codes() -> syncline.GroupCodec:
    if not dist.is_initialized():
        dist.init_process_group("syncline", pg_options=OPTIONS)
    return syncline.compress_group("int4")


def main() -> None:
    dist.init_process_group("syncline", pg_options=OPTIONS)
    exact, exact_bytes = parameters_of("whole")
    sharded, sharded_bytes = parameters_of("sharded")
    assert torch.allclose(exact, sharded, atol=1e-6)
    syncline.compress_group("int8")
    for kind, all_bytes, most in (("whole", exact_bytes, 0.3), ("sharded", sharded_bytes, 0.8)):
        found, sent = parameters_of(kind)
        everyone = [torch.empty_like(found) for _ in range(2)]
        dist.all_gather(everyone, found)
        assert torch.equal(*everyone)
        far = float((exact - torch.cat([one.detach().reshape(-1) for one in make_model().parameters()])).abs().max())
        assert 0 < float((found - exact).abs().max()) < 0.01 * far
        assert sent < most * all_bytes, (kind, sent, all_bytes)  # parameters of FSDP2 move as they are
    for kind in ("whole, same buckets", "sharded"):
        check_resumed(kind)
    dist.destroy_process_group()
    print("ended")


if __name__ == "__main__":
    main()
