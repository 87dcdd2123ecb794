"""One of two ranks that train with FSDP, and with the sharded update: each goes on from what the other has saved."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import syncline


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def train(model: nn.Module, optimizer: Any, first: int, *, rank: int = 0, num_ranks: int = 1) -> None:
    for iteration in range(first, first + 2):
        inputs = torch.linspace(-1, 1 + iteration, 8 * 7).view(8, 7)[rank::num_ranks]
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main(folder: Path) -> None:
    """Train two steps with FSDP, two with the sharded update, two with FSDP, and compare with one process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model, optimizer = make()
    model = fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    train(model, optimizer, 0, rank=rank, num_ranks=num_ranks)
    parameters, states = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id=folder / "fsdp")

    with syncline.init():
        ours, inner = make()
        ours, distributed = syncline.distribute(ours, inner, syncline.Sharded())
        syncline.load_checkpoint(folder / "fsdp", ours, distributed)
        train(ours, distributed, 2, rank=rank, num_ranks=num_ranks)
        syncline.save_checkpoint(folder / "ours", ours, distributed)

    parameters, states = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": states}
    dcp.load(state, checkpoint_id=folder / "ours")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, 4, rank=rank, num_ranks=num_ranks)

    alone, plain = make()
    for first in (0, 2, 4):
        train(alone, plain, first)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.full_tensor(), alone.get_parameter(name), rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
