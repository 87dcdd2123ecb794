"""A byte-level GPT in the manner of nanoGPT: accumulation, bf16, clipping, and checkpoints from which it goes on.

    syncline run --ranks 2 examples/nanogpt.py FOLDER
    syncline run --ranks 4 --restarts 3 examples/nanogpt.py FOLDER --steps 1000 --dtype bfloat16

It reads Python's own source. Started again, in the same FOLDER, it goes on from the newest checkpoint, on however many
ranks: step k trains on the same text. bfloat16 is what it takes on GPUs. ``SYNCLINE_ON_PREEMPTION=checkpoint`` lets it
save when it is told to end; ``slurm/nanogpt.sh`` does so.
"""

import argparse
import contextlib
import time

import torch

import syncline
from syncline.demo.gpt import GPT, GPTShape, load_corpus, nats_per_byte

NUM_SEQUENCES = 8  # in each part of a batch, over all ranks
NUM_PARTS = 4  # of a batch: gradients add up, and travel with the last one
LEARNING_RATE = 3e-3
NUM_WARM_UP_STEPS = 20
MAX_NORM = 1.0
SHOW_EVERY = 10
SAVE_EVERY = 50


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=500, help="in all, those before a restart among them")
    has_gpu = torch.cuda.is_available()  # many processors compute bfloat16 at a tenth of the speed
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16" if has_gpu else "float32")
    return parser.parse_args()


def rate_factor(step: int, num_steps: int) -> float:
    """Warm up, then fall in a straight line to a tenth."""
    return min((step + 1) / NUM_WARM_UP_STEPS, 1 - 0.9 * step / num_steps)


def main() -> None:
    """Train; rank 0 shows the loss, and the tokens of all ranks per second."""
    arguments = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = load_corpus()
    torch.manual_seed(0)
    model = GPT(GPTShape()).to(device)
    context_length = model.shape.context_length
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    with syncline.init() as fleet:
        model, optimizer = syncline.distribute(model, adamw, update=syncline.Sharded(), samples="batch")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, arguments.steps))
        begin = syncline.resume(arguments.folder, model, optimizer, schedule=schedule)
        began_s, shown = time.monotonic(), begin.iteration
        if fleet.rank == 0:
            print(f"begins after step {begin.iteration} of {arguments.steps}", flush=True)
        for step in range(begin.iteration, arguments.steps):
            mean_loss = torch.zeros((), device=device)
            for part in range(NUM_PARTS):
                batch = corpus.batch(
                    num_sequences=NUM_SEQUENCES, context_length=context_length, seed=step * NUM_PARTS + part
                )
                inputs, targets = (one.tensor_split(fleet.world_size)[fleet.rank].to(device) for one in batch)
                with contextlib.nullcontext() if part == NUM_PARTS - 1 else model.no_sync():
                    with torch.autocast(device, torch.bfloat16, enabled=arguments.dtype == "bfloat16"):
                        loss = nats_per_byte(model, inputs, targets) / NUM_PARTS
                    loss.backward()
                mean_loss += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)  # by the norm of the whole gradient
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            num_done, is_last = step + 1, step + 1 == arguments.steps
            if num_done % SHOW_EVERY == 0 or is_last:
                fleet.all_reduce(mean_loss, op="mean", weight=len(inputs))
                syncline.note(loss=mean_loss)
                num_tokens = (num_done - shown) * NUM_PARTS * NUM_SEQUENCES * context_length
                speed = num_tokens / (time.monotonic() - began_s)
                began_s, shown = time.monotonic(), num_done
                if fleet.rank == 0:
                    print(f"step {num_done}: loss {mean_loss.item():.3f}, {speed:,.0f} tokens/s", flush=True)
            if num_done % SAVE_EVERY == 0 or is_last:
                syncline.save_checkpoint(arguments.folder, model, optimizer, keep=2, wait=False, schedule=schedule)


if __name__ == "__main__":
    main()
