"""What ranks of an elastic job have logged, held together with each other and with one process that replays it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from elastic_process import batch, loss_of, make_model, make_optimizer


def read_logs(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the entries of each rank."""
    paths = sorted(folder.glob("rank*.jsonl"))
    return {int(path.stem[4:]): [json.loads(line) for line in path.read_text().splitlines()] for path in paths}


def check_equal(logs: dict[int, list[dict[str, Any]]]) -> dict[int, list[int]]:
    """See that all who ended a step have the same parameters after it; return whose batches counted in which step."""
    counted: dict[int, list[int]] = {}
    for step in range(max(len(entries) for entries in logs.values())):
        entries = [log[step] for log in logs.values() if len(log) > step]
        assert len({entry["digest"] for entry in entries}) == 1, f"ranks differ after step {step}: {entries}"
        told = [entry["counted"] for entry in entries]
        assert all(one == told[0] for one in told), f"ranks tell of other members in step {step}: {told}"
        counted[step] = told[0]
    return counted


def replay(counted: dict[int, list[int]]) -> dict[str, torch.Tensor]:
    """Train in one process over the union of the batches that counted; return the parameters."""
    model = make_model()
    optimizer = make_optimizer(model)
    for step, members in counted.items():
        optimizer.zero_grad()
        batches = [batch(rank, step) for rank in members]
        num_samples = sum(len(one) for one in batches)
        for one in batches:  # batch norm in training sees each rank's batch by itself
            (loss_of(model, one) * (len(one) / num_samples)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check_replayed(folder: Path, rank: int, counted: dict[int, list[int]]) -> None:
    """See that a rank's last parameters are those of the replay; Adam turns rounding of a zero gradient into 1e-9."""
    saved = torch.load(folder / f"rank{rank}.pt")
    for name, value in replay(counted).items():
        torch.testing.assert_close(saved[name], value, rtol=1e-9, atol=1e-7)
