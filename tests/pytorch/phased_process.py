"""One rank of a phased model as a process of its own, over loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import torch
from phased_models import make_batches, make_stages, squared, train_alone

import syncline
from syncline.errors import PeerLostError

NUM_STAGES = 6


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def train() -> None:
    """Train with stages that are built here, end without close(), and compare with one process."""
    fleet = syncline.init()
    batches = make_batches(5, fleet.world_size // 2)
    makers = [lambda number=number: make_stages(NUM_STAGES)[number] for number in range(NUM_STAGES)]
    trainer = syncline.phase(makers, adam, loss=squared)
    assert trainer.partner == fleet.rank ^ 1
    losses = [trainer.step(*step[fleet.rank // 2]) for step in batches]
    reference = make_stages(NUM_STAGES)
    expected = train_alone(reference, adam, batches)
    for loss, step in zip(losses, expected, strict=True):
        assert abs(loss - step[fleet.rank // 2]) < 1e-12
    for number, state in trainer.stage_states():
        for name, value in reference[number].state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
    statistics = fleet.statistics()
    assert statistics.updates == (trainer.statistics(),)
    assert "stage's input" in statistics.waited_s
    trainer.step(*batches[0][fleet.rank // 2])
    print("final", flush=True)  # updates of the last step are under way when the interpreter ends


def train_with_trace() -> None:
    """Train with a trace, and leave nothing behind."""
    path = Path(sys.argv[2]) / f"trace-{os.environ['RANK']}.json"
    tempfile.tempdir = sys.argv[2]  # where others' programs leave nothing
    before = {thread.name for thread in threading.enumerate()}
    with syncline.init(trace=path):
        trainer = syncline.phase(make_stages(NUM_STAGES), adam, loss=squared)
        for step in make_batches(2, 1):
            trainer.step(*step[0])
    assert {thread.name for thread in threading.enumerate()} == before
    assert not list(Path(trainer._setting.storage.place).glob("tmp*"))


def die() -> None:
    """Rank 1 is killed in the middle of a step; all others are told so."""
    fleet = syncline.init()
    stages = make_stages(NUM_STAGES)
    if fleet.rank == 1:
        num_calls = 0

        def count(*_: object) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 9:
                os._exit(7)

        stages[3].register_forward_hook(count)
    trainer = syncline.phase(stages, adam, loss=squared, storage=sys.argv[2])
    try:
        for _ in range(50):
            trainer.step(*make_batches(1, 2)[0][fleet.rank // 2])
    except PeerLostError as error:
        print(f"told of rank {error.rank}: {error}", flush=True)


def die_at_once() -> None:
    """Each rank kills itself, as the kernel does where memory is short, while stages lie in temporary files."""
    tempfile.tempdir = sys.argv[2]
    fleet = syncline.init()
    trainer = syncline.phase(make_stages(NUM_STAGES), adam, loss=squared)
    for step in make_batches(2, 1):
        trainer.step(*step[0])
    storage = trainer._setting.storage
    trainer.synchronize()
    _, notes = storage.read(f"stage-{fleet.rank:04d}.parameters")
    print(f"stored in step {notes['step']} at {storage.place}", flush=True)
    with contextlib.suppress(PeerLostError):  # who goes on first does not wait for the other to know
        fleet.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": train, "trace": train_with_trace, "die": die, "kill": die_at_once}[sys.argv[1]]()
