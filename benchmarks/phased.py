"""Phased execution by two ranks beside one rank alone: step time where storage takes as long as computing, and longer.

    syncline run --ranks 2 benchmarks/phased.py [--stages 8] [--steps 6] [--micro-batches 1 4] [--out FILE]

Neither the computing nor the storage is this machine's: a stage *waits on a timer*, as a host waits for its
accelerator, and a disk delivers so many bytes a second, by a timer too. Files, messages and updates are real. Each rank
has a disk of its own. Three ways, one after another in each case:

    load, then compute    one rank; it loads a stage, computes it, loads the next one, and stores before it goes on
    prefetch              one rank; a storage thread loads the next stage and stores the last one meanwhile
    phased                two ranks; each has half of the stages on its disk

All three keep at most two stages in memory, compute the forward pass again on the way back, divide a batch into the
same micro-batches, all of which go through a stage each time it is loaded, and read and write the same bytes. Each case
says how long all storage of a step takes one disk, in terms of its computing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import syncline
from syncline.updates.phased.storage import Folder

NUM_ELEMENTS = 1 << 18
WAYS = ("load, then compute", "prefetch", "phased")


class Timer(torch.autograd.Function):
    """Passes values and gradients through, after a while."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        """Compute."""
        ctx.seconds, ctx.shape = seconds, weight.shape
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Compute as long."""
        time.sleep(ctx.seconds)
        return gradient, torch.ones(ctx.shape), None


class Stage(nn.Module):
    """1 MiB of parameters, and a timer in place of computing."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_ELEMENTS))
        self.seconds = seconds

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return Timer.apply(values, self.weight, self.seconds)


class Disk(Folder):
    """A folder on a disk of so many bytes a second."""

    def __init__(self, path: str | Path, bytes_per_s: float) -> None:
        super().__init__(path)
        self._bytes_per_s = bytes_per_s

    def _wait(self, num_bytes: int, start_s: float) -> None:
        time.sleep(max(0.0, start_s + num_bytes / self._bytes_per_s - time.monotonic()))

    def write(self, name: str, tensors: Any, notes: Any) -> int:
        """Write, no faster than the disk."""
        start_s = time.monotonic()
        num_bytes = super().write(name, tensors, notes)
        self._wait(num_bytes, start_s)
        return num_bytes

    def read_into(self, name: str, tensors: Any) -> int:
        """Read, no faster than the disk."""
        start_s = time.monotonic()
        num_bytes = super().read_into(name, tensors)
        self._wait(num_bytes, start_s)
        return num_bytes

    def read(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Read, no faster than the disk."""
        start_s = time.monotonic()
        found, notes = super().read(name)
        self._wait(sum(one.nbytes for one in found.values()), start_s)
        return found, notes


@dataclass(frozen=True)
class Case:
    """``storage`` times as long as all computing of a step is what its storage takes on one disk."""

    optimizer: str
    storage: float
    num_micros: int

    @property
    def num_units(self) -> int:
        """How many times its own size a stage is read and written in a step: parameters twice and once, state ..."""
        return 3 if self.optimizer == "sgd" else 3 + 2 + 2

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=1e-3)
        return torch.optim.Adam(parameters, lr=1e-3)

    def __str__(self) -> str:
        return f"{self.optimizer}, storage {self.storage:g} x computing, {self.num_micros} micro-batches"


class Alone:
    """One rank that has all stages on its disk."""

    def __init__(self, case: Case, num_stages: int, seconds: float, disk: Disk, *, prefetches: bool) -> None:
        self._case, self._num_stages, self._disk, self._prefetches = case, num_stages, disk, prefetches
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1)
        self._loads: dict[int, Future[dict[str, torch.Tensor]]] = {}
        self._states: dict[int, Future[Any]] = {}
        self._with_state: set[int] = set()
        for number in range(num_stages):
            disk.write(f"stage-{number}", {"weight": torch.zeros(NUM_ELEMENTS)}, {})

    def step(self, values: torch.Tensor) -> None:
        """Make a step."""
        last = self._num_stages - 1
        order = [*range(self._num_stages), *reversed(range(last))]
        kept: dict[int, list[torch.Tensor]] = {}
        micros = list(values.chunk(self._case.num_micros))
        gradients: list[torch.Tensor | None] = [None] * len(micros)
        for place, number in enumerate(order):
            is_backward = place >= last
            weight = self._stage(number)
            following = order[place + 1] if place + 1 < len(order) else 0
            if self._prefetches:
                self._begin_load(following)
                if is_backward:
                    self._begin_state(number)
            stage = Stage(self._seconds)
            stage.weight.data = weight["weight"]
            if not is_backward:
                kept[number] = micros
                with torch.no_grad():
                    micros = [stage(micro) for micro in micros]
                continue
            for place_in_batch, micro in enumerate(kept.pop(number, micros)):
                given = micro.detach().requires_grad_()
                output = stage(given)
                gradient = gradients[place_in_batch]
                output.backward(torch.ones_like(output) if gradient is None else gradient)
                gradients[place_in_batch] = given.grad
            self._update(number, stage)
        if not self._prefetches:
            self._loads.clear()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _run(self, job: Callable[[], Any]) -> Future[Any]:
        future = self._thread.submit(job)
        if not self._prefetches:
            future.result()
        return future

    def _begin_load(self, number: int) -> None:
        if number not in self._loads:
            into = {"weight": torch.empty(NUM_ELEMENTS)}
            self._loads[number] = self._run(lambda: (self._disk.read_into(f"stage-{number}", into), into)[1])

    def _begin_state(self, number: int) -> None:
        if number in self._with_state and number not in self._states:
            self._states[number] = self._run(lambda: self._disk.read(f"state-{number}")[0])

    def _stage(self, number: int) -> dict[str, torch.Tensor]:
        self._begin_load(number)
        return self._loads.pop(number).result()

    def _update(self, number: int, stage: Stage) -> None:
        self._begin_state(number)
        optimizer = self._case.make_optimizer(stage.parameters())
        if number in self._states:
            optimizer.state[stage.weight] = dict(self._states.pop(number).result())
        optimizer.step()
        weight = {"weight": stage.weight.detach()}
        state = {key: value for key, value in optimizer.state[stage.weight].items() if value is not None}
        self._run(lambda: self._disk.write(f"stage-{number}", weight, {}))
        if state:
            self._with_state.add(number)
            self._run(lambda: self._disk.write(f"state-{number}", state, {}))


