"""Time to a loss as ``syncline bench convergence`` predicts it, beside whole trainings in the lab.

    sudo python benchmarks/convergence_whole.py TRAININGS --slowly 3 --to rows.jsonl     # a record's trainings.jsonl

Losses of a record are told by samples in one process, and its steps are predicted; here the same ranks with the same
data train on the emulated network, by DDP on gloo and by rules of this library. Every rank keeps its parameters and the
time after every fourth step, which costs a millisecond, and their mean is judged when all is over: a judgement during
the training would let rounds go on that a step has to wait for. A step computes for at least ``COMPUTE_S``, as it does
in predictions, of which all but the passes themselves is slept: eight ranks share the processors of one machine. These
are too few for passes of 0.1 s; ``--slowly N`` trains in slow motion, with rates divided and computing multiplied by N,
predictions too. The latency of a topology is left out of both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from advise_lab import slowed
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.bench.convergence import METHODS, NETWORKS, REFERENCE, Learning, Method, find_network, load_trainings
from syncline.bench.ranks.learning import make_rule
from syncline.bench.ranks.tasks import TASKS, LearningTask
from syncline.cli.convergence import StepPredictor
from syncline.cli.launcher.scratch import shared_secret
from syncline.lab import operations
from syncline.schedule.period import LEAST_STEPS
from syncline.topology import Topology

COMPUTE_S, FORWARD_PART, WAITED_PART = 0.1, 1 / 3, 0.9
"""A step computes; how much of it is the forward pass; how much of both is waited for, if passes take less."""
EVERY = 4
COMPARED = (REFERENCE, "Sharded", "Sharded int4", "LocalSteps, sites")
OWN_PACE = "LocalSteps, own pace"
FOUND = (OWN_PACE, "LocalSteps, auto")
"""Trained in one process with the period, and the paces, that a network has."""
BY_NAME = {method.name: method for method in METHODS}


def train(task: LearningTask, method: Method, num_steps: int, compute_s: float) -> list[tuple[float, torch.Tensor]]:
    """Return the time and this rank's parameters after every fourth step, and before the first."""
    optimizer: Any = task.make_optimizer(task.model.parameters())
    model: Any
    if method.name == REFERENCE:
        model = DistributedDataParallel(task.model)
    else:
        model, optimizer = syncline.distribute(task.model, optimizer, make_rule(method), samples="batch")
    begun_s = time.monotonic()
    model.register_full_backward_pre_hook(lambda *_: sleep_until(begun_s + WAITED_PART * compute_s))
    dist.barrier()
    kept = [(time.monotonic(), flat(task.model))]
    for step in range(1, num_steps + 1):
        begun_s = time.monotonic()
        loss: Any = task.loss(model, *task.draw(step))
        sleep_until(begun_s + FORWARD_PART * compute_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            kept.append((time.monotonic(), flat(task.model)))
    if method.name != REFERENCE:
        optimizer.end_period()  # who has made its steps follows the others' rounds
    return kept


def sleep_until(end_s: float) -> None:
    """Compute until then, by the monotonic clock."""
    time.sleep(max(0.0, end_s - time.monotonic()))


@torch.no_grad()
def flat(model: torch.nn.Module) -> torch.Tensor:
    """Return a copy of all parameters, one after the other."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def run_rank(row: dict[str, Any], num_steps: int, folder: Path) -> None:
    """Train as one rank of the lab, and write what it kept; at their own pace, slow ranks make fewer steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task_name, method, seed = row["task"], row["method"], row["seed"]
    with syncline.init() as fleet:
        speed = find_network(row["network"]).speeds[fleet.topology.host_of(fleet.rank).name]
        compute_s = row["slowly"] * COMPUTE_S / speed
        if method == OWN_PACE:
            num_steps = LEAST_STEPS + int((num_steps - LEAST_STEPS) * speed)  # before, paces are not known
        task = TASKS[task_name](fleet.rank, fleet.world_size, seed)
        kept = train(task, BY_NAME[method], num_steps, compute_s)
        torch.save(kept, folder / f"{fleet.rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def judge(task_name: str, seed: int, ranks: list[Any]) -> list[tuple[float, int, float]]:
    """Return of every fourth step of the fastest the seconds until it, its number, and the loss of the ranks' mean."""
    task = TASKS[task_name](0, len(ranks), seed)
    sizes = [parameter.numel() for parameter in task.model.parameters()]
    begun_s = max(kept[0][0] for kept in ranks)
    curve = []
    for index, (now_s, _) in enumerate(max(ranks, key=len)[1:], start=1):
        now = [min(kept[1:], key=lambda entry: abs(entry[0] - now_s)) for kept in ranks]
        mean = torch.stack([parameters for _, parameters in now]).mean(0)
        for parameter, values in zip(task.model.parameters(), torch.split(mean, sizes), strict=True):
            parameter.copy_(values.view_as(parameter))
        loss = float(task.loss(task.model, *task.held_out))
        curve.append((max(at_s for at_s, _ in now) - begun_s, index * EVERY, loss))
    return curve


def run_whole(topology: Topology, row: dict[str, Any], num_steps: int) -> list[tuple[float, int, float]]:
    """Train in the lab; return what :func:`judge` does."""
    with tempfile.TemporaryDirectory(prefix="syncline-whole-") as name, shared_secret({}) as secret:
        asked = [json.dumps(row), str(num_steps), name]
        command = [sys.executable, "-m", "syncline", "run", __file__, "rank", *asked]
        if status := operations.run(topology, command, env=secret):
            raise SystemExit(f"{row['task']} by {row['method']} ended with status {status}")
        ranks = [torch.load(Path(name) / f"{rank}.pt") for rank in range(topology.num_ranks)]
        return judge(row["task"], row["seed"], ranks)


def compare(asked: argparse.Namespace) -> None:
    """Write a row for each training: steps and seconds to the loss, as predicted and as they were."""
    network = find_network(asked.network)
    topology = replace(network.topology, root=slowed(network.topology.root, asked.slowly))
    trainings = (each for each in load_trainings(asked.trainings) if each.sites == network.sites)
    found = {
        (each.task, next(filter(each.method.startswith, FOUND), each.method), each.seed): each.learning
        for each in trainings
    }
    done = [json.loads(line) for line in asked.to.read_text().splitlines()] if asked.to.exists() else []
    there = {(row["network"], row["task"], row["method"], row["seed"], row["slowly"]) for row in done}
    for seed, task, name in product(range(asked.seeds), asked.tasks, asked.methods):
        if (asked.network, task, name, seed, asked.slowly) in there:
            continue
        loss = found[task, REFERENCE, seed].curve[-1][1]
        learning = found[task, BY_NAME[name].steps_of or name, seed]
        row = {"network": asked.network, "task": task, "method": name, "seed": seed, "slowly": asked.slowly}
        slowest_s = asked.slowly * COMPUTE_S * (1.0 if name == OWN_PACE else network.slowdown)
        row |= told(topology, name, learning, loss, slowest_s)
        curve = run_whole(topology, row, EVERY * (2 + int(row["steps"] * 1.25) // EVERY))
        whole = Learning(num_bytes=0, curve=tuple((step, loss) for _, step, loss in curve))
        seconds = Learning(num_bytes=0, curve=tuple((second, loss) for second, _, loss in curve))  # type: ignore[misc]
        row |= {"whole_steps": whole.steps_to(loss), "whole_s": seconds.steps_to(loss), "curve": curve}
        with asked.to.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print({key: value for key, value in row.items() if key != "curve"}, flush=True)


def told(topology: Topology, name: str, learning: Learning, loss: float, compute_s: float) -> dict[str, Any]:
    """Return what is predicted."""
    predictor = StepPredictor(topology=topology, num_bytes=learning.num_bytes, compute_s=compute_s)
    step_s, steps = predictor.predict(BY_NAME[name], learning)[0], learning.steps_to(loss)
    assert steps is not None, f"{name} is compared where it comes to the loss"
    return {"target": loss, "step_s": step_s, "steps": steps, "predicted_s": step_s * steps}


def main() -> None:
    """Run one rank, or all that is not there yet."""
    if sys.argv[1:2] == ["rank"]:
        row, num_steps, folder = sys.argv[2:]
        run_rank(json.loads(row), int(num_steps), Path(folder))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainings", type=Path)
    parser.add_argument("--tasks", nargs="*", default=["gpt", "digits-by-label"], choices=list(TASKS))
    parser.add_argument("--methods", nargs="*", default=list(COMPARED), choices=[*COMPARED, *FOUND])
    parser.add_argument("--network", default=NETWORKS[0], choices=NETWORKS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--slowly", type=int, default=1)
    parser.add_argument("--to", type=Path, required=True)
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
