"""Training steps: every method steps the same model on the same batch, some steps in a row, in turns.

A method may let one step's communication run under the next step's computation, so steps are timed in a row:
``NUM_LEADING`` steps that are not timed, then those that are. What the last of them leaves under way is waited
for outside the time, as what the step before them left was waited for inside it. The first step of a row waits for
nothing, so the second one finds more under way than later ones do: neither is timed. Ranks begin a row some
milliseconds apart, which the slowest rank's time contains: the longer the row, the less it weighs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch.distributed as dist
from torch import Tensor

from syncline import Fleet
from syncline.bench.ranks.methods import DIVIDED, OWN, PEERS, Trainee
from syncline.bench.ranks.model import build_batch, loss_of
from syncline.bench.ranks.timing import Carried, LinkMeter, measure_rounds, predicted_s, predicted_step_s, wire_bound_s
from syncline.bench.rows import COMPUTE_ALONE, Row
from syncline.bench.task import Task
from syncline.schedule import Collective

NUM_LEADING = 2

Batch = tuple[Tensor, Tensor]


def measure_training(task: Task, fleet: Fleet) -> Iterator[list[Row]]:
    """Build every method once, and measure all of them in turns; the rows are complete on rank 0."""
    batch = build_batch(task.shape, fleet.rank)
    chosen = {COMPUTE_ALONE, *(task.methods or OWN)}
    trainees = {name: build(task.shape) for name, build in OWN.items() if name in chosen}
    peers = [PEERS[name] for name in task.peers]
    groups = {backend: dist.new_group(backend=backend) for backend in dict.fromkeys(peer.backend for peer in peers)}
    trainees |= {peer.title: peer.build(task.shape, groups[peer.backend]) for peer in peers}
    timed = {name: partial(_time_steps, trainee, batch, task.num_steps) for name, trainee in trainees.items()}
    seconds = measure_rounds(timed, pace=task.pace)
    meter = LinkMeter(fleet.rank)
    carried = {
        name: meter.measure(partial(_run_steps, trainee, batch, task.num_steps)) for name, trainee in trainees.items()
    }
    num_bytes = sum(parameter.nbytes for parameter in trainees[COMPUTE_ALONE].model.parameters())
    rows = [_row(task, fleet, name, num_bytes, seconds[name], carried[name]) for name in trainees]
    median_s = rows[0].median_s
    yield [_with_compute(row, median_s) for row in rows]


def _row(task: Task, fleet: Fleet, name: str, num_bytes: int, seconds: tuple[float, ...], carried: Carried) -> Row:
    per_step = carried.per_step(task.num_steps)
    return Row(
        subject="training step",
        order=task.order,
        size_bytes=num_bytes,
        method=name,
        times_s=seconds,
        bound_s=wire_bound_s(fleet, Collective.ALL_REDUCE, num_bytes),
        predicted_s=_predict_wire(fleet, name, num_bytes) if name in OWN and name != COMPUTE_ALONE else None,
        link_bytes=per_step.link_bytes,
        sent_bytes=per_step.sent_bytes,
        num_dropped=per_step.num_dropped,
        num_resent=per_step.num_resent,
    )


def _with_compute(row: Row, compute_s: float) -> Row:
    return Row.from_dict({**row.to_dict(), "compute_s": compute_s})


def _predict_wire(fleet: Fleet, name: str, num_bytes: int) -> float:
    """Predict the communication of one step alone, as if its buckets were one."""
    if name in DIVIDED:
        return predicted_step_s(fleet, num_bytes)
    schedule = fleet.communicator.plan(Collective.ALL_REDUCE, num_bytes)
    return predicted_s(fleet, schedule, num_bytes)


def _time_steps(trainee: Trainee, batch: Batch, num_steps: int) -> float:
    for _ in range(NUM_LEADING):
        _step(trainee, batch)
    start = time.perf_counter()
    for _ in range(num_steps):
        _step(trainee, batch)
    elapsed = time.perf_counter() - start
    trainee.finish()
    return elapsed / num_steps


def _run_steps(trainee: Trainee, batch: Batch, num_steps: int) -> None:
    for _ in range(num_steps):
        _step(trainee, batch)
    trainee.finish()


def _step(trainee: Trainee, batch: Batch) -> None:
    inputs, targets = batch
    loss_of(trainee.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
