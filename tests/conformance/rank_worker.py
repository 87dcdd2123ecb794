"""One rank of a group: runs the programs that it is told, each in a job of its own, and writes down what each gave."""

from __future__ import annotations

import faulthandler
import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from declarations import ALONE, REFERENCE, Program, all_programs
from neutral_run import AloneRun, DdpRun, Run, SynclineRun

import syncline

COLLECTIVE_TIMEOUT_S = 20.0
PROGRAM_TIMEOUT_S = 45.0
"""After this the supervisor ends the group; shortly before, each rank writes where it hangs."""
BUCKET_BYTES = 1000
"""Small, so that small models have several buckets."""


def serve(folder: Path, rule: str, rank: int, world: int, orders: TextIO, answers: TextIO) -> None:
    """Run each program that ``orders`` names (``NAME PORT JOB``: port of the store, number of the job); answer each."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "true"
    programs = all_programs()
    for line in orders:
        name, port, job = line.split()
        os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": f"{rule}-{job}"}
        faulthandler.dump_traceback_later(PROGRAM_TIMEOUT_S - 5)
        result = run_program(programs[name], rule, rank, world, folder / f"{rule}.{world}.{job}.store")
        faulthandler.cancel_dump_traceback_later()
        torch.save(result, result_path(folder, name, rule, rank, world))
        answers.write("done\n")
        answers.flush()


def result_path(folder: Path, name: str, rule: str, rank: int, world: int) -> Path:
    """Where a rank writes what a program gave."""
    return folder / f"{name}.{rule}.{rank}of{world}.pt"


def run_program(program: Program, rule: str, rank: int, world: int, store: Path) -> dict[str, Any]:
    """Return the values and warnings of a program, or how it failed."""
    torch.manual_seed(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with open_run(rule, rank, world, store) as run:
                values = detached(dict(program.script(run)))
        except Exception as error:
            return {
                "error": f"{type(error).__name__}: {error}"[:600],
                "is_refusal": isinstance(error, syncline.SynclineError),
                "traceback": traceback.format_exc()[-3000:],
            }
    return {
        "values": values,
        "warnings": [str(one.message) for one in caught if type(one.message).__module__.startswith("syncline")],
    }


@contextmanager
def open_run(rule: str, rank: int, world: int, store: Path) -> Iterator[Run]:
    """Open a job for one program."""
    shared = store.with_suffix(".folder")
    if rule == ALONE:
        yield AloneRun(0, world, shared)
        return
    if rule == REFERENCE:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        try:
            yield DdpRun(rank, world, shared)
        finally:
            dist.destroy_process_group()
        return
    with syncline.init(timeout=COLLECTIVE_TIMEOUT_S) as fleet:
        yield SynclineRun(fleet, make_rule(rule), shared)


def make_rule(rule: str) -> Any:
    """Return the update rule of that name."""
    if rule == "all_reduce":
        return syncline.AllReduce(bucket_bytes=BUCKET_BYTES)
    if rule == "sharded":
        return syncline.Sharded(bucket_bytes=BUCKET_BYTES)
    return syncline.Sharded(bucket_bytes=BUCKET_BYTES, overlap_forward=True)


def detached(value: Any) -> Any:
    """Return plain copies: what follows must not change them."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor.clone(value.detach()).to_dense() if value.is_sparse else value.detach().clone()
    if isinstance(value, dict):
        return {str(key): detached(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [detached(one) for one in value]
    return value
