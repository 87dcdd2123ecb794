"""One rank that Open MPI would have started: it trains with Accelerate, which is told of nothing but the one line."""

from __future__ import annotations

import torch
from accelerate import Accelerator

import syncline


def main() -> None:
    """Make a step on what each rank has, and print what Accelerate believes and what came of it."""
    syncline.huggingface("flat")
    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)  # the model of rank 0 counts
    model = torch.nn.Linear(3, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    accelerator.backward(model(torch.full((1, 3), accelerator.process_index + 1.0)).sum())
    optimizer.step()
    torch.manual_seed(0)
    expected = torch.nn.Linear(3, 1, bias=False).weight - 0.5 * 1.5  # the mean of 1 and 2
    difference = (accelerator.unwrap_model(model).weight - expected).abs().max().item()
    place = (accelerator.process_index, accelerator.local_process_index, accelerator.num_processes)
    print(f"{place} on {torch.distributed.get_backend()}, {type(model).__name__}: {difference:.0e}", flush=True)


if __name__ == "__main__":
    main()  # the group is left to the end of the process, as the Trainer leaves it
