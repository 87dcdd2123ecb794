"""All-gather under the next forward pass: step time with priorities, with one class, and with the order reversed.

    syncline lab run two-racks-5-3 [--priorities] -- syncline run benchmarks/forward_overlap.py [--out FILE]

The transfers are real; the computing is not. All ranks of the lab share the processors of one machine, so each layer
*waits on a timer*, as a host waits for its accelerator, and leaves the processor to the network. How long is found out
in the run: steps without any computing give the transfer time, and the layers' timers then add up to as much, one half
of it in the forward pass and one in the backward pass. So the longer of computing and transfer is the same for both,
and a step that takes 1.0 times that hides all of it. The cases take turns in blocks, so that drift meets all alike.

In the reversed case the model lists its layers from last to first, so that urgencies and classes say the opposite of
what the forward pass needs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerator import Timer
from torch import nn

import syncline

WAIT_S = 0.0005
"""A module that is entered so much later than it was called has waited for its parameters."""


REVERSED = "order reversed"
CASES = {
    "one class": None,
    "priorities": syncline.Priorities(measure_steps=3),
    REVERSED: syncline.Priorities(search="equal"),
}


class Layer(nn.Module):
    """``num_bytes`` of parameters, and a timer in place of computing."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_bytes // 4))
        self.seconds = 0.0
        self._called_s = 0.0
        self.register_forward_pre_hook(self._note_call)  # the first hook: those that wait for parameters come after

    def _note_call(self, *_: object) -> None:
        self._called_s = time.monotonic()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Use the parameters, and wait."""
        had_to_wait = time.monotonic() - self._called_s > WAIT_S
        return Timer.apply(values + self.weight[0], self.seconds, had_to_wait)


class Stack(nn.Module):
    """Layers, called in their order and listed in it or in reverse."""

    def __init__(self, num_layers: int, layer_bytes: int, *, is_reversed: bool) -> None:
        super().__init__()
        layers = [Layer(layer_bytes) for _ in range(num_layers)]
        self.listed = nn.ModuleList(reversed(layers) if is_reversed else layers)
        self.is_reversed = is_reversed

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call the layers."""
        for layer in reversed(self.listed) if self.is_reversed else self.listed:
            values = layer(values)
        return values


class Case:
    """One model in training."""

    def __init__(self, options: argparse.Namespace, priorities: Any, *, is_reversed: bool = False) -> None:
        self.model = Stack(options.layers, options.layer_kib << 10, is_reversed=is_reversed)
        self._layers = [layer for layer in self.model.listed if isinstance(layer, Layer)]
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        rule = syncline.Sharded(bucket_bytes=options.layer_kib << 10, overlap_forward=True)
        self.model, self.optimizer = syncline.distribute(self.model, optimizer, rule, priorities=priorities)
        self.step_s: list[float] = []

    def compute(self, seconds: float) -> None:
        """Let a forward pass compute for ``seconds``, and a backward pass too."""
        for layer in self._layers:
            layer.seconds = seconds / len(self._layers)

    def run(self, num_steps: int, fleet: syncline.Fleet) -> list[float]:
        """Return how long each step took; parameters of the last are final before the first begins, as at the end."""
        syncline.synchronize(self.model)
        fleet.barrier()
        marks = [time.monotonic()]
        for _ in range(num_steps):
            self.model(torch.ones(2, 1)).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            marks.append(time.monotonic())
        syncline.synchronize(self.model)
        return [after - before for before, after in pairwise(marks)]


def calibrate(case: Case, fleet: syncline.Fleet, num_steps: int) -> float:
    """Return how long reduce-scatter and all-gather of all buckets take if nothing is computed; rank 0's time."""
    case.compute(0.0)
    case.run(3, fleet)
    found = torch.tensor([statistics.median(case.run(num_steps, fleet))], dtype=torch.float64)
    fleet.broadcast(found)
    return float(found)


def main() -> None:
    """Calibrate, run the cases in turns, and let rank 0 report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--layer-kib", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6, help="in a block")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with syncline.init() as fleet:
        cases = {name: Case(options, CASES[name], is_reversed=name == REVERSED) for name in options.cases}
        transfer_s = calibrate(next(iter(cases.values())), fleet, options.steps)
        for name, case in cases.items():
            case.compute(transfer_s / 2)
            case.run(8 if name == "priorities" else 2, fleet)  # to measure, to search, to see whether classes pay
        for _ in range(options.blocks):
            for case in cases.values():
                case.step_s += case.run(options.steps, fleet)[1:]
        if fleet.rank == 0:
            report(options, cases, transfer_s)


def report(options: argparse.Namespace, cases: dict[str, Case], transfer_s: float) -> None:
    """Print a row for each case, and write the figures."""
    results: dict[str, Any] = {"transfer_s": transfer_s, "compute_s": transfer_s, "cases": {}}
    print(f"transfer {transfer_s:.3f} s, compute {transfer_s:.3f} s a step")
    for name, case in cases.items():
        found = case.optimizer.class_statistics()
        median_s = statistics.median(case.step_s)
        low_s, high_s = min(case.step_s), max(case.step_s)
        print(
            f"{name:15} {median_s:.3f} s ({low_s:.3f} to {high_s:.3f}), {median_s / transfer_s:.2f} x the longer; "
            f"classes {''.join(map(str, found.classes))}"
        )
        model_s = {"predicted_s": found.predicted_s, "one_class_s": found.one_class_s, "measured_s": found.measured_s}
        results["cases"][name] = {"step_s": case.step_s, "classes": found.classes, **model_s}
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
