"""Train a small byte-level GPT on Python's own source, on all ranks at once.

Plain PyTorch but for two lines: ``syncline.init`` and ``syncline.distribute``. Every rank takes its own part of each
batch; the model's layers, the optimizer and the loop are as they would be for one process. Start it with

    syncline demo                                             # or, by hand:
    syncline run --topology demo-1-3 examples/train_gpt.py --steps 400
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import syncline
from syncline.demo import CHECKPOINT, DEFAULT_STEPS, NUM_SEQUENCES, Update
from syncline.demo.display import (
    Closing,
    Display,
    Moment,
    choose_display,
    fleet_link_bytes,
    parameter_digests,
    show_closing,
)
from syncline.demo.gpt import GPT, Corpus, GPTShape, load_corpus, nats_per_byte
from syncline.errors import ConfigurationError
from syncline.updates import UpdateRule

SEED = 0
LEARNING_RATE = 3e-3
NUM_WARM_UP_STEPS = 20
NUM_VALIDATION_SEQUENCES = 128
REPORT_EVERY = 5
"""Steps between two exchanges of the loss and of the wish to stop."""
SAVE_EVERY = 100
UPDATES: Mapping[Update, Callable[[], UpdateRule]] = {
    Update.SHARDED: syncline.Sharded,
    Update.ALLREDUCE: syncline.AllReduce,
    Update.OVERLAPPED: lambda: syncline.Overlapped(rule="rebase", period=50),
    Update.CLUSTERED: syncline.Clustered,
    Update.LOCAL_STEPS: syncline.LocalSteps,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What can be chosen on the command line."""

    num_steps: int
    update: Update
    output: Path
    is_resumed: bool


class StopWish:
    """Whether Ctrl-C was pressed. The ranks notice at different moments, so they agree at which step they stop."""

    def __init__(self) -> None:
        self.is_there = False
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self.is_there = True


@dataclass(slots=True, kw_only=True)
class Training:
    """A model that learns, and what it has learnt from so far."""

    options: Options
    fleet: syncline.Fleet
    corpus: Corpus
    model: GPT
    optimizer: syncline.DistributedOptimizer
    step: int = 0
    """Number of steps done."""
    losses: dict[int, float] = field(default_factory=dict)
    """Mean loss of all ranks, by number of steps done."""


def build(options: Options, fleet: syncline.Fleet) -> Training:
    """Make the model and its optimizer as for one process, and let Syncline distribute them."""
    if fleet.world_size > NUM_SEQUENCES:
        raise ConfigurationError(
            f"a batch has {NUM_SEQUENCES} sequences, so at most as many ranks, not {fleet.world_size}"
        )
    torch.manual_seed(SEED)
    model = GPT(GPTShape())
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    model, optimizer = syncline.distribute(model, adamw, update=UPDATES[options.update](), samples="batch")
    return Training(options=options, fleet=fleet, corpus=load_corpus(), model=model, optimizer=optimizer)


