"""What the ranks train that ``benchmarks/kills.py`` kills, and what they write of it, so that it can be replayed.

Each rank writes into a folder, for each step, who counted in it and what the parameters are then, and ends with the
step that the file ``stop`` there names. Gradients are rounded so that means over one to four ranks are exact in any
order, and one process can come to the same bits.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

COMPUTE_S = 0.05
"""A step's computing, on an accelerator that two cores do not have: it is slept."""
GRAIN = 3 * 2.0**-15
"""Gradients are multiples of this: a third of one, and sums of a few of them, are exact in float32."""


def make_plain_model() -> nn.Module:
    """Return the model as all begin with it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))


def make_model() -> nn.Module:
    """Return the model, with gradients that are multiples of the grain."""
    model = make_plain_model()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: (grad / GRAIN).round() * GRAIN)  # type: ignore[no-untyped-call]
    return model


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer that has state; its products are exact."""
    return torch.optim.SGD(parameters, lr=2.0**-5, momentum=0.5)


def loss_of(model: nn.Module, number: int, step: int) -> torch.Tensor:
    """Return the loss of one member's batch: it depends on the number that the member keeps, and on the step."""
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + number))
    return nn.functional.mse_loss(model(batch), batch[:, :8].sin())


def slow_loss_of(model: nn.Module, number: int, step: int) -> torch.Tensor:
    """Return the same as late as an accelerator would."""
    time.sleep(COMPUTE_S)
    return loss_of(model, number, step)


def replay_step(model: nn.Module, optimizer: torch.optim.Optimizer, counted: list[int], step: int) -> None:
    """Make a step of all who counted in it, in one process."""
    optimizer.zero_grad()
    for number in counted:
        loss_of(model, number, step).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= len(counted)
    optimizer.step()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of all bits of tensors."""
    return hashlib.sha256(b"".join(one.detach().contiguous().numpy().tobytes() for one in tensors)).hexdigest()


class StepLog:
    """What one rank writes into ``folder``, a line for each step."""

    def __init__(self, folder: Path) -> None:
        self._stop = folder / "stop"
        self._file = (folder / f"{os.getpid()}-{time.time_ns()}.jsonl").open("w", buffering=1)

    def write(self, step: int, counted: Sequence[int], tensors: Iterable[torch.Tensor], **rest: object) -> None:
        """Write what a step has come to."""
        line = {"step": step, "counted": list(counted), "digest": digest(tensors), **rest, "at_s": time.monotonic()}
        self._file.write(json.dumps(line) + "\n")

    def is_over(self, num_steps: int) -> bool:
        """Whether the file ``stop`` names a step that is made."""
        return self._stop.exists() and num_steps >= int(self._stop.read_text())


def load(path: Path) -> Any:
    """Return a program as a module."""
    sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)


def load_example(name: str) -> Any:
    """Return a program of the folder ``examples``."""
    return load(Path(__file__).parents[1] / "examples" / name)
