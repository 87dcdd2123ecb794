"""The Hugging Face Trainer on Syncline's process group: a tiny GPT-2 made from a configuration, on Python's own source.

    syncline run --ranks 2 examples/frameworks/transformers_train.py FOLDER

Nothing is downloaded. FOLDER is where the Trainer may write. It says how many samples it trained on in a second, and
its loggers are told some of what ``syncline.metrics()`` has.
"""

import sys

import torch
import torch.distributed as dist
from regression import report
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import syncline
from syncline.demo.gpt import load_corpus

NUM_STEPS = 4
BATCH_SIZE = 2
LEARNING_RATE = 0.1


class WatchedTrainer(Trainer):
    """Logs Syncline's numbers beside the loss. A callback could not: it is called after those of the loggers."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to the numbers of training steps; an evaluation's, and the last ones, stay as they are."""
        if "loss" in logs:
            syncline.note(loss=logs["loss"])
            told = syncline.metrics()
            logs |= {f"syncline/{name}": told[name] for name in ("steps", "goodput", "waited_s")}
        super().log(logs, start_time)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of 12 bytes."""

    def __init__(self, num_sequences: int) -> None:
        self.tokens = load_corpus().training[: 12 * num_sequences].view(num_sequences, 12).long()
        self.labels = self.tokens.clone()
        self.labels[:, 0] = -100  # nothing foretells the first; the Trainer would count it in its mean

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def make_model() -> GPT2LMHeadModel:
    """Return the same model on every rank, without dropout."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, embd_pdrop=0, resid_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    )


def train_alone(data: Tokens) -> GPT2LMHeadModel:
    """Return what one process learns from the batches of all ranks."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for tokens, labels in zip(data.tokens.chunk(NUM_STEPS), data.labels.chunk(NUM_STEPS), strict=True):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
    return model


def main(folder: str) -> None:
    """Train, and compare with one process."""
    syncline.huggingface()  # before TrainingArguments, which takes the group that is there
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = Tokens(NUM_STEPS * BATCH_SIZE * world_size)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=BATCH_SIZE,
        optim="sgd",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0,  # no clipping
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = make_model()
    WatchedTrainer(model=model, args=arguments, train_dataset=data).train()
    report("transformers", rank, model, train_alone(data))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
