"""Hugging Face Accelerate on Syncline's process group, by one line before it.

syncline run --ranks 2 examples/frameworks/accelerate_train.py
"""

from accelerate import Accelerator
from regression import NUM_STEPS, Speed, make_batch, make_model, make_optimizer, report, train_alone
from torch import nn

import syncline


def main() -> None:
    """Train, and compare with one process."""
    syncline.huggingface()  # before Accelerator(), which takes the group that is there
    accelerator = Accelerator()
    rank = accelerator.process_index
    model = make_model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    speed = Speed()
    for step in range(NUM_STEPS):
        inputs, targets = make_batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        speed.count_step()
    speed.show()
    losses = accelerator.gather(loss.detach().view(1))
    assert len(losses) == accelerator.num_processes
    report("accelerate", rank, accelerator.unwrap_model(model), train_alone(accelerator.num_processes))
    accelerator.end_training()  # ends the group too


if __name__ == "__main__":
    main()