def train_step(training: Training) -> Tensor:
    """Do one step, as in any PyTorch program; returns this rank's part of the mean loss."""
    options, fleet, context_length = training.options, training.fleet, training.model.shape.context_length
    for group in training.optimizer.param_groups:
        group["lr"] = LEARNING_RATE * rate_factor(training.step, options.num_steps)
    batch = training.corpus.batch(num_sequences=NUM_SEQUENCES, context_length=context_length, seed=training.step)
    inputs, targets = (part.tensor_split(fleet.world_size)[fleet.rank] for part in batch)
    loss = nats_per_byte(training.model, inputs, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.step += 1
    return loss.detach() * len(inputs) / NUM_SEQUENCES


def rate_factor(step: int, num_steps: int) -> float:
    """Warm up, then fall in a straight line to a twentieth."""
    warm_up = min(1.0, (step + 1) / NUM_WARM_UP_STEPS)
    done = max(0, step - NUM_WARM_UP_STEPS) / max(1, num_steps - NUM_WARM_UP_STEPS)
    return warm_up * (1.0 - 0.95 * min(1.0, done))


class Pace:
    """How fast the training goes, since this object was made."""

    def __init__(self, training: Training) -> None:
        self.first_step = training.step
        self._training = training
        self._began_s = time.monotonic()
        self._waited_before_s = self._waited_s()

    def moment(self) -> Moment:
        """Put the figures for the display together."""
        training, elapsed_s = self._training, time.monotonic() - self._began_s
        num_tokens = (training.step - self.first_step) * NUM_SEQUENCES * training.model.shape.context_length
        return Moment(
            step=training.step,
            loss=training.losses[training.step],
            tokens_per_s=num_tokens / elapsed_s,
            waiting=min(1.0, (self._waited_s() - self._waited_before_s) / elapsed_s),
            update=training.optimizer.progress(),
        )

    def _waited_s(self) -> float:
        return sum(self._training.fleet.statistics().waited_s.values())


def train(training: Training, wish: StopWish, display: Display) -> None:
    """Train to the last step, or until the ranks agree to stop."""
    pace = Pace(training)
    with display:
        display.note(f"training: {training.model.num_parameters:,} parameters, step {training.step} so far")
        while training.step < training.options.num_steps:
            loss = train_step(training)
            is_last = training.step == training.options.num_steps
            if training.step % REPORT_EVERY and not is_last and training.step > pace.first_step + 1:
                continue
            must_stop = report(training, loss, wish)
            display.show(pace.moment())
            if must_stop:
                return
            if training.step % SAVE_EVERY == 0 and not is_last:
                save(training)


def report(training: Training, loss: Tensor, wish: StopWish) -> bool:
    """Tell the other ranks the loss and whether to stop; returns whether any rank wishes to."""
    news = torch.tensor([loss.item(), float(wish.is_there)])
    training.fleet.all_reduce(news)
    training.losses[training.step] = float(news[0])
    syncline.note(loss=news[0])
    return bool(news[1] > 0)


@torch.no_grad()
def validate(training: Training) -> float:
    """Measure the loss on files that are not trained on; every rank takes its part of them."""
    fleet, context_length = training.fleet, training.model.shape.context_length
    batch = training.corpus.validation_batch(num_sequences=NUM_VALIDATION_SEQUENCES, context_length=context_length)
    inputs, targets = (part.tensor_split(fleet.world_size)[fleet.rank] for part in batch)
    total = nats_per_byte(training.model, inputs, targets) * len(inputs) / NUM_VALIDATION_SEQUENCES
    fleet.all_reduce(total)
    return total.item()


def save(training: Training) -> None:
    """Write a checkpoint; any number of ranks on any topology can go on from it."""
    training.optimizer.end_period()
    progress = {"step": training.step, "losses": list(training.losses.items())}
    path = training.options.output / CHECKPOINT
    syncline.save_checkpoint(path, training.model, training.optimizer, extra=progress)


def resume(training: Training) -> None:
    """Go on from the checkpoint."""
    path = training.options.output / CHECKPOINT
    progress = syncline.load_checkpoint(path, training.model, training.optimizer)
    training.step, training.losses = progress["step"], dict(progress["losses"])
    if training.step >= training.options.num_steps:
        raise ConfigurationError(
            f"the checkpoint in {path} has {training.step} steps already; go on with --steps {2 * training.step}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, save, and show what came out."""
    options, wish = parse(arguments), StopWish()
    with syncline.init() as fleet:
        training = build(options, fleet)
        if options.is_resumed:
            resume(training)
        display = choose_display(fleet.rank, first_step=training.step, num_steps=options.num_steps)
        first_step = training.step
        train(training, wish, display)
        save(training)
        if training.step < options.num_steps:
            display.note(f"stopped after step {training.step}; --resume goes on from {options.output}")
            return
        syncline.synchronize()
        closing = Closing(
            losses=training.losses,
            validation_loss=validate(training),
            link_bytes=fleet_link_bytes(fleet),
            num_steps=training.step - first_step,
            digests=parameter_digests(fleet, training.model),
        )
        if fleet.rank == 0:
            show_closing(closing, fleet.topology, training.model, options.output / CHECKPOINT)


def parse(arguments: Sequence[str] | None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", dest="num_steps", type=int, default=DEFAULT_STEPS, help="steps to train in all")
    parser.add_argument("--update", type=Update, default=Update.SHARDED, help="the update rule")
    parser.add_argument("--output", type=Path, default=Path("syncline-demo"), help="where the checkpoint goes")
    parser.add_argument("--resume", dest="is_resumed", action="store_true", help="go on from the checkpoint")
    return Options(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