def measure(step: Callable[[], Any], num_steps: int) -> list[float]:
    """Return the seconds of steps, after two that count for nothing."""
    times = []
    for _ in range(2 + num_steps):
        start_s = time.monotonic()
        step()
        times.append(time.monotonic() - start_s)
    return times[2:]


def run_case(fleet: syncline.Fleet, case: Case, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Measure all ways; what rank 0 measured is the result."""
    seconds, num_stages = args.stage_ms / 1e3, args.stages
    computing_s = case.num_micros * seconds * (3 * num_stages - 1)
    rate = case.num_units * num_stages * NUM_ELEMENTS * 4 / (case.storage * computing_s)
    values = torch.zeros(4 * case.num_micros, 64)
    times: dict[str, list[float]] = {}
    if fleet.rank == 0:
        for way in WAYS[:2]:
            place = Path(folder) / way
            alone = Alone(case, num_stages, seconds, Disk(place, rate), prefetches=way == "prefetch")
            times[way] = measure(partial(alone.step, values), args.steps)
            alone.close()
    fleet.barrier()
    before_s = fleet.statistics().waited_s
    trainer = syncline.phase(
        [Stage(seconds) for _ in range(num_stages)],
        case.make_optimizer,
        loss=lambda output, _: output.mean(),
        storage=Disk(Path(folder) / f"rank {fleet.rank}", rate),
        micro_batches=case.num_micros,
    )
    times["phased"] = measure(lambda: trainer.step(values, values), args.steps)
    trainer.synchronize()
    found = trainer.statistics()
    return {
        "case": str(case),
        "computing_s": computing_s,
        "disk_bytes_per_s": rate,
        "step_s": times,
        "phased": {
            "peak_parameter_bytes": found.peak_parameter_bytes,
            "largest_stage_bytes": found.largest_stage_bytes,
            "waiting_s": {
                reason: seconds - before_s.get(reason, 0.0)
                for reason, seconds in fleet.statistics().waited_s.items()
                if reason.startswith("stage's")
            },
        },
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--stage-ms", type=float, default=20.0, help="of computing a stage forward; backward as long")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [("sgd", 1.0), ("adam", 1.0), ("sgd", 2.0)]
    cases = [Case(*kind, num_micros) for num_micros in args.micro_batches for kind in kinds]
    with tempfile.TemporaryDirectory(prefix="syncline-phased-") as folder, syncline.init(timeout_s=120) as fleet:
        results = [run_case(fleet, case, args, f"{folder}/{number}") for number, case in enumerate(cases)]
        if fleet.rank:
            return
    print(
        f"{'step in s, median (least to most)':48}"
        + "".join(f"{way:>26}" for way in WAYS)
        + f"{'phased / first':>16}{'prefetch / phased':>20}"
    )
    for result in results:
        medians = {way: statistics.median(times) for way, times in result["step_s"].items()}
        cells = [
            f"{medians[way]:.3f} ({min(times):.3f} to {max(times):.3f})" for way, times in result["step_s"].items()
        ]
        ratio = medians["phased"] / medians[WAYS[0]]
        gain = medians["prefetch"] / medians["phased"]
        print(f"{result['case']:48}" + "".join(f"{cell:>26}" for cell in cells) + f"{ratio:>16.2f}{gain:>20.2f}")
    if args.out:
        about = {"torch": torch.__version__, "python": platform.python_version(), "kernel": platform.release()}
        settings = {"stages": args.stages, "steps": args.steps, "stage_ms": args.stage_ms, "micros": args.micro_batches}
        args.out.write_text(json.dumps({"settings": settings, "versions": about, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
