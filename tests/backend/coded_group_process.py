"""One rank of two hosts with a slow link: DDP and FSDP2 on a process group whose large sums are in codes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import syncline

STEPS = 4
TOPOLOGY = """
topology: two-slow-hosts
switch: core
children: [{host: "h[0-1]", uplink: 20 Mbit/s}]
"""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(batch_of(step)) - batch_of(step)).square().mean().backward()
        optimizer.step()


def bytes_sent() -> int:
    own = f"h{dist.get_rank()}"
    sent = dist.group.WORLD.state.communicator.statistics().link_bytes  # type: ignore[attr-defined]
    return sum(count for link, count in sent.items() if (link.child, link.direction) == (own, "up"))


def parameters_of(kind: str) -> tuple[torch.Tensor, int]:
    """Return all parameters after some steps, and what this rank has sent for these."""
    model = make_model()
    if kind == "sharded":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=0.1)
    before = bytes_sent()
    train(model)
    sent = bytes_sent() - before
    whole = [one.full_tensor() if kind == "sharded" else one for one in model.parameters()]  # type: ignore[attr-defined]
    return torch.cat([one.detach().reshape(-1) for one in whole]), sent


def main() -> None:
    options = syncline.BackendOptions(topology=syncline.Topology.parse(TOPOLOGY), host=f"h{os.environ['RANK']}")
    dist.init_process_group("syncline", pg_options=options)
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
    dist.destroy_process_group()
    print("ended")


if __name__ == "__main__":
    main()
