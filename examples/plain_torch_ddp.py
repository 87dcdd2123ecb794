"""A program that knows nothing of Syncline: torch.distributed and DDP over gloo, started by Syncline's launcher.

    syncline run --ranks 2 examples/plain_torch_ddp.py

It learns a random linear map. ``syncline run`` sets the same environment variables as torchrun.
"""

import torch
import torch.distributed as dist

# DDP imports this when it is first made, and its functions take the group that is there by then as their default: they
# would hold it beyond destroy_process_group(), with gloo's threads still running while the interpreter is torn down.
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS = 60


def main() -> None:
    """Train on this rank's own random data; every rank ends with the same weights."""
    dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    truth = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(8, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(NUM_STEPS):
        inputs = torch.randn(32, 8)
        loss = nn.functional.mse_loss(model(inputs), inputs @ truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {loss.item():.2e}")
    del model, optimizer  # before the group that they use
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
