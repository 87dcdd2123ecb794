"""One rank of a group: runs the programs that it is told, and writes down what each gave."""

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
from declarations import ALONE, REFERENCE, WHOLE, Program, all_programs
from neutral_run import AloneRun, DdpRun, Run, SynclineRun

import syncline

COLLECTIVE_TIMEOUT_S = 20.0
PROGRAM_TIMEOUT_S = 45.0
"""After this the supervisor ends the group; shortly before, each rank writes where it hangs."""
BUCKET_BYTES = 1000
"""Small, so that small models have several buckets."""


class Worker:
    """One rank. It keeps a job of Syncline open over several programs, until one of them fails on any rank."""

    def __init__(self, folder: Path, rule: str, rank: int, world: int) -> None:
        self._folder = folder
        self._rule = rule
        self._rank = rank
        self._world = world
        self._fleet: syncline.Fleet | None = None
        self._job = ""

    def serve(self, orders: TextIO, answers: TextIO) -> None:
        """Run each program that ``orders`` names; answer whether it came to its end.

        An order is ``NAME PORT JOB LAST``: port of the store, number of the job, 1 if the job ends with this program.
        """
        programs = all_programs()
        for line in orders:
            name, port, job, last = line.split()
            os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": f"{self._rule}-{job}"}
            faulthandler.dump_traceback_later(PROGRAM_TIMEOUT_S - 5)
            self._leave_other_job(job)
            result = self.run_program(programs[name], is_last=last == "1")
            faulthandler.cancel_dump_traceback_later()
            torch.save(result, result_path(self._folder, name, self._rule, self._rank, self._world))
            answers.write("failed\n" if "error" in result else "done\n")
            answers.flush()

    def run_program(self, program: Program, *, is_last: bool = True) -> dict[str, Any]:
        """Return the values and warnings of a program, or how it failed."""
        torch.manual_seed(7)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with self._open_run(self._folder / f"{program.name}.{self._rule}.{self._world}", is_last) as run:
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
    def _open_run(self, shared: Path, is_last: bool) -> Iterator[Run]:
        if self._rule == ALONE:
            yield AloneRun(0, self._world, shared)
            return
        if self._rule == REFERENCE:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{shared}.store",
                rank=self._rank,
                world_size=self._world,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
            try:
                yield DdpRun(self._rank, self._world, shared)
            finally:
                dist.destroy_process_group()
            return
        fleet, self._fleet = self._fleet or syncline.init(timeout_s=COLLECTIVE_TIMEOUT_S), None
        try:
            yield SynclineRun(fleet, make_rule(self._rule), shared)
        except BaseException:
            fleet.close(is_failing=True)
            raise
        if is_last:
            fleet.close()
        else:
            self._fleet = fleet

    def _leave_other_job(self, job: str) -> None:
        """Leave a job that failed elsewhere."""
        if self._fleet is not None and job != self._job:
            fleet, self._fleet = self._fleet, None
            fleet.close(is_failing=True)
        self._job = job


def serve(folder: Path, rule: str, rank: int, world: int, orders: TextIO, answers: TextIO) -> None:
    """Be a rank until there are no more orders."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "true"
    os.environ["SYNCLINE_CHECK_STALE"] = "1"  # counts with the overlap alone
    Worker(folder, rule, rank, world).serve(orders, answers)


def result_path(folder: Path, name: str, rule: str, rank: int, world: int) -> Path:
    """Where a rank writes what a program gave."""
    return folder / f"{name}.{rule}.{rank}of{world}.pt"


def make_rule(rule: str) -> Any:
    """Return the update rule of that name."""
    if rule == "all_reduce":
        return syncline.AllReduce(bucket_bytes=BUCKET_BYTES)
    if rule == WHOLE:
        return syncline.Sharded(bucket_bytes=BUCKET_BYTES, align="parameter")
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
