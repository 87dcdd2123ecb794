"""One rank of two racks, as a process over loopback: trains with replicas, and compares with a process alone."""

from __future__ import annotations

import copy

import torch
from torch import nn

import syncline


def main() -> None:
    """Train both, and compare parameters with one process to rounding, and with all ranks to the bit."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    alone = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 7)).double()
    model = copy.deepcopy(alone)
    rule = syncline.Sharded(replicate=["rack-a", "rack-b"], bucket_bytes=8000)
    with syncline.init(topology="two-racks-5-3") as fleet:
        plain = torch.optim.AdamW(alone.parameters(), lr=0.01)
        model, optimizer = syncline.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.01), rule)
        for _ in range(4):
            inputs = torch.randn(16, 33, dtype=torch.float64)
            alone(inputs).square().mean().backward()
            model(inputs[fleet.rank :: 8]).square().mean().backward()
            for each in (plain, optimizer):
                each.step()
                each.zero_grad()
        syncline.synchronize()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            everyone = torch.zeros(8 * ours.numel(), dtype=torch.float64)
            fleet.all_gather(everyone, ours.detach().reshape(-1).clone())
            assert all(torch.equal(part, ours.detach().reshape(-1)) for part in everyone.split(ours.numel()))
    print("equal", flush=True)


if __name__ == "__main__":
    main()
